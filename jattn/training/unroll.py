"""The loss of an EAGLE-3 head over several draft steps, each fed with the head's own output of the one before.

A head that has only seen the target's features drafts its second token badly: at inference it reads its own. Here row
r of step k is the node k levels below the token r + 1. It attends the rows 0..r of step 0, as a draft does the known
tokens, and its own ancestors, rows r of steps 1..k. Source: arXiv:2503.01840, section 3.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jattn.models.draft_head import DraftHead, Eagle3
from jattn.models.layers import split_heads
from jattn.models.rope import rotate
from jattn.training.dense import positions_of, same_text


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Texts that the target has written, several in a row, with what it computed on them."""

    tokens: jax.Array  # i32[seqs, n]
    segments: jax.Array  # i32[seqs, n], equal within a text
    learn: jax.Array  # bool[seqs, n], tokens that a draft should have predicted: the answers'
    hidden: jax.Array  # [seqs, n, width], as `DraftHead.features` reads it
    logits: jax.Array  # [seqs, n, drafted], the target's, of the head's vocabulary


class Losses(NamedTuple):
    """Means over the learned tokens, f32[steps] each."""

    divergence: jax.Array  # KL of the target's distribution over the head's vocabulary from the head's, nats
    right: jax.Array  # share of tokens that are the head's likeliest; a token outside its vocabulary never is
    kept: jax.Array  # share of chains right up to this step, of those whose every token is learned


class Step(NamedTuple):
    """One unrolled step; row r is the draft of token r + step + 2."""

    logits: jax.Array  # f32[seqs, n, drafted]
    learn: jax.Array  # bool[seqs, n], whether it counts
    right: jax.Array  # bool[seqs, n], whether the head's likeliest token is the text's


def unrolled_loss(head: DraftHead, batch: Batch, *, num_steps: int, decay: float = 0.9) -> tuple[jax.Array, Losses]:
    """Mean over steps of the divergence, step k weighing decay ** k; and what it is made of.

    Raises: TypeError for a head of another kind.
    """
    losses, chain, whole = [], True, True
    steps = list(unrolled(head, batch, num_steps=num_steps))
    for step in steps:
        whole = whole & step.learn
    for at, step in enumerate(steps):
        # row r of this step predicts token r + step + 2, as the target does at token r + step + 1
        divergence = _divergence(step.logits, _shifted(batch.logits, 1 + at))
        chain = chain & step.right
        losses.append((_mean(divergence, step.learn), _mean(step.right, step.learn), _mean(chain, whole)))
    found = Losses(*(jnp.stack(part) for part in zip(*losses, strict=True)))
    weights = decay ** jnp.arange(num_steps, dtype=jnp.float32)
    return jnp.sum(found.divergence * weights) / jnp.sum(weights), found


def unrolled(head: DraftHead, batch: Batch, *, num_steps: int) -> Iterator[Step]:
    """Each step of a chain of the text's own tokens, behind every token at once."""
    if not isinstance(head.body, Eagle3):
        raise TypeError(
            f"a head with a {type(head.body).__name__} body: want Eagle3, the one trained over its own output"
        )
    seqs, n = batch.tokens.shape
    positions, seen = positions_of(batch.segments), same_text(batch.segments)
    keys: list[jax.Array] = []
    values: list[jax.Array] = []
    features, ids = head.features(batch.hidden), head.token_ids()
    for step in range(num_steps):
        tokens = _shifted(batch.tokens, 1 + step)
        features, key, value = _layer(head, tokens, features, positions + step, seen, keys, values)
        keys.append(key)
        values.append(value)
        logits = head.logits(features.reshape(seqs * n, -1)).reshape(seqs, n, -1)
        best = jnp.argmax(logits, axis=-1)
        best = best if ids is None else ids[best]
        inside = (jnp.arange(n) < n - 2 - step)[None] & (_shifted(batch.segments, 2 + step) == batch.segments)
        learn = _shifted(batch.learn, 2 + step) & inside
        yield Step(logits, learn, best == _shifted(batch.tokens, 2 + step))


def _shifted(x: jax.Array, by: int) -> jax.Array:
    # x[:, i + by], whatever past the end
    return jnp.roll(x, -by, axis=1)


def _divergence(logits, want):
    # sum p (log p - log q), without keeping either
    top = jax.nn.logsumexp(want, axis=-1, keepdims=True)
    p = jnp.exp(want - top)
    return jnp.sum(p * (want - logits), axis=-1) - top[..., 0] + jax.nn.logsumexp(logits, axis=-1)


def _mean(x, where):
    total = jnp.maximum(jnp.sum(where, dtype=jnp.float32), 1.0)
    return jnp.sum(jnp.where(where, x.astype(jnp.float32), 0.0)) / total


def _layer(head: DraftHead, tokens, features, positions, seen, keys, values):
    # -> output [seqs, n, d], keys and values [seqs, n, kv heads, width] of this step
    body = head.body
    assert isinstance(body, Eagle3)
    seqs, n, _ = features.shape
    flat = features.reshape(seqs * n, -1)
    embedded = head.embedded(tokens.reshape(-1))
    both = jnp.concatenate([body.token_norm(embedded), body.hidden_norm(flat)], axis=-1)
    q, k, v = split_heads(body.attn.qkv(both), body.attn.spec)
    phases = body.config.rope(0).phases(positions.reshape(-1), body.config.rope_dim)
    q, k = rotate(q, *phases), rotate(k, *phases)
    q, k, v = (x.reshape(seqs, n, *x.shape[1:]) for x in (q, k, v))
    out = _attend(q, [*keys, k], [*values, v], seen, body.attn.spec.sm_scale or q.shape[-1] ** -0.5)
    x = flat + body.attn.out(out.reshape(seqs * n, -1))
    x = x + body.mlp(body.mlp_norm(x))
    return x.reshape(seqs, n, -1), k, v


def _attend(q, keys, values, seen, sm_scale: float):
    # over the first step's keys that are seen, bool[seqs, n, n], and each row's own key of every later one
    seqs, n, heads, _ = q.shape
    kv_heads = keys[0].shape[2]
    q = q.reshape(seqs, n, kv_heads, heads // kv_heads, -1) * jnp.asarray(sm_scale, q.dtype)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, keys[0], preferred_element_type=jnp.float32)
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    own = [jnp.einsum("bqhgd,bqhd->bhgq", q, key, preferred_element_type=jnp.float32) for key in keys[1:]]
    # no concatenation: the scores are the largest arrays here
    top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, own, jnp.max(scores, axis=-1)))
    weights, own = jnp.exp(scores - top[..., None]), [jnp.exp(x - top) for x in own]
    total = functools.reduce(jnp.add, own, jnp.sum(weights, axis=-1))
    out = jnp.einsum("bhgqk,bkhd->bqhgd", weights.astype(q.dtype), values[0], preferred_element_type=jnp.float32)
    for weight, value in zip(own, values[1:], strict=True):
        out = out + jnp.moveaxis(weight, -1, 1)[..., None] * value[:, :, :, None].astype(jnp.float32)
    out = out / jnp.moveaxis(total, -1, 1)[..., None]
    return out.reshape(seqs, n, heads, -1).astype(q.dtype)
