"""Copies of the TPU attention: page ids, queries, results, and the pages of a block."""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention.tpu_records import FIELDS, Item, Refs, Static

_TOGETHER = 16  # pages whose copies start in one basic block
_AT_ONCE = 32  # pages whose copies start among products: those leave the scalar units free


def quotient(x, n: int):
    """x // n for x >= 0: a shift where it can be one, and no code for other signs."""
    return lax.shift_right_logical(x, n.bit_length() - 1) if n & (n - 1) == 0 else lax.div(x, n)


def table_copy(static: Static, refs: Refs, seq, j, slot):
    """The copy of the page ids of block j of a request, and their neighbours."""
    at = seq * static.table_chunks + quotient(j * static.config.block_pages, static.table_chunk)
    ids = refs.table_smem.at[pl.ds(pl.multiple_of(slot * static.table_chunk, static.table_chunk), static.table_chunk)]
    return pltpu.make_async_copy(refs.table.at[at, 0], ids, refs.table_sem.at[slot])


def item_copies(static: Static, refs: Refs, index, place, what: str) -> None:
    """Start or wait for ("start", "wait") what comes with a work item: queries, tree bits, new rows."""
    copies = [pltpu.make_async_copy(refs.q.at[index], refs.q_vmem.at[place], refs.q_sem.at[place])]
    for source, target in ((refs.bits, refs.bits_vmem), (refs.places, refs.places_vmem)):
        if source is not None:
            copies.append(pltpu.make_async_copy(source.at[index], target.at[place], refs.bits_sem.at[place]))
    if refs.fresh is not None:
        rows = refs.fresh.at[pl.ds(refs.items[index * len(FIELDS) + FIELDS.index("row")], static.config.block_q)]
        copies.append(pltpu.make_async_copy(rows, refs.fresh_vmem.at[place], refs.bits_sem.at[place]))
    for copy in copies:
        getattr(copy, what)()


def out_copies(static: Static, refs: Refs, index, place, what: str) -> None:
    """Start or wait for the copies of an item's results."""
    for source, target in ((refs.out_vmem, refs.out), (refs.lse_vmem, refs.lse)):
        getattr(pltpu.make_async_copy(source.at[place], target.at[index], refs.out_sem.at[place]), what)()


def is_held(static: Static, item: Item, j):
    """Whether every page of block j is needed."""
    keys, size = static.keys, static.page_size
    return (item.low < j * keys + size) & (item.high > (j + 1) * keys - size)


def _held_pages(static: Static, item: Item, j):
    # of block j: the first page that is needed, and one past the last
    pages, size = static.config.block_pages, static.page_size
    first = jnp.maximum(quotient(item.low, size) - j * pages, 0)
    last = jnp.minimum(quotient(item.high + size - 1, size) - j * pages, pages)
    return first, last


def _copy_to(refs: Refs, page, target, slot):
    return pltpu.make_async_copy(refs.pool.at[page], target, refs.kv_sem.at[slot])


def arriving(static: Static, refs: Refs):
    """The memory that pages are copied to."""
    return refs.kv_words if static.words else refs.kv_bytes if static.latent else refs.kv


def start_block(static: Static, refs: Refs, item: Item, j, slot, table) -> None:
    """Start copies of the pages of block j to a slot; their ids lie at `table`."""
    pages, whole = static.config.block_pages, is_held(static, item, j)
    several = min(pages, _TOGETHER)

    @pl.when(whole)
    def _():
        lax.fori_loop(0, pages // several, lambda group, _: _start(static, refs, j, group, several, slot, table), 0)

    @pl.when(jnp.logical_not(whole))
    def _():
        first, last = _held_pages(static, item, j)
        lax.fori_loop(first, last, lambda i, _: _start(static, refs, j, i, 1, slot, table), 0)


def starts_at_once(static: Static) -> bool:
    """Whether copies of a block start among the products of another (`start_pages`)."""
    # not with two blocks held, where none is on its way while this one is waited for
    return static.config.unroll_heads and static.config.depth > 2 and static.config.block_pages <= _AT_ONCE


def start_pages(static: Static, refs: Refs, j, slot, table) -> None:
    """`start_block` of all pages of a block, in one basic block."""
    _start(static, refs, j, 0, static.config.block_pages, slot, table)


def _start(static: Static, refs: Refs, j, group, several: int, slot, table) -> int:
    # One address a group, and constants from there: what a copy takes is the scalar code around it.
    first, rows = group * several, several * static.page_size
    base = table * static.table_chunk + (j * static.config.block_pages & static.table_chunk - 1) + first
    offset = refs.counts[1]
    at = group * rows if static.words else pl.multiple_of(group * rows, static.page_size)
    held = arriving(static, refs).at[slot, pl.ds(at, rows)]
    # ids first: a load of scalar memory would wait for the copy before it
    ids = [refs.table_smem[base + i] + offset for i in range(several)]
    for i, page in enumerate(ids):
        _copy_to(refs, page, held.at[pl.ds(i * static.page_size, static.page_size)], slot).start()
    return 0


def wait_block(static: Static, refs: Refs, item: Item, j, slot) -> None:
    """Wait for all pages of block j."""

    def wait(i, _):
        _copy_to(refs, 0, arriving(static, refs).at[slot, pl.ds(0, static.page_size)], slot).wait()
        return 0

    whole = is_held(static, item, j)

    @pl.when(whole)
    def _():
        held = arriving(static, refs).at[slot, pl.ds(0, static.keys)]
        pltpu.make_async_copy(held, held, refs.kv_sem.at[slot]).wait()  # the bytes of all pages at once

    @pl.when(jnp.logical_not(whole))
    def _():
        lax.fori_loop(*_held_pages(static, item, j), wait, 0)
