"""Merge partial attention states over disjoint keys by log-sum-exp weight. Source: arXiv:2205.14135, section 3.1."""

import jax
import jax.numpy as jnp

from pallas_kernels._common import partial_states


def merge_states(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One state from partial ones. (0, -inf) is the neutral state; +inf counts as -inf.

    Args: out: [splits, ..., v_dim], float. lse: f32[splits, ...], natural log.
    Returns: out [..., v_dim] in `out.dtype`, lse f32[...].
    Raises: ValueError if the shapes disagree.
    """
    partial_states.check(out, lse)
    lse = jnp.where(lse == jnp.inf, -jnp.inf, lse.astype(jnp.float32))
    top = jnp.max(lse, axis=0)
    safe = jnp.where(top == -jnp.inf, 0.0, top)  # all empty: exp(-inf - 0) = 0, not NaN
    weights = jnp.exp(lse - safe[None])
    total = jnp.sum(weights, axis=0)
    seen = total > 0
    parts = jnp.where(weights[..., None] > 0, out.astype(jnp.float32), 0.0)  # an empty part may hold anything
    merged = jnp.sum(weights[..., None] * parts, axis=0) / jnp.where(seen, total, 1.0)[..., None]
    return merged.astype(out.dtype), jnp.where(seen, safe + jnp.log(jnp.where(seen, total, 1.0)), -jnp.inf)


def apply_sinks(out: jax.Array, lse: jax.Array, sinks: jax.Array) -> jax.Array:
    """out * exp(lse) / (exp(lse) + exp(sink)): one more logit a head, in the denominator only.

    Args: out: [..., heads, v_dim], without sinks. lse: f32[..., heads]. sinks: f32[heads].
    Returns: like `out`; 0 where lse is -inf.
    """
    if sinks.shape != lse.shape[-1:]:
        raise ValueError(f"sinks.shape={sinks.shape} but lse.shape={lse.shape}: want one sink a head (last axis)")
    gap = sinks.astype(jnp.float32).reshape((1,) * (lse.ndim - 1) + sinks.shape) - lse
    keep = jnp.where(lse == -jnp.inf, 0.0, 1.0 / (1.0 + jnp.exp(gap)))
    return (out.astype(jnp.float32) * keep[..., None]).astype(out.dtype)
