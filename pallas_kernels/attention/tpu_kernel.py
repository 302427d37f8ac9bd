"""The body of the TPU attention: work items in turn, their pages copied two blocks ahead across items.

Source: arXiv:2205.14135, algorithm 1 (online softmax, here in base 2); arXiv:2309.06180 (paging).
"""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._common.masks import Rules
from pallas_kernels._common.tpu_rows import LANES, Row
from pallas_kernels.attention.tpu_config import Config

LOG2E = math.log2(math.e)
FIELDS = ("seq", "rows", "first", "low", "high", "begin", "end", "tree_start")
"""What a work item is, as int32 in scalar memory: request, query tokens, sequence index of the first, keys that any of
them may see, blocks to go through, and where tree nodes begin."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Static:
    """What is static about a call."""

    config: Config
    rules: Rules
    row: Row
    group: int
    rows: int  # of a product
    page_size: int
    block_kv: int  # keys of a block in whole registers of lanes
    blocks: int  # of a request's table
    table_chunk: int  # page ids fetched at once
    table_chunks: int  # of a request
    tree_words: int  # of tree bits a query, 0 without a tree
    sinks: bool
    compute: Any  # dtype of the products
    kind: Any  # dtype of keys and values
    words: bool  # whether pages hold 32-bit words, a token a tile row

    @property
    def tiles(self) -> int:
        """Groups of KV heads that share products."""
        return self.row.kv_heads // self.config.heads

    @property
    def keys(self) -> int:
        """Keys of a block."""
        return self.config.block_pages * self.page_size

    @property
    def precision(self):
        """float32 is multiplied as such."""
        return lax.Precision.HIGHEST if self.compute == jnp.float32 else None


class Refs(NamedTuple):
    """All memory of a program, in the order of the call's operands, results and scratch."""

    items: Any  # smem i32[fields * items]
    counts: Any  # smem i32[2]: busy items, page offset
    scales: Any  # smem f32[2]: of keys and values
    token_scales: Any  # hbm f32[seqs * blocks, 2 * kv_heads, block_kv]: of keys, then of values; None for one for all
    table: Any  # hbm i32[seqs * chunks, 1, table_chunk]
    q: Any  # hbm [items, tiles, rows, wide_k]
    pool: Any  # hbm [pages, page_size, lanes], or i32[pages, page_size, tiles, 1, 128]
    bits: Any  # hbm i32[items, block_q, lanes]: tree bits, then the query's position; None without a tree
    sinks: Any  # vmem f32[tiles, rows, 128], None without
    places: Any  # hbm i32[items, 1, node_keys]: positions of keys from the first block with nodes on; None: no window
    out: Any  # hbm [items, tiles, rows, wide_v]
    lse: Any  # hbm f32[items, tiles, rows, 128]
    table_smem: Any
    token_scales_vmem: Any  # vmem f32[2, 2 * kv_heads, block_kv]
    kv: Any  # vmem [2, block_kv, lanes]; [1, ...] with words
    kv_words: Any  # vmem i32[2, block_kv, tiles, 1, 128], None without words
    q_vmem: Any  # vmem [2, tiles, rows, wide_k]
    bits_vmem: Any  # vmem i32[2, block_q, lanes]
    places_vmem: Any  # vmem i32[2, 1, node_keys]
    raw: Any  # vmem f32[rows, keys of a part]: scores made ahead; None where none are
    top: Any  # vmem f32[tiles, rows, 128], every lane alike
    total: Any  # vmem f32[tiles, rows, 128], sums of each lane
    acc: Any  # vmem f32[tiles, rows, wide_v]
    out_vmem: Any  # vmem [2, tiles, rows, wide_v]
    lse_vmem: Any
    table_sem: Any
    kv_sem: Any
    q_sem: Any
    scale_sem: Any
    bits_sem: Any
    out_sem: Any
    core: Any  # this program's number


class Item(NamedTuple):
    """One work item's scalars."""

    seq: Any
    rows: Any
    first: Any
    low: Any
    high: Any
    begin: Any
    end: Any
    tree_start: Any


def program(static: Static, refs: Refs) -> None:
    """All work items of one core."""
    cores, core = static.config.cores, pl.program_id(0)
    refs = refs._replace(core=core)
    busy = refs.counts[0]
    mine = (busy - core + cores - 1) // cores

    def item_of(k) -> Item:
        at = (core + k * cores) * len(FIELDS)
        return Item(*(refs.items[at + f] for f in range(len(FIELDS))))

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
                out_copies(static, refs, core + (mine - back) * cores, lax.rem(mine - back, 2), "wait")


