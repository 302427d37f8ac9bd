"""Rotary position embedding of feature pairs (i, i + dim / 2). Source: arXiv:2104.09864."""

import jax
import jax.numpy as jnp


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """x [tokens, heads, dim] turned by cos, sin f32[tokens, dim / 2]; in float32, the result in x's dtype."""
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)
