"""8-bit floats kept as their bits.

XLA:CPU has no 8-bit floats: it turns every op on such an array, gathers and updates included, into float16 and back,
and so converts the whole pool to read one block or to write one row. A pool of uint8 that holds the same bits has none
of that: only the rows that are read or written are converted. Decoding 2048 keys of 3 x 64 out of a pool of 25 million
values took 51 ms to attend and 291 ms to write and attend, and takes 0.9 and 0.6 ms as bits (two AVX-512 cores).
"""

import jax
import jax.numpy as jnp

KINDS = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2))


def kind_of(pool: jax.Array, kv_dtype) -> jnp.dtype:
    """What the entries of a pool are: `kv_dtype` for uint8, the pool's own dtype otherwise.

    Raises: ValueError if a uint8 pool comes without an 8-bit float, or another pool with a dtype that is not its own.
    """
    kind = None if kv_dtype is None else jnp.dtype(kv_dtype)
    if pool.dtype == jnp.uint8:
        if kind is None or kind not in KINDS:
            raise ValueError(
                f"kv_dtype={kind} for pages of uint8: want float8_e4m3fn or float8_e5m2, whose bits they are"
            )
        return kind
    if kind is not None and kind != pool.dtype:
        raise ValueError(f"kv_dtype={kind} for pages of {pool.dtype}: want the same, None, or pages of uint8")
    return pool.dtype


def to_stored(values: jax.Array, stored) -> jax.Array:
    """Values as a pool of dtype `stored` holds them: as bits in uint8."""
    return jax.lax.bitcast_convert_type(values, stored) if values.dtype != stored else values


def from_stored(stored: jax.Array, kind, dtype) -> jax.Array:
    """Bits of 8-bit floats `kind` as values of `dtype`, which must hold them exactly; other arrays as they are."""
    if stored.dtype == kind:
        return stored
    return jax.lax.bitcast_convert_type(stored, kind).astype(dtype)
