"""The TPU attention with scores made a tile ahead: the products of one tile fill the wait for the sums of another.

A tile's scores go through maximum and exponential before they meet the values; in one basic block with the next tile's
scores, which wait for nothing, the matrix units stay busy. Items, blocks and tiles are one stream, so nothing drains
at the end of a request. Source: arXiv:2407.08608, section 3.2 (overlap of products and softmax).
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.attention import tpu_fresh
from pallas_kernels.attention.tpu_copies import item_copies, out_copies, start_block, table_copy, wait_block
from pallas_kernels.attention.tpu_kernel import next_block
from pallas_kernels.attention.tpu_products import finish, fold, is_whole, raw_scores, visible
from pallas_kernels.attention.tpu_records import FIELDS, Item, Refs, Static
from pallas_kernels.attention.tpu_unpack import clear

DEPTH = 3  # blocks and queries held: one attended, one scored, one on its way


def program(static: Static, refs: Refs) -> None:
    """All work items of one core."""
    cores, core = static.config.cores, pl.program_id(0)
    mine = (refs.counts[0] - core + cores - 1) // cores

    def item_of(k) -> Item:
        at = (core + k * cores) * len(FIELDS)
        return Item(*(refs.items[at + f] for f in range(len(FIELDS))))

    if static.writes:
        tpu_fresh.begin(refs)

    @pl.when(mine > 0)
    def _():
        _begin(static, refs, item_of, mine)
        lax.fori_loop(0, mine, lambda k, step: _attend_item(static, refs, item_of, mine, k, step), 0)
        for back in (1, 2):

            @pl.when(mine >= back)
            def _(back=back):
                out_copies(static, refs, core + (mine - back) * cores, lax.rem(mine - back, 2), "wait")

        if static.writes:
            tpu_fresh.end(static, refs)


def _begin(static: Static, refs: Refs, item_of, mine) -> None:
    # the first block scored, the second on its way, the page ids of the third too
    cores, core = static.config.cores, pl.program_id(0)
    first = item_of(0)
    table_copy(static, refs, first.seq, first.begin, 0).start()
    for k in range(DEPTH - 1):

        @pl.when(k < mine)
        def _(k=k):
            item_copies(static, refs, core + k * cores, k, "start")

    table_copy(static, refs, first.seq, first.begin, 0).wait()
    start_block(static, refs, first, first.begin, 0, 0)
    k1, j1 = next_block(item_of, mine, 0, first.begin, first.end)

    @pl.when(k1 < mine)
    def _():
        second = item_of(k1)
        table_copy(static, refs, second.seq, j1, 1).start()
        table_copy(static, refs, second.seq, j1, 1).wait()
        start_block(static, refs, second, j1, 1, 1)
        k2, j2 = next_block(item_of, mine, k1, j1, second.end)

        @pl.when(k2 < mine)
        def _():
            table_copy(static, refs, item_of(k2).seq, j2, 0).start()

    item_copies(static, refs, core, 0, "wait")
    wait_block(static, refs, first, first.begin, 0)
    if static.writes:
        tpu_fresh.put(static, refs, first, first.begin, 0, 0, 0)
    refs.raw[...] = raw_scores(static, refs, 0, 0, 0, _part(static, 0))


def _attend_item(static: Static, refs: Refs, item_of, mine, k, step):
    # step: blocks attended so far
    cores, core = static.config.cores, pl.program_id(0)
    item, place = item_of(k), lax.rem(k, DEPTH)
    refs.top[...] = jnp.full_like(refs.top, -jnp.inf)
    refs.total[...] = jnp.zeros_like(refs.total)
    refs.acc[...] = jnp.zeros_like(refs.acc)

    @pl.when(k + DEPTH - 1 < mine)
    def _():
        item_copies(static, refs, core + (k + DEPTH - 1) * cores, lax.rem(k + DEPTH - 1, DEPTH), "start")

    def block(j, step):
        slots = [lax.rem(step + ahead, DEPTH) for ahead in range(DEPTH)]
        k1, j1 = next_block(item_of, mine, k, j, item.end)
        following = item_of(jnp.minimum(k1, mine - 1))
        k2, j2 = next_block(item_of, mine, k1, j1, following.end)

        @pl.when(k2 < mine)
        def _():
            third, table = item_of(k2), lax.rem(step, 2)
            table_copy(static, refs, third.seq, j2, table).wait()
            start_block(static, refs, third, j2, slots[2], table)
            k3, j3 = next_block(item_of, mine, k2, j2, third.end)

            @pl.when(k3 < mine)
            def _():
                table_copy(static, refs, item_of(k3).seq, j3, 1 - table).start()

        @pl.when((k1 < mine) & (k1 != k))
        def _():
            item_copies(static, refs, core + k1 * cores, lax.rem(k1, DEPTH), "wait")

        @pl.when(k1 < mine)
        def _():
            wait_block(static, refs, following, j1, slots[1])
            if static.writes:
                tpu_fresh.put(static, refs, following, j1, slots[1], lax.rem(k1, DEPTH), lax.rem(k1, 2))

        whole = is_whole(static, item, j)

        @pl.when(jnp.logical_not(whole))
        def _():
            clear(static, refs, item, j, slots[0])

        def tile(t, _):
            last = t + 1 == static.tiles
            following = jnp.where(last, 0, t + 1), jnp.where(last, slots[1], slots[0])
            q_place = jnp.where(last, lax.rem(k1, DEPTH), place)

            @pl.when(whole)
            def _():
                _attend_tile(static, refs, item, j, t, slots[0], place, following, q_place, masked=False)

            @pl.when(jnp.logical_not(whole))
            def _():
                _attend_tile(static, refs, item, j, t, slots[0], place, following, q_place, masked=True)

            return 0

        lax.fori_loop(0, static.tiles, tile, 0)
        return step + 1

    step = lax.fori_loop(item.begin, item.end, block, step)

    @pl.when(k >= 2)
    def _():
        out_copies(static, refs, core + (k - 2) * cores, lax.rem(k, 2), "wait")

    finish(static, refs, lax.rem(k, 2))
    out_copies(static, refs, core + k * cores, lax.rem(k, 2), "start")
    return step


def _attend_tile(
    static: Static, refs: Refs, item: Item, j, t, slot, place, following, q_place, *, masked: bool
) -> None:
    # following: (tile, slot) whose first part is scored at the end, with the queries at `q_place`
    parts = static.config.parts
    seen = visible(static, refs, item, j, place) if masked else None
    state: Any = None
    raws = [refs.raw[...]]
    for part in range(parts):
        if part + 1 < parts:
            raws.append(raw_scores(static, refs, t, slot, place, _part(static, part + 1)))
        keys = _part(static, part)
        mine = None if seen is None else seen[:, keys.start : keys.start + keys.size]
        state = fold(static, refs, t, slot, raws[part], mine, state, keys)
    # after the last product with values, so that the sums of that have something to hide behind
    refs.raw[...] = raw_scores(static, refs, following[0], following[1], q_place, _part(static, 0))
    refs.top[t], refs.total[t], refs.acc[t] = state


def _part(static: Static, part: int) -> pl.Slice:
    keys = static.block_kv // static.config.parts
    return pl.ds(part * keys, keys)
