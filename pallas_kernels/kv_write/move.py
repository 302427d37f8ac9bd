"""Move rows of a paged cache to other slots, in every layer, in place when the cache is donated."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._common import ints
from pallas_kernels.kv_write.tpu_words import move_words


def move_rows(
    pools: tuple[jax.Array, ...], from_slots: jax.Array, to_slots: jax.Array, *, num_pages: int
) -> tuple[jax.Array, ...]:
    """Copy slot from_slots[i] to slot to_slots[i] in each layer of each pool.

    Args:
      pools: [layers * num_pages, page_size, ...] each; donate them.
      from_slots, to_slots: i32[moves], page * page_size + offset within a layer; a move with -1 on either side, or past
        the layer's end, does nothing. No slot may be written twice, and none that is written may be read by a later
        move (moving accepted rows of a tree to the front, in order, is of that kind).
      num_pages: pages a layer.

    >>> pool = jnp.arange(8.0).reshape(4, 2)  # two layers of two pages of two slots
    >>> (moved,) = move_rows((pool,), jnp.array([3, -1]), jnp.array([1, 0]), num_pages=2)
    >>> moved.reshape(2, 4).tolist()
    [[0.0, 3.0, 2.0, 3.0], [4.0, 7.0, 6.0, 7.0]]
    """
    capacity = num_pages * pools[0].shape[1]
    held = (from_slots >= 0) & (from_slots < capacity) & (to_slots >= 0) & (to_slots < capacity)
    held &= from_slots != to_slots
    num_layers = pools[0].shape[0] // num_pages
    moves = dict(default=functools.partial(_by_xla, num_layers=num_layers, capacity=capacity))
    if all(pool.ndim == 5 and pool.dtype == jnp.int32 for pool in pools):  # as `tpu_rows.to_words` has them
        moves["tpu"] = functools.partial(_by_copies, num_layers=num_layers)
    return jax.lax.platform_dependent(pools, from_slots, to_slots, held, **moves)


def _by_copies(pools, sources, targets, held, *, num_layers: int):
    # XLA would lay out anew a pool of words whose tokens are one tile row each, twice
    return tuple(move_words(pool, sources, targets, held, num_layers=num_layers) for pool in pools)


def _by_xla(pools, sources, targets, held, *, num_layers: int, capacity: int):
    flat = tuple(pool.reshape(-1, *pool.shape[2:]) for pool in pools)

    def one_by_one(flat, sources, targets, held):  # as in `write_kv`: XLA:CPU copies the pool around a scatter
        order = jnp.argsort(~held, stable=True)

        def move(i, flat):
            at = ints.pick(order, ints.div(i, num_layers))
            base = capacity * ints.rem(i, num_layers)
            source, target = base + ints.pick(sources, at), base + ints.pick(targets, at)
            return tuple(ints.put(x, jax.lax.dynamic_slice_in_dim(x, source, 1), target) for x in flat)

        return jax.lax.fori_loop(0, num_layers * jnp.sum(held, dtype=jnp.int32), move, flat)

    def together(flat, sources, targets, held):
        base = (capacity * jnp.arange(num_layers, dtype=jnp.int32))[:, None]
        sources = (base + jnp.where(held, sources, 0)[None]).reshape(-1)
        targets = jnp.where(held[None], base + targets[None], flat[0].shape[0]).reshape(-1)
        return tuple(x.at[targets].set(ints.pick(x, sources), mode="drop") for x in flat)

    flat = jax.lax.platform_dependent(flat, sources, targets, held, cpu=one_by_one, default=together)
    return tuple(new.reshape(pool.shape) for new, pool in zip(flat, pools, strict=True))
