"""Which keys a query sees: bottom-right causal, full, or tree bits, with a window by position."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels._common import ints
from pallas_kernels._common.tiles import Tiles

_KINDS = ("causal", "full", "tree")
_UNROLLED_WORDS = 8  # a select a word beats an element gather up to here


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a query sees and how its scores are made (static)."""

    sm_scale: float
    mask: str = "causal"
    logit_soft_cap: float | None = None
    sliding_window: int | None = None  # keys seen, the query's own included

    def __post_init__(self):
        if self.mask not in _KINDS:
            raise ValueError(f"mask={self.mask!r}: want one of {', '.join(_KINDS)}")
        if self.mask == "full" and self.sliding_window is not None:
            raise ValueError(
                f"sliding_window={self.sliding_window} with mask='full': queries have no position there to count from; "
                "use mask='causal', or no window"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window={self.sliding_window}: want at least 1 (the query's own key), or None")
        if self.logit_soft_cap is not None and not self.logit_soft_cap > 0:
            raise ValueError(f"logit_soft_cap={self.logit_soft_cap}: want a positive cap, or None")


class Tree(NamedTuple):
    """Ancestor bits. Keys before `starts` are seen by every query, key `starts + j` iff bit j of the row is set."""

    bits: jax.Array  # u32[tokens, words]
    starts: jax.Array  # i32[seqs]
    kv_positions: jax.Array  # i32[seqs, max_nodes]; read only with a window
    q_positions: jax.Array  # i32[tokens]; read only with a window


def make_tree(rules: Rules, num_tokens: int, bits, starts, kv_positions, q_positions) -> Tree | None:
    """The tree of a call, or None without one.

    Raises: ValueError if the mask and the tree do not go together, or the bits have another shape or dtype.
    """
    if rules.mask != "tree":
        if bits is not None:
            raise ValueError(f"tree_bits given with mask={rules.mask!r}: want mask='tree', or no bits")
        return None
    if bits is None or starts is None:
        raise ValueError("mask='tree' needs tree_bits and tree_starts")
    if bits.ndim != 2 or bits.shape[0] != num_tokens or bits.dtype != jnp.uint32:
        raise ValueError(f"tree_bits is {bits.dtype}{list(bits.shape)}: want uint32[tokens={num_tokens}, words]")
    if rules.sliding_window is not None and (kv_positions is None or q_positions is None):
        raise ValueError("sliding_window in a tree counts positions: give tree_kv_positions and q_positions")
    return Tree(bits, starts, kv_positions, q_positions)


def positions(tree: Tree, tiles: Tiles, block_q: int) -> jax.Array:
    """i32[tiles, block_q]: the position of each row of each tile; rows past a tile's last stand for that one."""
    used = jnp.maximum(tiles.rows - 1, 0)[:, None]
    rows = tiles.row[:, None] + jnp.minimum(jnp.arange(block_q, dtype=jnp.int32)[None], used)
    return ints.clipped(tree.q_positions, rows)


def narrow(tiles: Tiles, rules: Rules, tree: Tree | None, block_q: int) -> Tiles:
    """Leave out the keys that no row of a tile can see."""
    low, high = tiles.low, tiles.high
    if rules.mask == "causal":
        high = jnp.minimum(high, tiles.first + tiles.rows)
    if rules.sliding_window is not None:
        if tree is None:
            low = jnp.maximum(tiles.first - (rules.sliding_window - 1), 0)
        else:
            oldest = jnp.min(positions(tree, tiles, block_q), axis=1)
            low = jnp.clip(oldest - (rules.sliding_window - 1), 0, ints.pick(tree.starts, tiles.seq))
    high = jnp.where(tiles.rows > 0, jnp.maximum(high, 0), 0)
    return tiles._replace(low=jnp.minimum(low, high), high=high)


def visible(rules: Rules, tree: Tree | None, tile: Tiles, rows: jax.Array, keys: jax.Array) -> jax.Array:
    """bool [lanes, block_q | 1, keys]: what each row of each tile may see.

    Args: rows: i32[lanes, block_q], packed rows. keys: i32[lanes, keys], sequence indices; outside the tile's range
      nothing is seen.
    """
    held = ((keys >= tile.low[:, None]) & (keys < tile.high[:, None]))[:, None, :]
    block_q = rows.shape[1]
    if rules.mask == "full" or (block_q == 1 and tree is None):
        return held  # the range says it all: one row's window and diagonal are the range's ends
    keys = keys[:, None, :]
    if tree is None:
        place = (tile.first[:, None] + jnp.arange(block_q, dtype=jnp.int32)[None])[:, :, None]
        seen = held & (keys <= place)
        return seen if rules.sliding_window is None else seen & (place - keys < rules.sliding_window)
    node = keys - ints.pick(tree.starts, tile.seq)[:, None, None]
    seen = held & ((node < 0) | _bit(ints.clipped(tree.bits, rows), node))
    if rules.sliding_window is None:
        return seen
    place = ints.clipped(tree.q_positions, rows)[:, :, None]
    nodes = ints.clipped(tree.kv_positions, tile.seq[:, None], jnp.maximum(node[:, 0], 0))[:, None, :]
    return seen & (place - jnp.where(node < 0, keys, nodes) < rules.sliding_window)


def _bit(words: jax.Array, node: jax.Array) -> jax.Array:
    # words u32[lanes, rows, words], node i32[lanes, 1, keys] -> bool [lanes, rows, keys]; False past the last word
    num_words, at = words.shape[-1], node // 32
    if num_words <= _UNROLLED_WORDS:
        shape = (*words.shape[:2], node.shape[-1])
        picked = jnp.zeros(shape, jnp.uint32)
        for i in range(num_words):
            picked = jnp.where(at == i, words[:, :, i : i + 1], picked)
    else:
        at = jnp.broadcast_to(jnp.clip(at, 0, num_words - 1), (*words.shape[:2], node.shape[-1]))
        picked = jnp.where(node < 32 * num_words, jnp.take_along_axis(words, at, axis=2), jnp.uint32(0))
    return ((picked >> (node % 32).astype(jnp.uint32)) & jnp.uint32(1)) == 1
