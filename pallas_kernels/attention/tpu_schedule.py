"""Work items of a TPU attention call: tiles of query tokens with their blocks of keys, and the way back to tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels._common import ints, masks, tiles
from pallas_kernels._common.masks import Rules, Tree
from pallas_kernels._common.tiles import Runs


class Items(NamedTuple):
    """Work items, longest first; the first `busy` have keys to see."""

    runs: Runs
    busy: jax.Array  # i32
    tokens: jax.Array  # i32[items, block_q], the packed row of each query token; any row where an item has none
    item: jax.Array  # i32[splits, tokens], which item attends a packed row
    place: jax.Array  # i32[tokens], and where in that item
    real: jax.Array  # bool[splits, tokens], rows that an item here attends to some key


def make(
    rules: Rules,
    tree: Tree | None,
    *,
    seq_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_tokens: int,
    shortest: int,
    longest: int,
    block_q: int,
    block_kv: int,
    splits: int,
) -> Items | None:
    """Items of the requests with `shortest` to `longest` query rows; None if there can be none."""
    num_seqs = seq_lens.shape[0]
    num = tiles.count(num_tokens, num_seqs, longest, block_q, shortest)
    if num < 1:
        return None
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    chosen = (q_lens >= shortest) & (q_lens <= longest)
    cut, starts = tiles.make(seq_lens, cu_q_lens, chosen, num_tiles=num, block_q=block_q)
    cut = masks.narrow(cut, rules, tree, block_q)
    runs = tiles.split(cut, block_kv=block_kv, splits=splits)
    ids = jnp.arange(num_tokens, dtype=jnp.int32)
    seq = jnp.minimum(tiles.run_of(cu_q_lens, ids), num_seqs - 1)
    held = (ids < cu_q_lens[-1]) & ints.pick(chosen, seq)
    offset = jnp.where(held, ids - ints.pick(cu_q_lens, seq), 0)
    tile = jnp.where(held, ints.pick(starts, seq) + ints.div(offset, block_q), 0)
    part = jnp.arange(splits, dtype=jnp.int32)[:, None]
    item = ints.pick(runs.rank, tile[None] * splits + part)
    tokens = runs.tile.row[:, None] + jnp.arange(block_q, dtype=jnp.int32)[None]
    return Items(
        runs=runs,
        busy=jnp.sum(runs.end > runs.begin, dtype=jnp.int32),
        tokens=jnp.minimum(tokens, num_tokens - 1),
        item=item,
        place=ints.rem(offset, block_q),
        real=held[None] & ints.pick(runs.end > runs.begin, item),
    )


def fields(items: Items, tree: Tree | None) -> jax.Array:
    """i32[items * fields] as `tpu_records.FIELDS` names them."""
    tile = items.runs.tile
    start = jnp.zeros_like(tile.seq) if tree is None else ints.pick(tree.starts, tile.seq)
    columns = (tile.seq, tile.rows, tile.first, tile.low, tile.high, items.runs.begin, items.runs.end, start, tile.row)
    return jnp.stack(columns, axis=1).astype(jnp.int32).reshape(-1)


def tree_rows(items: Items, rules: Rules, tree: Tree, *, lanes: int) -> jax.Array:
    """i32[items, block_q, lanes]: the bits of each query token, and with a window its position after them."""
    bits = jax.lax.bitcast_convert_type(ints.pick(tree.bits, items.tokens), jnp.int32)
    if rules.sliding_window is not None:
        bits = jnp.concatenate([bits, ints.pick(tree.q_positions, items.tokens)[..., None]], axis=-1)
    return jnp.pad(bits, [(0, 0), (0, 0), (0, lanes - bits.shape[-1])])


def key_places(items: Items, tree: Tree, *, keys: int, block_kv: int) -> jax.Array:
    """i32[items, 1, blocks * block_kv]: positions of keys from the block on in which a request's nodes begin.

    Args: keys: of a block; block_kv: the lanes that it takes.
    """
    nodes = tree.kv_positions.shape[1]
    blocks = -(-nodes // keys) + 1
    starts = ints.pick(tree.starts, items.runs.tile.seq)
    lanes = jnp.arange(blocks * block_kv, dtype=jnp.int32)
    key = ints.div(lanes, block_kv) * keys + ints.rem(lanes, block_kv)
    node = jnp.clip(key[None] - ints.rem(jnp.maximum(starts, 0), keys)[:, None], 0, nodes - 1)
    return ints.pick(tree.kv_positions, items.runs.tile.seq[:, None], node)[:, None]
