"""Write a step's keys and values into paged caches, in place when the caches are donated."""

import jax
import jax.numpy as jnp

from pallas_kernels._common import float8, ints, shards
from pallas_kernels._common.rows import check_slots


def write_kv(
    k_pages: jax.Array,
    v_pages: jax.Array,
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
) -> tuple[jax.Array, ...]:
    """Store rows at their slots of one layer.

    Args:
      k_pages, v_pages: [pages_total, page_size, kv_heads, k_dim | v_dim], all layers; donate them.
      k, v: [tokens, kv_heads, k_dim | v_dim].
      slots: i32[tokens], page * page_size + offset within the layer; -1, or past the layer's end, writes nothing.
      page_offset: first page of the layer; may be traced.
      num_pages: pages a layer (static), so that no slot reaches the next one; None: all pages after `page_offset`.
      k_scale, v_scale: f32 scalars; the stored value is value * (1 / scale) in float32, saturated and rounded to
        nearest even.
      k_scales, v_scales: f32[pages_total, page_size, kv_heads]; each row of each head gets its own scale,
        absolute maximum / largest stored value, which is written there.
      kv_dtype: what uint8 pages are the bits of, float8_e4m3fn or float8_e5m2; None for other pages.

    Returns: k_pages, v_pages, and k_scales, v_scales if given.
    Raises: ValueError if shapes disagree or one scale of a pair is missing.
    """
    capacity = (k_pages.shape[0] if num_pages is None else num_pages) * k_pages.shape[1]
    check_slots(k_pages)
    held = (slots >= 0) & (slots < capacity)
    rows = jnp.asarray(page_offset, jnp.int32) * k_pages.shape[1] + slots
    kind = float8.kind_of(k_pages, kv_dtype)
    if k_scales is None:
        values = tuple(
            float8.to_stored(_stored(x, scale, kind), k_pages.dtype) for x, scale in ((k, k_scale), (v, v_scale))
        )
        return _put((k_pages, v_pages), values, rows, held)
    # Without the barrier 1 / (top / largest) becomes largest / top: rows would be divided by another scale than theirs.
    scales = jax.lax.optimization_barrier((_row_scale(k, kind), _row_scale(v, kind)))
    values = (
        float8.to_stored(_stored(x, scale[..., None], kind), k_pages.dtype)
        for x, scale in zip((k, v), scales, strict=True)
    )
    return _put((k_pages, v_pages, k_scales, v_scales), (*values, *scales), rows, held)


def _put(pools, values, rows, held):
    return jax.lax.platform_dependent(pools, values, rows, held, cpu=_put_in_turn, default=_scatter)


def _scatter(pools, values, rows, held):
    total = pools[0].shape[0] * pools[0].shape[1]
    rows = jnp.where(held, rows, total)  # past the end: dropped
    flat = [pool.reshape(-1, *pool.shape[2:]) for pool in pools]
    put = [pool.at[rows].set(value, mode="drop") for pool, value in zip(flat, values, strict=True)]
    return tuple(new.reshape(pool.shape) for new, pool in zip(put, pools, strict=True))


def _put_in_turn(pools, values, rows, held):
    """The same, a held row at a time: XLA:CPU copies the whole pool around a scatter whose result has other readers.

    Measured in a 30-layer step of one row, 47 MB of pages, two AVX-512 cores: scatter 332 ms and six copies of the pool
    a layer, this 25 ms and none.
    """
    # row numbers of the held rows, in front: the same for every layer, so XLA computes it once a step
    place = jnp.cumsum(held, dtype=jnp.int32) - 1
    numbers = jnp.arange(rows.shape[0], dtype=jnp.int32)
    order = jnp.sum(jnp.where(held[:, None] & (place[:, None] == numbers[None]), numbers[:, None], 0), axis=0)

    def put(i, pools):
        row = ints.pick(order, i)
        at = ints.pick(rows, row)
        return tuple(ints.put(pool, ints.pick(value, row)[None], at) for pool, value in zip(pools, values, strict=True))

    flat = tuple(pool.reshape(-1, *pool.shape[2:]) for pool in pools)
    flat = shards.varying_like(flat, (values, rows))
    flat = jax.lax.fori_loop(0, jnp.sum(held, dtype=jnp.int32), put, flat)
    return tuple(new.reshape(pool.shape) for new, pool in zip(flat, pools, strict=True))


def _largest(dtype) -> float:
    return float(jnp.iinfo(dtype).max if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).max)


def _row_scale(values, dtype):
    top = jnp.max(jnp.abs(values.astype(jnp.float32)), axis=-1)
    return jnp.where(top > 0, top / _largest(dtype), 1.0)


def _stored(values, scale, dtype):
    if dtype.itemsize > 1:
        return values.astype(dtype)
    # A division by a broadcast scale is a product with its reciprocal on some platforms: say so, and it is on all.
    values = values.astype(jnp.float32) if scale is None else values.astype(jnp.float32) * (1.0 / scale)
    values = jnp.clip(values, -_largest(dtype), _largest(dtype))
    return (jnp.round(values) if jnp.issubdtype(dtype, jnp.integer) else values).astype(dtype)
