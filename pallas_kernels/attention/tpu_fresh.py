"""A step's own keys on TPU: laid over the block that they belong to, and copied from there to the pool.

Copies to HBM move whole tiles of 8 rows, so the rows around a new key come from the block, as they lay in the pool.
They leave from a place of their own, for the block's may be zeroed or reused before they have left.
"""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention.tpu_copies import arriving
from pallas_kernels.attention.tpu_records import Item, Refs, Static

TILE = 8  # rows of a page that are copied at once


def groups_of(block_q: int, step: int, keys: int) -> int:
    """Registers of rows, of `step` rows each, that the new keys of an item touch at most, in blocks of `keys`."""
    return block_q // step + 2 * (-(-block_q // keys) + 1)


def begin(refs: Refs) -> None:
    """Nothing is on its way."""
    for side in range(2):
        refs.staged[side, 0] = 0


def end(static: Static, refs: Refs) -> None:
    """Wait for all that is on its way."""
    for side in range(2):
        _wait(static, refs, side)


def put(static: Static, refs: Refs, item: Item, j, slot, place, k) -> None:
    """Lay the new keys of block j, which has arrived at `slot`, over it, and start their way to the pool.

    Args: place: of the item's new rows in `refs.fresh_vmem`. k: any number of the item's parity.
    """
    side = lax.rem(k, 2)

    @pl.when(j == item.begin)
    def _():
        _wait(static, refs, side)  # of the item before the last
        refs.staged[side, 1] = 0

    low = jnp.maximum(item.first, j * static.keys)
    high = jnp.minimum(item.first + item.rows, (j + 1) * static.keys)

    @pl.when(high > low)
    def _():
        if static.words:
            _put_words(static, refs, item, j, slot, place, side, low, high)
        else:
            _put_rows(static, refs, item, j, slot, place, side, low, high)


def _wait(static: Static, refs: Refs, side) -> None:
    shape = refs.stage.at[side, 0] if static.words else refs.stage.at[side, 0, pl.ds(0, TILE)]

    def wait(_, x):
        pltpu.make_async_copy(shape, shape, refs.stage_sem.at[side]).wait()
        return x

    lax.fori_loop(0, refs.staged[side, 0], wait, 0)
    refs.staged[side, 0] = 0


def _put_words(static: Static, refs: Refs, item: Item, j, slot, place, side, low, high) -> None:
    def one(key, _):
        token = key - item.first
        at = refs.slots[item.row + token]

        @pl.when(at >= 0)
        def _():
            row = refs.fresh_vmem[place, token]
            refs.kv_words[slot, key - j * static.keys] = row
            refs.stage[side, token] = row
            target = refs.pool.at[at // static.page_size, lax.rem(at, static.page_size)]
            pltpu.make_async_copy(refs.stage.at[side, token], target, refs.stage_sem.at[side]).start()
            refs.staged[side, 0] += 1

        return 0

    lax.fori_loop(low, high, one, 0)


def _put_rows(static: Static, refs: Refs, item: Item, j, slot, place, side, low, high) -> None:
    block, step, start = arriving(static, refs), static.step, j * static.keys
    parts = step // TILE
    bits = 32 // parts

    def lay(key, _):
        token, row = key - item.first, key - start
        at = pl.ds(pl.multiple_of(row // step * step, step), step)

        @pl.when(refs.slots[item.row + token] >= 0)
        def _():
            old = pltpu.bitcast(block[slot, at], jnp.int32)  # entries of `parts` rows a word
            new = jnp.broadcast_to(refs.fresh_vmem[place, token], (step, old.shape[1]))
            new = pltpu.bitcast(new.astype(static.arriving), jnp.int32)
            within = lax.rem(row, step)
            here = lax.broadcasted_iota(jnp.int32, old.shape, 0) == within // parts
            mask = jnp.where(here, _part_mask(lax.rem(within, parts), bits), 0)
            block[slot, at] = pltpu.bitcast((old & ~mask) | (new & mask), static.arriving)

        return 0

    lax.fori_loop(low, high, lay, 0)
    first, base = (low - start) // step, refs.staged[side, 1]
    count = (high - 1 - start) // step + 1 - first

    def stage(group, _):
        at = pl.ds(pl.multiple_of((first + group) * step, step), step)
        refs.stage[side, base + group] = block[slot, at]
        return 0

    lax.fori_loop(0, count, stage, 0)
    refs.staged[side, 1] = base + count

    def send(key, _):
        token, row = key - item.first, key - start
        at = refs.slots[item.row + token]
        following = refs.slots[item.row + jnp.minimum(token + 1, item.rows - 1)]
        last = (lax.rem(row, TILE) == TILE - 1) | (key + 1 == high) | (following < 0)

        @pl.when((at >= 0) & last)
        def _():
            rows = pl.ds(pl.multiple_of(lax.rem(row, step) // TILE * TILE, TILE), TILE)
            to = at - lax.rem(at, TILE)
            target = pl.ds(pl.multiple_of(lax.rem(to, static.page_size), TILE), TILE)
            pltpu.make_async_copy(
                refs.stage.at[side, base + row // step - first, rows],
                refs.pool.at[to // static.page_size, target],
                refs.stage_sem.at[side],
            ).start()
            refs.staged[side, 0] += 1

        return 0

    lax.fori_loop(low, high, send, 0)


def _part_mask(part, bits: int):
    # the bits of entry `part` of a word
    ones = (1 << bits) - 1 if bits < 32 else -1
    return lax.shift_left(jnp.int32(ones), part * bits)
