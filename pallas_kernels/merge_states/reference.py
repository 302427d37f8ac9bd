"""Merge of partial attention states, dense and obvious. For tests."""

import jax.numpy as jnp


def merge_states(out, lse):
    """out [splits, ..., v_dim], lse [splits, ...] -> out [..., v_dim], lse [...]; (0, -inf) is the neutral state."""
    lse = jnp.where(jnp.isposinf(lse), -jnp.inf, lse)
    merged_lse = lse[0]
    merged = jnp.where(jnp.isneginf(lse[0])[..., None], 0, out[0]).astype(jnp.float32)
    for part, part_lse in zip(out[1:], lse[1:], strict=True):
        total = jnp.logaddexp(merged_lse, part_lse)
        old = jnp.where(jnp.isneginf(merged_lse), 0.0, jnp.exp(merged_lse - total))
        new = jnp.where(jnp.isneginf(part_lse), 0.0, jnp.exp(part_lse - total))
        part = jnp.where(jnp.isneginf(part_lse)[..., None], 0, part).astype(jnp.float32)
        merged = merged * old[..., None] + part * new[..., None]
        merged_lse = total
    return merged.astype(out.dtype), merged_lse


def apply_sinks(out, lse, sinks):
    """out [..., heads, v_dim], lse [..., heads], sinks [heads] -> out with one more logit a head in its denominator."""
    return (out * jnp.exp(lse - jnp.logaddexp(lse, sinks.reshape((1,) * (lse.ndim - 1) + (-1,))))[..., None]).astype(
        out.dtype
    )
