"""Write a step's keys and values into a TPU pool of rows, in place when it is donated."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._common import float8, quantise, tpu_rows
from pallas_kernels._common.put import put_rows
from pallas_kernels._common.rows import of_slots
from pallas_kernels.kv_write import xla
from pallas_kernels.kv_write.tpu_words import put_words


def write_kv(
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    *,
    page_offset: jax.Array | int = 0,
    num_pages: int | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
    kv_dtype: jax.typing.DTypeLike | None = None,
    token_scales: bool = False,
) -> tuple[jax.Array | None, ...]:
    """Store rows at their slots of one layer; see `pallas_kernels.kv_write.xla`.

    Args: as there, but for the pool: k_pages [pages_total, page_size, lanes] as `pallas_kernels._common.tpu_rows` has
      it, or int32 words of entries of kv_dtype, and v_pages None. A pool of two arrays is written as plain JAX does.
      token_scales: whether rows hold a scale a head (`Row.scales`), measured here.
    Returns: the pool, and None for its second half.
    """
    where: dict[str, Any] = dict(page_offset=page_offset, num_pages=num_pages)
    if v_pages is not None:
        scales: dict[str, Any] = dict(k_scale=k_scale, v_scale=v_scale, k_scales=k_scales, v_scales=v_scales)
        return xla.write_kv(k_pages, v_pages, k, v, slots, kv_dtype=kv_dtype, **where, **scales)
    rows, held = of_slots(k_pages, slots, page_offset, num_pages)
    values = as_rows(k_pages, k, v, k_scale=k_scale, v_scale=v_scale, kv_dtype=kv_dtype, token_scales=token_scales)
    return put(k_pages, values, rows, held), None


def as_rows(
    pool: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    kv_dtype: jax.typing.DTypeLike | None = None,
    token_scales: bool = False,
) -> jax.Array:
    """Keys and values [tokens, kv_heads, k_dim | v_dim] as a pool of rows or words holds them. Args: as in `write_kv`.

    Raises: ValueError if the pool is not one of such rows.
    """
    words = pool.ndim == 5
    named = kv_dtype is not None and (words or token_scales)
    kind = jnp.dtype(kv_dtype) if named else float8.kind_of(pool, kv_dtype)
    if token_scales:
        # the barrier keeps 1 / (top / largest) from becoming largest / top
        scales = jax.lax.optimization_barrier((quantise.row_scale(k, kind), quantise.row_scale(v, kind)))
        sides = (quantise.stored(x, scale[..., None], kind) for x, scale in zip((k, v), scales, strict=True))
        values = tpu_rows.pack(*sides, *scales)
    else:
        values = tpu_rows.pack(*(quantise.stored(x, scale, kind) for x, scale in ((k, k_scale), (v, v_scale))))
    values = tpu_rows.to_words(values) if words else values
    if values.shape[1:] != pool.shape[2:] or values.dtype != pool.dtype:
        raise ValueError(
            f"a token of k{list(k.shape)}, v{list(v.shape)} is {values.dtype}{list(values.shape[1:])}, of the pool "
            f"{pool.dtype}{list(pool.shape[2:])}: want a cache of this spec"
        )
    return values


def put(pool: jax.Array, values: jax.Array, rows: jax.Array, held: jax.Array) -> jax.Array:
    """Store values[i], as the pool holds them, at rows[i] (i32, of all pages) of the pool, where held[i]."""
    if pool.ndim == 5:
        return put_words(pool, values, rows, held)
    return put_rows((pool,), (values,), rows, held)[0]
