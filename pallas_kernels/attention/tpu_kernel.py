"""The body of the TPU attention: work items in turn, their pages copied blocks ahead, across items.

Source: arXiv:2205.14135, algorithm 1; arXiv:2309.06180 (paging).
"""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.attention import tpu_fresh, tpu_unpack
from pallas_kernels.attention.tpu_copies import (
    is_held,
    item_copies,
    out_copies,
    start_block,
    start_pages,
    starts_at_once,
    table_copy,
    wait_block,
)
from pallas_kernels.attention.tpu_products import attend_block, finish, is_whole, token_scales
from pallas_kernels.attention.tpu_records import FIELDS, Item, Refs, Static


def program(static: Static, refs: Refs) -> None:
    """All work items of one core."""
    cores, core = static.config.cores, pl.program_id(0)
    refs = refs._replace(core=core)
    busy = refs.counts[0]
    mine = (busy - core + cores - 1) // cores

    def item_of(k) -> Item:
        at = (core + k * cores) * len(FIELDS)
        return Item(*(refs.items[at + f] for f in range(len(FIELDS))))

    if static.writes:
        tpu_fresh.begin(refs)

    @pl.when(mine > 0)
    def _():
        ahead = _begin(static, refs, item_of, mine)
        lax.fori_loop(0, mine, lambda k, ahead: _attend_item(static, refs, item_of, mine, k, ahead), ahead)
        for back in (1, 2):

            @pl.when(mine >= back)
            def _(back=back):
                out_copies(static, refs, core + (mine - back) * cores, mine - back & 1, "wait")

        if static.writes:
            tpu_fresh.end(static, refs)


class _Ahead(NamedTuple):
    """What is known before a block is attended."""

    slot: Any  # where its pages arrive
    side: Any  # where the page ids of the block lie that is to be asked for, `depth` - 1 blocks on
    k: Any  # that block: its item, and
    j: Any  # its number


def _begin(static: Static, refs: Refs, item_of, mine) -> _Ahead:
    # `depth` - 1 blocks on their way, the page ids of the next one too
    first = item_of(0)
    table_copy(static, refs, first.seq, first.begin, 0).start()
    item_copies(static, refs, refs.core, 0, "start")
    table_copy(static, refs, first.seq, first.begin, 0).wait()
    start_block(static, refs, first, first.begin, 0, 0)
    k, j = next_block(item_of, mine, 0, first.begin, first.end)
    side = static.config.depth - 1 & 1
    if static.config.depth == 3:
        second = item_of(jnp.minimum(k, mine - 1))

        @pl.when(k < mine)
        def _(j=j):
            table_copy(static, refs, second.seq, j, 1).start()
            table_copy(static, refs, second.seq, j, 1).wait()
            start_block(static, refs, second, j, 1, 1)

        k, j = next_block(item_of, mine, k, j, second.end)

    @pl.when(k < mine)
    def _():
        table_copy(static, refs, item_of(k).seq, j, side).start()

    return _Ahead(jnp.int32(0), jnp.int32(side), k, j)


def next_block(item_of, mine, k, j, end):
    """The block after block j of item k: (item, block); item == mine past the last."""
    more = j + 1 < end
    following = jnp.where(more, k, k + 1)
    begin = item_of(jnp.minimum(following, mine - 1)).begin
    return following, jnp.where(more, j + 1, begin)


def _attend_item(static: Static, refs: Refs, item_of, mine, k, ahead: _Ahead) -> _Ahead:
    cores, core = static.config.cores, refs.core
    item, place = item_of(k), k & 1
    refs.top[...] = jnp.full_like(refs.top, -jnp.inf)
    refs.total[...] = jnp.zeros_like(refs.total)
    refs.acc[...] = jnp.zeros_like(refs.acc)
    item_copies(static, refs, core + k * cores, place, "wait")

    @pl.when(k + 1 < mine)
    def _():
        item_copies(static, refs, core + (k + 1) * cores, 1 - place, "start")

    ahead = lax.fori_loop(
        item.begin, item.end, lambda j, ahead: _attend(static, refs, item_of, mine, item, j, place, ahead), ahead
    )

    @pl.when(k >= 2)
    def _():
        out_copies(static, refs, core + (k - 2) * cores, place, "wait")

    finish(static, refs, place)
    out_copies(static, refs, core + k * cores, place, "start")
    return ahead


def _attend(static: Static, refs: Refs, item_of, mine, item: Item, j, place, ahead: _Ahead) -> _Ahead:
    # block j of an item, while another is asked for
    slot, side, k2, j2 = ahead
    last = static.config.depth - 1
    free = jnp.where(slot == 0, last, slot - 1)  # where the block before this one was
    third, more = item_of(jnp.minimum(k2, mine - 1)), k2 < mine
    k3, j3 = next_block(item_of, mine, k2, j2, third.end)
    whole = is_whole(static, item, j)
    at_once = more & whole & is_held(static, third, j2) if starts_at_once(static) else False

    @pl.when(more)
    def _():
        table_copy(static, refs, third.seq, j2, side).wait()

    @pl.when(more & jnp.logical_not(at_once))
    def _():
        start_block(static, refs, third, j2, free, side)

    @pl.when(k3 < mine)
    def _():
        table_copy(static, refs, item_of(k3).seq, j3, 1 - side).start()

    wait_block(static, refs, item, j, slot)
    if static.writes:
        tpu_fresh.put(static, refs, item, j, slot, place, place)
    rows = tpu_unpack.unpack(static, refs, slot)
    scales = token_scales(static, refs) if static.row.scales else None

    def attend():
        @pl.when(whole)
        def _():
            attend_block(static, refs, item, j, rows, place, scales, masked=False)

        @pl.when(jnp.logical_not(whole))
        def _():
            tpu_unpack.clear(static, refs, item, j, rows)
            attend_block(static, refs, item, j, rows, place, scales, masked=True)

    if at_once is False:
        attend()
    else:

        @pl.when(at_once)
        def _():
            def start():
                start_pages(static, refs, j2, free, side)

            attend_block(static, refs, item, j, rows, place, scales, masked=False, meanwhile=start)

        pl.when(jnp.logical_not(at_once))(attend)

    return _Ahead(jnp.where(slot == last, 0, slot + 1), 1 - side, k3, j3)
