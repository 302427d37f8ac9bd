"""Which program of the Hopper prefill does what, from lengths that live on the device.

It depends on the plan alone, not on the layer, so XLA computes it once a step and not once a layer. Tiles are ordered
by length, longest first, and dealt to the programs to and fro, so that all end together.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels._common import masks, tiles
from pallas_kernels._common.masks import Rules
from pallas_kernels.attention.mosaic_gpu_sm90_prefill_config import Config

SEQ, ROW, TOKENS, FIRST, BEGIN, BLOCKS, KV_LEN, LOW, HIGH, KV_ROW = COLUMNS = range(10)
"""Columns of a tile: request, first packed token, tokens (0: no tile), sequence index of the first token, first key
block, key blocks (0: its rows see nothing), keys of the request, first key and one past the last that every row sees,
packed row of the request's first key. Zeros follow, up to a multiple of 4."""


class Schedule(NamedTuple):
    """A call's work: every row of the queries is in one tile, rows that nothing answers for too."""

    tiles: jax.Array  # i32[tiles, 12], longest first
    counts: jax.Array  # i32[2]: tiles with key blocks, which come first, and all


def tokens_a_tile(config: Config, *, group: int) -> int:
    """Query tokens a tile: heads of a group are packed into its rows."""
    return config.rows // group


def make(
    config: Config,
    rules: Rules,
    *,
    seq_lens: jax.Array,
    cu_q_lens: jax.Array,
    cu_kv_lens: jax.Array | None = None,
    num_tokens: int,
    max_q_len: int,
    group: int,
) -> Schedule:
    """Schedule of a call. cu_kv_lens: where packed keys of each request start; None for pages."""
    block_q = tokens_a_tile(config, group=group)
    num_seqs = seq_lens.shape[0]
    # Rows after the last request are one more request without keys, and so are requests with too many rows.
    attended = cu_q_lens[1:] - cu_q_lens[:-1] <= max_q_len
    starts = jnp.append(cu_q_lens, jnp.int32(num_tokens))
    lens = jnp.append(jnp.where(attended, seq_lens, 0), jnp.int32(0))
    num_tiles = num_tokens // block_q + num_seqs + 1
    every = jnp.ones((num_seqs + 1,), bool)
    cut, offsets = tiles.make(lens, starts, every, num_tiles=num_tiles, block_q=block_q)
    cut = masks.narrow(cut, rules, None, block_q)
    begin = cut.low // config.block_kv
    blocks = jnp.where(cut.high > cut.low, (cut.high + (config.block_kv - 1)) // config.block_kv - begin, 0)
    kv_len = lens[cut.seq]
    low, high = jnp.zeros_like(kv_len), kv_len
    if rules.mask == "causal":
        high = jnp.minimum(cut.first + 1, kv_len)
        if rules.sliding_window is not None:
            low = cut.first + cut.rows - rules.sliding_window
    seq = jnp.minimum(cut.seq, num_seqs - 1)
    kv_row = jnp.zeros_like(seq) if cu_kv_lens is None else cu_kv_lens[seq]
    columns = [seq, cut.row, cut.rows, cut.first, begin, blocks, kv_len, low, high, kv_row]
    order = jnp.argsort(jnp.where(cut.rows > 0, -blocks, 1), stable=True)
    table = jnp.pad(jnp.stack(columns, axis=1)[order], ((0, 0), (0, -len(columns) % 4)))
    return Schedule(table, jnp.stack([jnp.sum(blocks > 0, dtype=jnp.int32), offsets[-1]]))


_SECTION = 16  # KV heads; then eight programs and more read the keys of each at once, from the L2


def of_place(place, some, kv_heads: int):
    """Tile and KV head at a place of the order in which all (tile, KV head) are dealt: i32 scalars or arrays.

    The `some` tiles with keys come first, in sections of KV heads, each through all its tiles; then the others.
    """
    if kv_heads <= _SECTION:
        return place // kv_heads, place % kv_heads
    size = jnp.maximum(some, 1) * _SECTION
    first = place // size * _SECTION
    heads = jnp.clip(kv_heads - first, 1, _SECTION)
    rest = place - place // size * size
    later = place >= some * kv_heads
    tile = jnp.where(later, place // kv_heads, rest // heads)
    return tile, jnp.where(later, place % kv_heads, first + rest % heads)
