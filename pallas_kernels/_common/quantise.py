"""Rows of numbers as 8-bit ones with a scale."""

import jax
import jax.numpy as jnp


def largest(dtype) -> float:
    """The largest number of an 8-bit dtype."""
    return float(jnp.iinfo(dtype).max if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).max)


def row_scale(values: jax.Array, dtype) -> jax.Array:
    """f32[...]: the scale of each row of values [..., dim], absolute maximum / largest of `dtype`; 1 for zeros."""
    top = jnp.max(jnp.abs(values.astype(jnp.float32)), axis=-1)
    return jnp.where(top > 0, top / largest(dtype), 1.0)


def stored(values: jax.Array, scale: jax.Array | None, dtype) -> jax.Array:
    """values * (1 / scale) in `dtype`, saturated and rounded to nearest even; wider dtypes take the values as they are.

    Args: scale: f32 that broadcasts to the values; None for 1.
    """
    if dtype.itemsize > 1:
        return values.astype(dtype)
    # A division by a broadcast scale is a product with its reciprocal on some platforms: say so, and it is on all.
    values = values.astype(jnp.float32) if scale is None else values.astype(jnp.float32) * (1.0 / scale)
    values = jnp.clip(values, -largest(dtype), largest(dtype))
    return (jnp.round(values) if jnp.issubdtype(dtype, jnp.integer) else values).astype(dtype)