def next_block(item_of, mine, k, j, end):
    # the block after block j of item k: (item, block); item == mine past the last
    more = j + 1 < end
    following = jnp.where(more, k, k + 1)
    begin = item_of(jnp.minimum(following, mine - 1)).begin
    return following, jnp.where(more, j + 1, begin)


def _attend_item(static: Static, refs: Refs, item_of, mine, k, step):
    cores, core = static.config.cores, refs.core
    item, place = item_of(k), lax.rem(k, 2)
    refs.top[...] = jnp.full_like(refs.top, -jnp.inf)
    refs.total[...] = jnp.zeros_like(refs.total)
    refs.acc[...] = jnp.zeros_like(refs.acc)
    item_copies(static, refs, core + k * cores, place, "wait")

    @pl.when(k + 1 < mine)
    def _():
        item_copies(static, refs, core + (k + 1) * cores, 1 - place, "start")

    def block(j, step):
        slot = lax.rem(step, 2)
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
        scales = _token_scales(static, refs, slot) if refs.token_scales is not None else None
        if static.words:
            _unpack_words(static, refs, slot)
            slot = 0
        whole = is_whole(static, item, j)

        @pl.when(whole)
        def _():
            _attend_block(static, refs, item, j, slot, place, scales, masked=False)

        @pl.when(jnp.logical_not(whole))
        def _():
            clear(static, refs, item, j, slot)
            _attend_block(static, refs, item, j, slot, place, scales, masked=True)

        return step + 1

    step = lax.fori_loop(item.begin, item.end, block, step)

    @pl.when(k >= 2)
    def _():
        out_copies(static, refs, core + (k - 2) * cores, place, "wait")

    finish(static, refs, place)
    out_copies(static, refs, core + k * cores, place, "start")
    return step


def table_copy(static: Static, refs: Refs, seq, j, slot):
    # the page ids of block j of a request, and their neighbours
    at = seq * static.table_chunks + j * static.config.block_pages // static.table_chunk
    return pltpu.make_async_copy(refs.table.at[at], refs.table_smem.at[slot], refs.table_sem.at[slot])


def item_copies(static: Static, refs: Refs, index, place, what: str) -> None:
    copies = [pltpu.make_async_copy(refs.q.at[index], refs.q_vmem.at[place], refs.q_sem.at[place])]
    for source, target in ((refs.bits, refs.bits_vmem), (refs.places, refs.places_vmem)):
        if source is not None:
            copies.append(pltpu.make_async_copy(source.at[index], target.at[place], refs.bits_sem.at[place]))
    for copy in copies:
        getattr(copy, what)()


def out_copies(static: Static, refs: Refs, index, place, what: str) -> None:
    for source, target in ((refs.out_vmem, refs.out), (refs.lse_vmem, refs.lse)):
        getattr(pltpu.make_async_copy(source.at[place], target.at[index], refs.out_sem.at[place]), what)()


