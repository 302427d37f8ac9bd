"""Tolerances earned from plain JAX: the door may be as wrong as twice a dense twin in the same dtype, and an ulp."""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false, reportOptionalSubscript=false, reportCallIssue=false

import functools
from typing import NamedTuple

import float64
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np


class Answer(NamedTuple):
    """What a batch should give, in float64, and how far from it the door may be."""

    out: np.ndarray  # [tokens, q_heads, v_dim]
    lse: np.ndarray  # [tokens, q_heads]
    tolerance: np.ndarray  # like `out`
    lse_tolerance: float


def compare(setup, ins, out, lse):
    """Outputs of real rows against the oracle, within what is earned; padding rows are 0 and -inf."""
    out, lse = np.asarray(out), np.asarray(lse)
    assert out.dtype == jnp.dtype(setup.dtype) and lse.dtype == np.float32
    assert_within(answer(setup, ins), (out, lse))
    assert (out[ins.q_lens.sum() :] == 0).all()


def assert_within(want: Answer, got):
    """Outputs of the first rows of an answer, each within its tolerance."""
    out, lse = (np.asarray(x) for x in got)
    n = len(out)
    error = np.abs(out.astype(np.float64) - want.out[:n])
    earned = want.tolerance[:n]
    assert (error <= earned).all(), (np.nanmax(error), earned.max(), np.argwhere(~(error <= earned))[:5])
    np.testing.assert_allclose(lse, want.lse[:n], rtol=want.lse_tolerance, atol=want.lse_tolerance)


def answer(setup, ins) -> Answer:
    """The oracle's answer to a batch, and the tolerance: twice the error of plain JAX, an ulp of the output, and a
    float32 ulp of the largest output (a sum's error follows its terms, not their sum)."""
    spec, dtype = setup.spec, jnp.dtype(setup.dtype)
    shape = (setup.num_tokens, spec.num_q_heads)
    want, want_lse, seen = np.zeros((*shape, spec.v_head_dim)), np.full(shape, -np.inf), []
    for b, rows in enumerate(ins.rows):
        window = setup.sliding_window
        args = dict(mask=setup.mask, sliding_window=window, tree=ins.trees[b])
        seen.append(float64.visible(int(ins.q_lens[b]), int(ins.seq_lens[b]), **args))
        rules = dict(sm_scale=spec.sm_scale, logit_soft_cap=setup.logit_soft_cap, sinks=ins.sinks)
        want[rows], want_lse[rows] = float64.attend(ins.q[rows], *ins.dense(b), seen[b], **rules)
    peer = np.asarray(twin(setup)(*dense_arrays(setup, ins, seen)), np.float64)
    eps = float(ml_dtypes.finfo(dtype).eps)
    return Answer(
        out=want,
        lse=want_lse,
        tolerance=2 * np.abs(peer - want).max() + eps * np.abs(want) + 2.0**-23 * np.abs(want).max(),
        lse_tolerance=1e-5 if dtype == jnp.float32 else eps,
    )


def dense_arrays(setup, ins, seen):
    """Inputs of the twin: a row's own keys, padded with zeros, and what it may see."""
    spec, longest = setup.spec, setup.max_len
    shape = (setup.num_seqs, longest, spec.num_kv_heads)
    kind = np.dtype(np.float32)  # holds any mix
    if setup.quantised or setup.stored_dtype == jnp.dtype(setup.dtype):
        kind = jnp.dtype(setup.dtype)
    k, v = (np.zeros((*shape, d), kind) for d in (spec.head_dim, spec.v_head_dim))
    k_scale, v_scale = np.ones(shape, np.float32), np.ones(shape, np.float32)
    seq, visible = np.zeros(setup.num_tokens, np.int32), np.zeros((setup.num_tokens, longest), bool)
    for b, rows in enumerate(ins.rows):
        n = ins.seq_lens[b]
        k[b, :n], v[b, :n] = ins.keys[b], ins.values[b]
        k_scale[b, :n], v_scale[b, :n] = ins.k_scales[b], ins.v_scales[b]
        seq[rows], visible[rows, :n] = b, seen[b]
    q = np.where(np.isnan(ins.q.astype(np.float32))[..., :1], ins.q.dtype.type(0), ins.q).astype(kind)
    sinks = np.full(spec.num_q_heads, -np.inf, np.float32) if ins.sinks is None else ins.sinks
    return tuple(map(jnp.asarray, (q, k, v, k_scale, v_scale, sinks, seq, visible)))


@functools.cache
def twin(setup):
    """Plain dense attention: scores and softmax in float32, products of the operands' type."""
    cap, scale, group = setup.logit_soft_cap, setup.spec.sm_scale, setup.group

    @jax.jit
    def run(q, k, v, k_scale, v_scale, sinks, seq, visible):
        k, v, k_scale, v_scale = (jnp.repeat(x, group, axis=2)[seq] for x in (k, v, k_scale, v_scale))
        products = dict(precision="highest", preferred_element_type=jnp.float32)
        scores = jnp.einsum("thd,tkhd->thk", q, k, **products) * scale * jnp.swapaxes(k_scale, 1, 2)
        scores = scores if cap is None else cap * jnp.tanh(scores / cap)
        scores = jnp.where(visible[:, None], scores, -jnp.inf)
        logits = jnp.concatenate([scores, jnp.broadcast_to(sinks[None, :, None], (*scores.shape[:2], 1))], axis=-1)
        top = jnp.max(logits, axis=-1, keepdims=True)
        weights = jnp.exp(logits - jnp.where(top == -jnp.inf, 0.0, top))
        total = jnp.sum(weights, axis=-1, keepdims=True)
        weights = weights[..., :-1] * jnp.swapaxes(v_scale, 1, 2)
        out = jnp.einsum("thk,tkhd->thd", weights.astype(q.dtype), v, **products)
        out = jnp.where(visible.any(axis=1)[:, None, None], out / jnp.where(total > 0, total, 1.0), 0.0)
        return out.astype(setup.dtype)

    return run
