"""Put rows into paged pools, in place when the pools are donated."""

import jax
import jax.numpy as jnp

from pallas_kernels._common import ints, shards


def put_rows(
    pools: tuple[jax.Array, ...], values: tuple[jax.Array, ...], rows: jax.Array, held: jax.Array
) -> tuple[jax.Array, ...]:
    """Store values[i] at rows[i] of each pool, where held[i].

    Args: pools: [pages, page_size, ...] each; donate them. values: [tokens, ...] each, in the pool's dtype.
      rows: i32[tokens], page * page_size + offset. held: bool[tokens]; no row is held twice.
    Returns: the pools.
    """
    return jax.lax.platform_dependent(pools, values, rows, held, cpu=_put_in_turn, default=_scatter)


def _scatter(pools, values, rows, held):
    # By page and row: on a TPU a view of small pages as rows has other tiles, and would be a copy of the pool.
    num_pages, page_size = pools[0].shape[:2]
    page = jnp.where(held, ints.div(rows, page_size), num_pages)  # past the end: dropped
    row = ints.rem(rows, page_size)
    return tuple(pool.at[page, row].set(value, mode="drop") for pool, value in zip(pools, values, strict=True))


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
