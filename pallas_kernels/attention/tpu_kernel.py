"""The body of the TPU attention: work items in turn, their pages copied two blocks ahead across items.

Source: arXiv:2205.14135, algorithm 1; arXiv:2309.06180 (paging).
"""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.attention import tpu_fresh, tpu_unpack
from pallas_kernels.attention.tpu_copies import item_copies, out_copies, start_block, table_copy, wait_block
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
        first = item_of(0)
        table_copy(static, refs, first.seq, first.begin, 0).start()
        item_copies(static, refs, core, 0, "start")
        table_copy(static, refs, first.seq, first.begin, 0).wait()
        start_block(static, refs, first, first.begin, 0, 0)
        k, j = next_block(item_of, mine, 0, first.begin, first.end)

        @pl.when(k < mine)
        def _():
            table_copy(static, refs, item_of(k).seq, j, 1).start()

        lax.fori_loop(0, mine, lambda k, step: _attend_item(static, refs, item_of, mine, k, step), 0)
        for back in (1, 2):

            @pl.when(mine >= back)
            def _(back=back):
                out_copies(static, refs, core + (mine - back) * cores, mine - back & 1, "wait")

        if static.writes:
            tpu_fresh.end(static, refs)


def next_block(item_of, mine, k, j, end):
    """The block after block j of item k: (item, block); item == mine past the last."""
    more = j + 1 < end
    following = jnp.where(more, k, k + 1)
    begin = item_of(jnp.minimum(following, mine - 1)).begin
    return following, jnp.where(more, j + 1, begin)


def _attend_item(static: Static, refs: Refs, item_of, mine, k, step):
    cores, core = static.config.cores, refs.core
    item, place = item_of(k), k & 1
    refs.top[...] = jnp.full_like(refs.top, -jnp.inf)
    refs.total[...] = jnp.zeros_like(refs.total)
    refs.acc[...] = jnp.zeros_like(refs.acc)
    item_copies(static, refs, core + k * cores, place, "wait")

    @pl.when(k + 1 < mine)
    def _():
        item_copies(static, refs, core + (k + 1) * cores, 1 - place, "start")

    def block(j, step):
        slot = step & 1
        k1, j1 = next_block(item_of, mine, k, j, item.end)

        @pl.when(k1 < mine)
        def _():
            following = item_of(k1)
            table_copy(static, refs, following.seq, j1, 1 - slot).wait()
            start_block(static, refs, following, j1, 1 - slot, 1 - slot)
            k2, j2 = next_block(item_of, mine, k1, j1, following.end)

            @pl.when(k2 < mine)
            def _():
                table_copy(static, refs, item_of(k2).seq, j2, slot).start()

        wait_block(static, refs, item, j, slot)
        if static.writes:
            tpu_fresh.put(static, refs, item, j, slot, place, place)
        slot = tpu_unpack.unpack(static, refs, slot)
        scales = token_scales(static, refs) if static.row.scales else None
        whole = is_whole(static, item, j)

        @pl.when(whole)
        def _():
            attend_block(static, refs, item, j, slot, place, scales, masked=False)

        @pl.when(jnp.logical_not(whole))
        def _():
            tpu_unpack.clear(static, refs, item, j, slot)
            attend_block(static, refs, item, j, slot, place, scales, masked=True)

        return step + 1

    step = lax.fori_loop(item.begin, item.end, block, step)

    @pl.when(k >= 2)
    def _():
        out_copies(static, refs, core + (k - 2) * cores, place, "wait")

    finish(static, refs, place)
    out_copies(static, refs, core + k * cores, place, "start")
    return step
