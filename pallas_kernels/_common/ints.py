"""Index arithmetic on values known to be in range.

`//`, `%` and `x[i]` on signed arrays provide for negative values: a dozen more instructions each, in every layer of an
unrolled model, which cost compile time and memory.
"""

import jax
import jax.numpy as jnp
from jax import lax


def div(x: jax.Array, n: int) -> jax.Array:
    """x // n for i32 x >= 0."""
    return lax.div(x, jnp.full(x.shape, n, x.dtype))


def rem(x: jax.Array, n: int) -> jax.Array:
    """x % n for i32 x >= 0."""
    return lax.rem(x, jnp.full(x.shape, n, x.dtype))


def cdiv(x: jax.Array, n: int) -> jax.Array:
    """Smallest integer >= x / n for i32 x >= 0."""
    return div(x + (n - 1), n)


def put(x: jax.Array, part: jax.Array, at: jax.Array) -> jax.Array:
    """x with x[at : at + len(part)] = part; `at` must be in range."""
    return lax.dynamic_update_slice_in_dim(x, part, at, 0, allow_negative_indices=False)


def pick(x: jax.Array, *at: jax.Array) -> jax.Array:
    """x[at]; every index must be in range."""
    return x.at[at].get(mode="promise_in_bounds", wrap_negative_indices=False)


def clipped(x: jax.Array, *at: jax.Array) -> jax.Array:
    """x[at]; an index that is out of range stands for the nearest one."""
    return x.at[at].get(mode="clip", wrap_negative_indices=False)
