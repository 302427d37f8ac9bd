"""Which program does what: tiles of queries, and runs of key blocks, from lengths that live on the device.

It depends on the plan alone, not on the layer, so XLA computes it once a step and not once a layer.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels._common import masks, tiles
from pallas_kernels._common.masks import Rules, Tree
from pallas_kernels.attention.mosaic_gpu_sm90_config import Config

SEQ, ROW, TOKENS, FIRST, BEGIN, END, KV_LEN, LOW, HIGH, TILE, PARTS = COLUMNS = range(11)
"""Columns of an item: request, first packed token, tokens (0: nothing to do), sequence index of the first token, first
key block, one past the last; keys that may be read, first key and one past the last that every row sees, tile, parts of
the tile. Page ids of the first blocks follow, so that a program waits for one load before its first copy, not for two;
then zeros, up to a multiple of 4."""


class Schedule(NamedTuple):
    """A call's work. An item is a program a KV head."""

    items: jax.Array  # i32[items, 11 and more]
    merges: jax.Array | None  # i32[n, 4] of tiles in several parts: first packed token, tokens, first part, parts
    bits: jax.Array | None  # u32[tiles, words, rows], a tree's bits row by row, the window applied
    unserved: jax.Array  # i32[2]: first row of no attended request, and the first after all requests
    low: jax.Array | None  # i32[tiles, rows], first key of the prefix that a row sees, in a tree with a window


