"""The online-softmax carry: running maximum, running sum and running weighted values, all float32.

Source: arXiv:2205.14135, algorithm 1. A row that has seen no key holds (-inf, 0, 0).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Carry(NamedTuple):
    """State of rows [...]: `top` and `total` f32[...], `acc` f32[..., v_dim]."""

    top: jax.Array
    total: jax.Array
    acc: jax.Array


def empty(shape: tuple[int, ...], v_dim: int) -> Carry:
    """The neutral carry of rows `shape`."""
    return Carry(
        jnp.full(shape, -jnp.inf, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, v_dim), jnp.float32),
    )


def weigh(carry: Carry, scores: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Fold scores f32[..., keys] (-inf where masked) into a carry.

    Returns: weights f32[..., keys] relative to the new top, decay f32[...] of what the carry held, new top, new total.
    """
    top = jnp.maximum(carry.top, jnp.max(scores, axis=-1))
    safe = jnp.where(top == -jnp.inf, 0.0, top)  # exp(-inf - -inf) would be NaN; an unseen row weighs 0
    weights = jnp.exp(scores - safe[..., None])
    decay = jnp.exp(carry.top - safe)
    return weights, decay, top, carry.total * decay + jnp.sum(weights, axis=-1)


def finish(carry: Carry, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Output f32[..., v_dim] and natural-log lse f32[...]; (0, -inf) for rows that saw nothing.

    Args: sinks: logits broadcastable to the rows, added to the denominator of the output only; None for none.
    """
    seen = carry.total > 0
    lse = jnp.where(seen, carry.top + jnp.log(jnp.where(seen, carry.total, 1.0)), -jnp.inf)
    if sinks is None:
        return carry.acc / jnp.where(seen, carry.total, 1.0)[..., None], lse
    top = jnp.maximum(carry.top, sinks)
    decay = jnp.where(seen, jnp.exp(carry.top - top), 0.0)
    scale = decay / (carry.total * decay + jnp.exp(sinks - top))
    return carry.acc * jnp.where(seen, scale, 0.0)[..., None], lse
