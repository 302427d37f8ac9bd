"""Runs sequences of plain attention through an MLA layer that computes exactly the same.

The values of all KV heads are the latent and their keys the shared rotated key; a query is zero outside its head's key,
and its value's up-projection picks its head's value.
"""

# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false

import dataclasses

import door
import jax
import jax.numpy as jnp
import numpy as np

import jattn
from jattn import ForwardMode, MLACache, MLASpec
from jattn.combinators.latent_chunks import make_chunks
from jattn.combinators.mla import mla_attend
from jattn.dispatch import AttnForwardMethod as M

FORMS = (M.MLA, M.MHA_ONE_SHOT, M.MHA_CHUNKED_KV)


def spec_of(seq, sm_scale=None) -> MLASpec:
    """The layer of sequences like `seq`: q [tq, hq, d], k [tk, hk, d], v [tk, hk, dv]."""
    (_, heads, dim), (_, kv_heads, v_dim) = seq["q"].shape, seq["v"].shape
    return MLASpec(
        num_q_heads=heads,
        kv_lora_rank=kv_heads * v_dim,
        qk_nope_head_dim=0,
        qk_rope_head_dim=kv_heads * dim,
        v_head_dim=v_dim,
        sm_scale=dim**-0.5 if sm_scale is None else sm_scale,
    )


def queries(q, kv_heads: int):
    """[tokens, heads, kv_heads * dim]: each query in the block of its KV head, zeros elsewhere."""
    tokens, heads, dim = q.shape
    wide = np.zeros((tokens, heads, kv_heads, dim), q.dtype)
    for head in range(heads):
        wide[:, head, head * kv_heads // heads] = q[:, head]
    return wide.reshape(tokens, heads, kv_heads * dim)


def values(spec: MLASpec, kv_heads: int, dtype):
    """w_vc that picks the value of each query head's KV head."""
    picks = np.zeros((spec.num_q_heads, kv_heads, spec.v_head_dim, spec.v_head_dim), np.float32)
    for head in range(spec.num_q_heads):
        picks[head, head * kv_heads // spec.num_q_heads] = np.eye(spec.v_head_dim)
    return jnp.asarray(picks.reshape(spec.num_q_heads, spec.kv_lora_rank, spec.v_head_dim), dtype)


def attend_all(sequences, method: M, *, page_size=4, dtype=jnp.float32, capacity=131072, layer=1):
    """Output of each sequence in float64; the last queries line up with the last keys."""
    spec, kv_heads = spec_of(sequences[0]), sequences[0]["k"].shape[1]
    q_lens, kv_lens = (np.array([len(seq[name]) for seq in sequences]) for name in ("q", "k"))
    if (q_lens > kv_lens).any():
        raise ValueError("a query without a key of its own is not written, so no MLA layer asks for it")
    table, total = door.tables(kv_lens, page_size)
    cache = MLACache.create(spec, num_layers=3, num_pages=total, page_size=page_size, dtype=dtype)
    cache = dataclasses.replace(cache, latent=jnp.full_like(cache.latent, jnp.nan))
    flat = {name: [np.asarray(seq[name]).reshape(len(seq[name]), -1) for seq in sequences] for name in ("k", "v")}
    choice = jattn.resolve(spec, "native", "cpu")
    before = jattn.make_plan(ForwardMode.EXTEND, kv_lens - q_lens, kv_lens - q_lens, table, page_size=page_size)
    held = [[x[: k - q] for x, k, q in zip(flat[name], kv_lens, q_lens, strict=True)] for name in ("v", "k")]
    if before.num_tokens:
        latent, key = (_pack(x, dtype) for x in held)
        cache = jattn.write_kv(latent, key, cache, before, layer=layer, choice=choice)
    plan = jattn.make_plan(ForwardMode.EXTEND, kv_lens, q_lens, table, page_size=page_size)
    chunks = make_chunks(method, kv_lens, q_lens, table, page_size=page_size, capacity=capacity)
    fresh = [[x[k - q :] for x, k, q in zip(flat[name], kv_lens, q_lens, strict=True)] for name in ("v", "k")]
    q = _pack([queries(np.asarray(seq["q"]), kv_heads) for seq in sequences], dtype)
    static = dict(layer=layer, spec=spec, choice=choice, method=method)
    weights = dict(w_kc=jnp.zeros((spec.num_q_heads, 0, spec.kv_lora_rank), dtype), w_vc=values(spec, kv_heads, dtype))
    latent, key = (_pack(x, dtype) for x in fresh)

    def run(q, latent, key, cache, chunks):
        return mla_attend(q[..., :0], q, latent, key, cache, plan, chunks=chunks, **weights, **static)[0]

    out = jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})(q, latent, key, cache, chunks)
    return np.split(np.asarray(out.astype(jnp.float32), np.float64), np.cumsum(q_lens)[:-1])


def _pack(arrays, dtype):
    return jnp.asarray(np.concatenate(arrays), dtype)