def _held_pages(static: Static, item: Item, j):
    # of block j: the first page that is needed, and one past the last
    pages, size = static.config.block_pages, static.page_size
    first = jnp.maximum(item.low // size - j * pages, 0)
    last = jnp.minimum((item.high + size - 1) // size - j * pages, pages)
    return first, last


def _page_copy(static: Static, refs: Refs, i, page, slot):
    rows = pl.ds(i * static.page_size, static.page_size)
    if not static.words:
        rows = pl.ds(pl.multiple_of(i * static.page_size, static.page_size), static.page_size)
    return pltpu.make_async_copy(refs.pool.at[page], _arriving(static, refs).at[slot, rows], refs.kv_sem.at[slot])


def _arriving(static: Static, refs: Refs):
    return refs.kv_words if static.words else refs.kv


def start_block(static: Static, refs: Refs, item: Item, j, slot, table) -> None:
    """Start copies of the pages of block j to a slot; their ids lie at `table`."""
    pages = static.config.block_pages
    base = lax.rem(j * pages, static.table_chunk)
    first, last = _held_pages(static, item, j)
    if refs.token_scales is not None:
        _scales_copy(static, refs, item, j, slot).start()

    def start(i, _):
        page = refs.table_smem[table, 0, base + i] + refs.counts[1]
        _page_copy(static, refs, i, page, slot).start()
        return 0

    whole = (first == 0) & (last == pages)

    @pl.when(whole)
    def _():
        lax.fori_loop(0, pages, start, 0, unroll=min(pages, 16))

    @pl.when(jnp.logical_not(whole))
    def _():
        lax.fori_loop(first, last, start, 0)


def _scales_copy(static: Static, refs: Refs, item: Item, j, slot):
    source = refs.token_scales.at[item.seq * static.blocks + j]
    return pltpu.make_async_copy(source, refs.token_scales_vmem.at[slot], refs.scale_sem.at[slot])


def wait_block(static: Static, refs: Refs, item: Item, j, slot) -> None:
    first, last = _held_pages(static, item, j)
    if refs.token_scales is not None:
        _scales_copy(static, refs, item, j, slot).wait()

    def wait(i, _):
        _page_copy(static, refs, 0, 0, slot).wait()
        return 0

    whole = (first == 0) & (last == static.config.block_pages)

    @pl.when(whole)
    def _():
        held = _arriving(static, refs).at[slot, pl.ds(0, static.keys)]
        pltpu.make_async_copy(held, held, refs.kv_sem.at[slot]).wait()  # the bytes of all pages at once

    @pl.when(jnp.logical_not(whole))
    def _():
        lax.fori_loop(first, last, wait, 0)


def _unpack_words(static: Static, refs: Refs, slot) -> None:
    # a block of words as rows: word i of a tile row holds entry i of the next `parts` tiles of that token
    parts = 4 // jnp.dtype(static.kind).itemsize
    bits, step = 32 // parts, 8 * parts

    def unpack(group, _):
        at = pl.ds(pl.multiple_of(group * step, step), step)
        for tile in range(refs.kv.shape[2] // LANES):
            rows = [pl.ds(group * step + i, 8, stride=parts) for i in range(parts)]
            words = [refs.kv_words[slot, row, tile // parts, 0] for row in rows]
            out = words[0]
            if parts > 1:
                picked = [lax.shift_right_logical(x, bits * (tile % parts)) & ((1 << bits) - 1) for x in words]
                out = functools.reduce(jnp.bitwise_or, (x << bits * i for i, x in enumerate(picked)))
            refs.kv[0, at, tile * LANES : (tile + 1) * LANES] = pltpu.bitcast(out, static.kind)
        return 0

    lax.fori_loop(0, static.block_kv // step, unpack, 0)


def is_whole(static: Static, item: Item, j):
    # whether every query of the item sees every key of block j
    rules, begin, end = static.rules, j * static.keys, (j + 1) * static.keys
    whole = (begin >= item.low) & (end <= item.high)
    if static.block_kv != static.keys:
        return False
    if rules.mask == "causal":
        whole &= end - 1 <= item.first
        if rules.sliding_window is not None:
            whole &= begin > item.first + item.rows - 1 - rules.sliding_window
    if rules.mask == "tree":
        whole &= end <= item.tree_start
        if rules.sliding_window is not None:
            whole = False
    return whole


def clear(static: Static, refs: Refs, item: Item, j, slot) -> None:
    # Rows of values that nothing was copied to, or that hold no token, may be NaN: a weight of 0 would not help.
    if not jnp.issubdtype(static.kind, jnp.floating):
        return
    begin, first_lane = item.low - j * static.keys, static.row.offset("v", 0) // LANES * LANES
    end = jnp.minimum(item.high - j * static.keys, static.keys)
    parts = 4 // jnp.dtype(static.kind).itemsize
    step, bits = 8 * parts, 32 // parts

    def zero(i, _):
        at = pl.ds(pl.multiple_of(i * step, step), step)
        old = pltpu.bitcast(refs.kv[slot, at, first_lane:], jnp.int32)  # entries of `parts` rows a word
        row = i * step + parts * lax.broadcasted_iota(jnp.int32, old.shape, 0)
        keep = jnp.zeros_like(old)
        for part in range(parts):
            held = (row + part >= begin) & (row + part < end)
            keep |= jnp.where(held, _signed(((1 << bits) - 1) << bits * part), 0)
        refs.kv[slot, at, first_lane:] = pltpu.bitcast(old & keep, static.kind)
        return 0

    lax.fori_loop(0, jnp.clip((begin + step - 1) // step, 0, static.block_kv // step), zero, 0)
    lax.fori_loop(jnp.clip(end // step, 0, static.block_kv // step), static.block_kv // step, zero, 0)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def visible(static: Static, refs: Refs, item: Item, j, place):
    # bool [block_q, block_kv]: what each query token sees of block j
    rules, shape = static.rules, (static.config.block_q, static.block_kv)
    keys = j * static.keys + lax.broadcasted_iota(jnp.int32, shape, 1)
    token = lax.broadcasted_iota(jnp.int32, shape, 0)
    seen = (keys >= item.low) & (keys < item.high)
    if static.block_kv != static.keys:
        seen &= keys < (j + 1) * static.keys
    if rules.mask == "causal":
        seen &= keys <= item.first + token
        if rules.sliding_window is not None:
            seen &= keys > item.first + token - rules.sliding_window
    if rules.mask == "tree":
        node = keys - item.tree_start
        seen &= (node < 0) | _bits(static, refs, node, place)
        if rules.sliding_window is not None:
            seen &= _place(static, refs, place) - _key_places(static, refs, keys, j, item, place) < (
                rules.sliding_window
            )
    return seen


def _bits(static: Static, refs: Refs, node, place):
    words = refs.bits_vmem[place]
    picked = jnp.zeros(node.shape, jnp.int32)
    for word in range(static.tree_words):
        picked = jnp.where(node >> 5 == word, jnp.broadcast_to(words[:, word : word + 1], node.shape), picked)
    return (lax.shift_right_logical(picked, node & 31) & 1) == 1


def _place(static: Static, refs: Refs, place):
    # position of each query token, [block_q, 1]
    return refs.bits_vmem[place][:, static.tree_words : static.tree_words + 1]


def _key_places(static: Static, refs: Refs, keys, j, item: Item, place):
    # position of each key of block j: its index before the first node
    block = j - item.tree_start // static.keys
    at = jnp.clip(block, 0, refs.places.shape[2] // static.block_kv - 1) * static.block_kv
    nodes = refs.places_vmem[place, :, pl.ds(pl.multiple_of(at, static.block_kv), static.block_kv)]
    return jnp.where(keys < item.tree_start, keys, jnp.broadcast_to(nodes, keys.shape))


def _scores(static: Static, raw, scale):
    # in units of log2
    cap = static.rules.logit_soft_cap
    if cap is None:
        return raw * (scale * LOG2E)
    return jnp.tanh(raw * (scale / cap)) * (cap * LOG2E)


def _attend_block(static: Static, refs: Refs, item: Item, j, slot, place, scales, *, masked: bool) -> None:
    seen = visible(static, refs, item, j, place) if masked else None
    if static.config.unroll_heads:
        tiles = list(range(static.tiles))
        raws = [raw_scores(static, refs, tile, slot, place) for tile in tiles]
        states = [
            fold(static, refs, tile, slot, raw, seen, scales=scales) for tile, raw in zip(tiles, raws, strict=True)
        ]
        for tile, state in zip(tiles, states, strict=True):
            refs.top[tile], refs.total[tile], refs.acc[tile] = state
        return

    def one(tile, _):
        raw = raw_scores(static, refs, tile, slot, place)
        refs.top[tile], refs.total[tile], refs.acc[tile] = fold(static, refs, tile, slot, raw, seen, scales=scales)
        return 0

    lax.fori_loop(0, static.tiles, one, 0)


def _window(static: Static, refs: Refs, side: str, tile, slot, keys):
    # keys or values of a tile's heads, [keys, lanes of the window]
    heads, row = static.config.heads, static.row
    base, wide = row.window(side, 0, heads)
    if isinstance(tile, int):
        base, _ = row.window(side, tile * heads, heads)
        lanes = pl.ds(base, wide)
    else:
        dim = heads * (row.k_dim if side == "k" else row.v_dim)
        at = (row.offset(side, 0) + tile * dim) // LANES * LANES
        lanes = pl.ds(pl.multiple_of(jnp.minimum(at, row.lanes - wide), LANES), wide)
    return refs.kv[slot, keys, lanes].astype(static.compute)


def raw_scores(static: Static, refs: Refs, tile, slot, place, keys: Any = slice(None)):
    """Products of queries and keys, f32[rows, keys]. Args: keys: which of the block's."""
    k = _window(static, refs, "k", tile, slot, keys)
    q = refs.q_vmem[place, tile]
    dims = (((1,), (1,)), ((), ()))
    return lax.dot_general(q, k, dims, precision=static.precision, preferred_element_type=jnp.float32)


def fold(static: Static, refs: Refs, tile, slot, raw, seen, state=None, keys: Any = slice(None), scales=None):
    """The state (top, total, acc) of a tile once it has seen the keys of some scores.

    Args: seen: bool[block_q, keys], None where all are. state: by default what `refs` hold.
    """
    if scales is not None:
        raw *= scales("k", tile)
    old, old_total, acc = state or (refs.top[tile], refs.total[tile], refs.acc[tile])
    scores = _scores(static, raw, refs.scales[0])
    if seen is not None:
        scores = jnp.where(_for_rows(static, seen), scores, -jnp.inf)
    top = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
    safe = top if seen is None else jnp.where(top == -jnp.inf, 0.0, top)
    weights = jnp.exp2(scores - _wide(safe, scores.shape[1]))
    decay = jnp.exp2(old - safe)
    total = old_total * decay + functools.reduce(jnp.add, _registers(weights))
    if scales is not None:
        weights *= scales("v", tile)
        if seen is not None:  # where no token is, a scale may be NaN
            weights = jnp.where(_for_rows(static, seen), weights, 0.0)
    v = _window(static, refs, "v", tile, slot, keys)
    dims = (((1,), (0,)), ((), ()))
    part = lax.dot_general(
        weights.astype(static.compute), v, dims, precision=static.precision, preferred_element_type=jnp.float32
    )
    return top, total, acc * _wide(decay, part.shape[1]) + part


def _wide(x, lanes: int):
    # [rows, 128], every lane alike, as [rows, lanes]: the same registers again, where a slice would be broadcast anew
    return jnp.concatenate([x] * (lanes // LANES), axis=1) if lanes > LANES else x


def _registers(x):
    return [x[:, at : at + LANES] for at in range(0, x.shape[1], LANES)]


def _token_scales(static: Static, refs: Refs, slot):
    # (side, tile) -> [rows, block_kv]: the scale of each key for the head of each row
    heads, copies = static.config.heads, static.group * static.config.block_q

    def of(side: str, tile):
        base = (0 if side == "k" else static.row.kv_heads) + tile * heads
        held = [refs.token_scales_vmem[slot, pl.ds(base + head, 1)] for head in range(heads)]
        wide = [jnp.broadcast_to(x, (copies, x.shape[1])) for x in held]
        wide += [jnp.broadcast_to(held[0], (static.rows - heads * copies, static.block_kv))]
        return jnp.concatenate([x for x in wide if x.shape[0]], axis=0)

    return of


def _for_rows(static: Static, seen):
    # [block_q, keys] for the rows of a product, which are head after head, tokens of a head together
    copies = static.config.heads * static.group
    if static.config.block_q == 1:
        return jnp.broadcast_to(seen, (static.rows, seen.shape[1]))
    return jnp.concatenate([seen] * copies, axis=0) if copies > 1 else seen


def finish(static: Static, refs: Refs, place) -> None:
    def one(tile):
        top = refs.top[tile]
        total = jnp.broadcast_to(jnp.sum(refs.total[tile], axis=1, keepdims=True), top.shape)
        seen = total > 0
        divisor = jnp.where(seen, total, 1.0)
        refs.lse_vmem[place, tile] = jnp.where(seen, (top + jnp.log2(divisor)) * (1 / LOG2E), -jnp.inf)
        scale = jnp.where(seen, 1.0 / divisor, 0.0)
        if static.sinks:
            sink = refs.sinks[tile] * LOG2E
            high = jnp.maximum(top, sink)
            decay = jnp.where(seen, jnp.exp2(top - high), 0.0)
            scale = decay / (total * decay + jnp.exp2(sink - high))
        out = refs.acc[tile] * _wide(scale * refs.scales[1], refs.acc.shape[2])
        refs.out_vmem[place, tile] = out.astype(refs.out_vmem.dtype)

    if static.config.unroll_heads:
        for tile in range(static.tiles):
            one(tile)
    else:
        lax.fori_loop(0, static.tiles, lambda tile, _: (one(tile), 0)[1], 0)