def tokens_a_tile(config: Config, *, group: int, max_q_len: int) -> int:
    """Query tokens a tile."""
    return max(min(config.rows // group, max_q_len), 1)


def make(
    config: Config,
    rules: Rules,
    tree: Tree | None,
    *,
    seq_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_tokens: int,
    max_q_len: int,
    group: int,
    page_table: jax.Array,
    page_size: int,
) -> Schedule:
    """Schedule of a call. The page table's width times the page size bounds the keys of a request."""
    kv_room = page_table.shape[1] * page_size
    with_ids = functools.partial(_with_ids, config=config, page_table=page_table, page_size=page_size)
    block_q = tokens_a_tile(config, group=group, max_q_len=max_q_len)
    num_seqs = seq_lens.shape[0]
    num_tiles = max(tiles.count(num_tokens, num_seqs, max_q_len, block_q, 1), 1)
    attended = cu_q_lens[1:] - cu_q_lens[:-1] <= max_q_len
    cut, _ = tiles.make(seq_lens, cu_q_lens, attended, num_tiles=num_tiles, block_q=block_q)
    unserved = _unserved(cu_q_lens, attended, num_tokens)
    cut = masks.narrow(cut, rules, tree, block_q)
    low, high = _open(cut, rules, tree, seq_lens, block_q)
    begin = cut.low // config.block_kv
    end = jnp.where(cut.high > cut.low, (cut.high + (config.block_kv - 1)) // config.block_kv, begin)
    columns = [cut.seq, cut.row, cut.rows, cut.first, begin, end, cut.high, low, high]
    bits, low_rows = (None, None) if tree is None else _by_row(cut, rules, tree, config, block_q, group)
    ids = jnp.arange(num_tiles, dtype=jnp.int32)
    if config.cluster > 1:  # program `rank` of a tile's cluster is item tile * cluster + rank
        ids, *columns = (jnp.repeat(column, config.cluster) for column in (ids, *columns))
        rank = jnp.arange(ids.shape[0], dtype=jnp.int32) % config.cluster
        begin, end = columns[BEGIN], columns[END]
        share = (end - begin + (config.cluster - 1)) // config.cluster
        columns[BEGIN] = jnp.minimum(begin + rank * share, end)
        columns[END] = jnp.minimum(begin + (rank + 1) * share, end)
    if not config.splits:
        items = jnp.stack([*columns, ids, jnp.ones_like(ids)], axis=1)
        return Schedule(with_ids(items), None, bits, unserved, low_rows)
    num_items = _num_items(config, num_tiles, kv_room)
    blocks = end - begin
    share = config.part_blocks or _even_share(blocks, cut.rows > 0, config, num_items)
    parts = jnp.where(cut.rows > 0, jnp.maximum((blocks + (share - 1)) // share, 1), 0)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(parts, dtype=jnp.int32)])
    item = jnp.arange(num_items, dtype=jnp.int32)
    tile = jnp.minimum(tiles.run_of(starts, item), num_tiles - 1)
    real = item < starts[-1]
    if not config.part_blocks:
        share = ((blocks + (parts - 1)) // jnp.maximum(parts, 1))[tile]  # as even as blocks allow
    first = jnp.minimum(begin[tile] + (item - starts[tile]) * share, end[tile])
    picked = [column[tile] for column in columns]
    picked[TOKENS] = jnp.where(real, picked[TOKENS], 0)
    picked[BEGIN], picked[END] = first, jnp.minimum(first + share, end[tile])
    items = jnp.stack([*picked, tile, parts[tile]], axis=1)
    return Schedule(with_ids(items), _merges(cut, starts[:-1], parts, num_items), bits, unserved, low_rows)


def pages_a_block(config: Config, page_size: int) -> int:
    """Page ids that a program wants before it copies a block: none where the threads gather small pages."""
    return 0 if page_size < 8 else max(config.block_kv // page_size, 1)


def _with_ids(items, config: Config, page_table, page_size: int):
    # the first `stages` blocks' page ids; past the last key its page's
    pages = pages_a_block(config, page_size)
    if pages:
        n = jnp.arange(config.stages * pages, dtype=jnp.int32)[None]
        page = (items[:, BEGIN, None] + n // pages) * config.block_kv // page_size + n % pages
        last = jnp.maximum(items[:, KV_LEN, None] - 1, 0) // page_size
        ids = page_table[items[:, SEQ, None], jnp.clip(page, 0, last)]
        items = jnp.concatenate([items, ids], axis=1)
    return jnp.pad(items, ((0, 0), (0, -items.shape[1] % 4)))


def _merges(cut, first, parts, num_items: int):
    # tiles in several parts, in front; at most half as many as items
    several = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(parts > 1, dtype=jnp.int32)])
    ids = jnp.arange(max(min(parts.shape[0], num_items // 2), 1), dtype=jnp.int32)
    tile = jnp.minimum(tiles.run_of(several, ids), parts.shape[0] - 1)
    parts = jnp.where(ids < several[-1], parts[tile], 0)
    return jnp.stack([cut.row[tile], cut.rows[tile], first[tile], parts], axis=1)


def _num_items(config: Config, num_tiles: int, kv_room: int) -> int:
    if config.part_blocks:
        return num_tiles * max(-(-kv_room // (config.block_kv * config.part_blocks)), 1)
    return max(config.parts, 2 * num_tiles)  # requests much longer than the others find room for more parts


def _even_share(blocks, real, config: Config, num_items: int):
    # A share of a few under which all parts find an item; the last one always does: with at least total / (items -
    # tiles), parts number at most items. 2 and more: a part costs about a block.
    total, tiles, aim = jnp.sum(blocks, dtype=jnp.int32), jnp.sum(real, dtype=jnp.int32), config.parts
    room = jnp.clip(num_items - tiles, 1, aim)
    shares = [(total + (aim - 1)) // aim + jnp.arange(4, dtype=jnp.int32), ((total + (room - 1)) // room)[None]]
    if config.part_cost:  # also the longest requests in one part, in two ...
        cut = jnp.arange(1, 9, dtype=jnp.int32)
        shares.insert(1, (jnp.max(blocks, initial=0) + (cut - 1)) // cut)
    shares = jnp.maximum(jnp.concatenate(shares), 2)
    needed = jnp.where(real[None], jnp.maximum((blocks[None] + (shares[:, None] - 1)) // shares[:, None], 1), 0)
    parts = jnp.sum(needed, axis=1, dtype=jnp.int32)
    fits = parts <= num_items
    if not config.part_cost:
        return shares[jnp.argmax(fits)]  # the first: parts are as good as free
    # The least time, in blocks: parts by turns on as many programs as there are at once, or as even as the longest
    # allows; each turn's start and end; and what it costs to store parts and to merge them.
    longest = jnp.max((blocks[None] + (needed - 1)) // jnp.maximum(needed, 1), axis=1, initial=0)
    turns = (parts + (aim - 1)) // aim
    merged = jnp.sum(jnp.where(needed > 1, needed, 0), axis=1, dtype=jnp.int32)
    time = jnp.minimum(turns * longest, total // aim + longest) + 2 * turns + config.part_cost * merged // aim
    return shares[jnp.argmin(jnp.where(fits, time, jnp.iinfo(jnp.int32).max))]


def _unserved(cu_q_lens, attended, num_tokens: int):
    # Zeros are stored for rows after the last request, and of requests with more rows than announced.
    first = jnp.min(jnp.where(attended, num_tokens, cu_q_lens[:-1]), initial=num_tokens)
    return jnp.stack([jnp.minimum(first, cu_q_lens[-1]), cu_q_lens[-1]])


def _open(cut, rules: Rules, tree: Tree | None, seq_lens, block_q: int):
    # first key, and one past the last, that no rule hides from any row of the tile
    high = seq_lens[cut.seq]
    if tree is not None:
        high = tree.starts[cut.seq]
    elif rules.mask == "causal":
        high = cut.first + 1
    high = jnp.minimum(high, cut.high)
    if rules.sliding_window is None:
        return jnp.zeros_like(high), high
    newest = cut.first + cut.rows - 1
    if tree is not None:
        newest = jnp.max(masks.positions(tree, cut, block_q), axis=1)
    return newest - (rules.sliding_window - 1), high


def _by_row(cut, rules: Rules, tree: Tree, config: Config, block_q: int, group: int):
    # a tree's bits, and the first visible key of the prefix, for each row of each tile
    row = jnp.arange(config.rows, dtype=jnp.int32)
    token = jnp.clip(cut.row[:, None] + row[None] // group, 0, tree.bits.shape[0] - 1)
    bits = tree.bits
    low = None
    if rules.sliding_window is not None:
        seq = jnp.minimum(cut.seq[:, None], tree.starts.shape[0] - 1)
        place = tree.q_positions[token]
        low = place - (rules.sliding_window - 1)
        node = jnp.arange(32 * bits.shape[1], dtype=jnp.int32)
        positions = tree.kv_positions[seq, jnp.minimum(node, tree.kv_positions.shape[1] - 1)[None]]
        near = place[:, :, None] - positions[:, None, :] < rules.sliding_window
        weight = jnp.uint32(1) << (node % 32).astype(jnp.uint32)
        kept = jnp.where(near, weight[None, None], jnp.uint32(0)).reshape(*near.shape[:2], bits.shape[1], 32)
        rows = bits[token] & jnp.sum(kept, axis=-1, dtype=jnp.uint32)
    else:
        rows = bits[token]
    return jnp.swapaxes(rows, 1, 2), low
