"""The loss of an EAGLE-3 head over several draft steps, each fed with the head's own output of the one before.

A head that has only seen the target's features drafts its second token badly: at inference it reads its own. Here row
r of step k is the node k levels below the token r + 1. It attends the rows 0..r of step 0, as a draft does the known
tokens, and its own ancestors, rows r of steps 1..k. Source: arXiv:2503.01840, section 3.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jattn.models.draft_head import DraftHead, Eagle3
from jattn.models.layers import split_heads
from jattn.models.rope import rotate


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Texts that the target has written, with what it computed on them."""

    tokens: jax.Array  # i32[seqs, n]
    learn: jax.Array  # bool[seqs, n], tokens that a draft should have predicted: the answer's
    hidden: jax.Array  # [seqs, n, width], as `DraftHead.features` reads it
    logits: jax.Array  # [seqs, n, drafted], the target's, of the head's vocabulary


class Losses(NamedTuple):
    """Means over the learned tokens, f32[steps] each."""

    divergence: jax.Array  # KL of the target's distribution over the head's vocabulary from the head's, nats
    right: jax.Array  # share of tokens that are the head's likeliest; a token outside its vocabulary never is


def unrolled_loss(head: DraftHead, batch: Batch, *, num_steps: int, decay: float = 0.9) -> tuple[jax.Array, Losses]:
    """Mean over steps of the divergence, step k weighing decay ** k; and what it is made of.

    Raises: TypeError for a head of another kind.
    """
    if not isinstance(head.body, Eagle3):
        raise TypeError(
            f"a head with a {type(head.body).__name__} body: want Eagle3, the one trained over its own output"
        )
    seqs, n = batch.tokens.shape
    keys: list[jax.Array] = []
    values: list[jax.Array] = []
    features, losses = head.features(batch.hidden), []
    ids = head.token_ids()
    for step in range(num_steps):
        tokens = _shifted(batch.tokens, 1 + step)
        hidden, key, value = _layer(head, tokens, features, step, keys, values)
        keys.append(key)
        values.append(value)
        wide = hidden.reshape(seqs * n, -1)
        logits = head.logits(wide).reshape(seqs, n, -1)
        # row r of this step predicts token r + step + 2, as the target does at token r + step + 1
        want, answer = _shifted(batch.logits, 1 + step), _shifted(batch.tokens, 2 + step)
        learn = _shifted(batch.learn, 2 + step) & (jnp.arange(n) < n - 2 - step)[None]
        losses.append(_compare(logits, want, answer, learn, ids))
        features = hidden
    found = Losses(*(jnp.stack(part) for part in zip(*losses, strict=True)))
    weights = decay ** jnp.arange(num_steps, dtype=jnp.float32)
    return jnp.sum(found.divergence * weights) / jnp.sum(weights), found


def _shifted(x: jax.Array, by: int) -> jax.Array:
    # x[:, i + by], whatever past the end
    return jnp.roll(x, -by, axis=1)


def _compare(logits, want, answer, learn, ids):
    log_q = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    log_p = jax.nn.log_softmax(want.astype(jnp.float32), axis=-1)
    total = jnp.maximum(jnp.sum(learn, dtype=jnp.float32), 1.0)
    best = jnp.argmax(logits, axis=-1)
    best = best if ids is None else ids[best]
    mean = lambda x: jnp.sum(jnp.where(learn, x, 0.0)) / total  # noqa: E731
    return mean(jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)), mean((best == answer).astype(jnp.float32))


def _layer(head: DraftHead, tokens, features, step: int, keys, values):
    # -> output [seqs, n, d], keys and values [seqs, n, kv heads, width] of this step
    body = head.body
    assert isinstance(body, Eagle3)
    seqs, n, _ = features.shape
    flat = features.reshape(seqs * n, -1)
    embedded = head.embedded(tokens.reshape(-1))
    both = jnp.concatenate([body.token_norm(embedded), body.hidden_norm(flat)], axis=-1)
    q, k, v = split_heads(body.attn.qkv(both), body.attn.spec)
    positions = jnp.tile(jnp.arange(n, dtype=jnp.int32) + step, seqs)
    phases = body.config.rope(0).phases(positions, body.config.rope_dim)
    q, k = rotate(q, *phases), rotate(k, *phases)
    q, k, v = (x.reshape(seqs, n, *x.shape[1:]) for x in (q, k, v))
    out = _attend(q, [*keys, k], [*values, v], body.attn.spec.sm_scale or q.shape[-1] ** -0.5)
    x = flat + body.attn.out(out.reshape(seqs * n, -1))
    x = x + body.mlp(body.mlp_norm(x))
    return x.reshape(seqs, n, -1), k, v


def _attend(q, keys, values, sm_scale: float):
    # causal over the first step's keys, and each row's own key of every later one
    seqs, n, heads, _ = q.shape
    kv_heads = keys[0].shape[2]
    q = q.reshape(seqs, n, kv_heads, heads // kv_heads, -1) * jnp.asarray(sm_scale, q.dtype)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, keys[0], preferred_element_type=jnp.float32)
    causal = jnp.tril(jnp.ones((n, n), bool))
    scores = jnp.where(causal[None, None, None], scores, -jnp.inf)
    own = [jnp.einsum("bqhgd,bqhd->bhgq", q, key, preferred_element_type=jnp.float32) for key in keys[1:]]
    weights = jax.nn.softmax(jnp.concatenate([scores, *(x[..., None] for x in own)], axis=-1), axis=-1)
    weights = weights.astype(q.dtype)
    out = jnp.einsum("bhgqk,bkhd->bqhgd", weights[..., :n], values[0])
    for at, value in enumerate(values[1:]):
        out = out + jnp.moveaxis(weights[..., n + at], -1, 1)[..., None] * value[:, :, :, None]
    return out.reshape(seqs, n, heads, -1)
