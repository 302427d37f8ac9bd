"""Attention of packed queries over paged or packed keys, in plain JAX: blocked, with memory linear in length.

Source: arXiv:2205.14135, algorithm 1 (online softmax); arXiv:2309.06180 (paging).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._common import softmax
from pallas_kernels._common import tiles as tiling
from pallas_kernels._common.tiles import Tiles
from pallas_kernels.attention.config import Config, heuristic

_MASKS = ("causal", "full", "tree")
_MAX_ROWS = 2**31 - 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Rules:  # what a query may see and how scores are made; static
    sm_scale: float
    mask: str
    logit_soft_cap: float | None
    sliding_window: int | None

    def __post_init__(self):
        if self.mask not in _MASKS:
            raise ValueError(f"mask={self.mask!r}: want one of {', '.join(_MASKS)}")
        if self.mask == "full" and self.sliding_window is not None:
            raise ValueError(
                f"sliding_window={self.sliding_window} with mask='full': a full mask has no query positions to count "
                "from; use mask='causal', or no window"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window={self.sliding_window}: want at least 1 (the query's own key), or None")
        if self.logit_soft_cap is not None and not self.logit_soft_cap > 0:
            raise ValueError(f"logit_soft_cap={self.logit_soft_cap}: want a positive cap, or None")


class _Tree(NamedTuple):
    bits: jax.Array  # u32[tokens, words]
    starts: jax.Array  # i32[seqs]
    kv_positions: jax.Array | None  # i32[seqs, max_nodes]; read only with a window
    q_positions: jax.Array | None  # i32[tokens]; read only with a window


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    *,
    page_table: jax.Array,
    page_offset: jax.Array | int = 0,
    seq_lens: jax.Array,
    cu_q_lens: jax.Array,
    max_q_len: int,
    sm_scale: float,
    mask: str = "causal",
    logit_soft_cap: float | None = None,
    sliding_window: int | None = None,
    sinks: jax.Array | None = None,
    tree_bits: jax.Array | None = None,
    tree_starts: jax.Array | None = None,
    tree_kv_positions: jax.Array | None = None,
    q_positions: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    num_splits: int = 1,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of packed queries over pages that already hold their keys.

    Args:
      q: [tokens, q_heads, k_dim]; rows cu_q_lens[b] to cu_q_lens[b + 1] are the last tokens of request b, the rest
        padding. Query head h reads KV head h // (q_heads // kv_heads).
      k_pages, v_pages: [pages_total, page_size, kv_heads, k_dim | v_dim], all layers; float, fp8 or int8.
      page_table: i32[seqs, max_pages], page ids of one layer; entries past cdiv(seq_len, page_size) are never used.
      page_offset: i32 added to every page id (layer * pages a layer); may be traced.
      seq_lens: i32[seqs], keys of each request, this step's included; 0 for a padding request.
      cu_q_lens: i32[seqs + 1], first entry 0.
      max_q_len: static bound on the query rows of a request.
      mask: "causal" (the last query lines up with the last key), "full" (every key of the request) or "tree".
      logit_soft_cap: s -> cap * tanh(s / cap), after scaling and before the mask.
      sliding_window: keys seen, the query's own included.
      sinks: f32[q_heads], one more logit in the denominator of `out`.
      tree_bits: u32[tokens, words]. With mask "tree", keys before tree_starts (i32[seqs]) are visible to every query
        and key tree_starts + j iff bit j of the query's row is set.
      tree_kv_positions, q_positions: i32[seqs, max_nodes], i32[tokens]; a window in a tree counts positions.
      k_scale, v_scale: stored value * scale is the value. None, f32 scalar, or f32[pages_total, page_size, kv_heads].
      num_splits: parts of the keys attended apart.

    Returns:
      out: q.dtype [tokens, q_heads, v_dim], 0 where no key is visible and for padding rows.
      lse: f32[tokens, q_heads], natural log, without sinks; -inf where no key is visible.
      With num_splits > 1: f32 [num_splits, ...] of each, for `merge_states` and then `apply_sinks`.
    Raises: ValueError if shapes disagree, or an option is out of range or does not go with another.
    """
    page_size = k_pages.shape[1]
    _check_paged(k_pages, v_pages, page_table, seq_lens)
    config = config or heuristic(max_q_len=max_q_len)
    block_pages = max(1, config.block_kv // page_size)
    table = _pad_to_multiple(page_table, block_pages)

    def fetch(seq, block, low, high):
        # lanes of (request, block index) -> k, v [lanes, keys, kv_heads, dim] and scales [lanes, keys, kv_heads]
        cols = block[:, None] * block_pages + jnp.arange(block_pages, dtype=jnp.int32)
        used = (cols * page_size < high[:, None]) & ((cols + 1) * page_size > low[:, None])
        ids = table.at[seq[:, None], cols].get(mode="clip")
        ids = jnp.where(used, ids + page_offset, 0)  # wild entries are never followed

        def take(pages):
            got = pages.at[ids].get(mode="clip")
            return got.reshape(got.shape[0], block_pages * page_size, *pages.shape[2:])

        return tuple(x if x is None or x.ndim < 3 else take(x) for x in (k_pages, v_pages, k_scale, v_scale))

    rules = _Rules(sm_scale=sm_scale, mask=mask, logit_soft_cap=logit_soft_cap, sliding_window=sliding_window)
    tree = _tree(rules, q, tree_bits, tree_starts, tree_kv_positions, q_positions)
    return _attend(
        q,
        fetch,
        _Sizes(k_pages.shape[2], v_pages.shape[3], block_pages * page_size, max_q_len, num_splits, config),
        seq_lens,
        cu_q_lens,
        rules,
        tree,
        sinks,
    )


def ragged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    cu_kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    max_q_len: int,
    sm_scale: float,
    mask: str = "causal",
    logit_soft_cap: float | None = None,
    sliding_window: int | None = None,
    sinks: jax.Array | None = None,
    tree_bits: jax.Array | None = None,
    tree_starts: jax.Array | None = None,
    tree_kv_positions: jax.Array | None = None,
    q_positions: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    num_splits: int = 1,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of packed queries over keys packed request after request.

    Args:
      k, v: [kv_tokens, kv_heads, k_dim | v_dim]; rows cu_kv_lens[b] to cu_kv_lens[b + 1] are the keys of request b.
      cu_kv_lens: i32[seqs + 1], first entry 0.
      k_scale, v_scale: None, f32 scalar, or f32[kv_tokens, kv_heads].
      The rest as in `paged_attention`.
    """
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(f"k.shape={k.shape} but v.shape={v.shape}: want the same tokens and heads")
    if k.shape[0] == 0:  # no keys at all: one row that nobody sees, so that there is something to gather
        k, v = (jnp.zeros((1, *x.shape[1:]), x.dtype) for x in (k, v))
        k_scale, v_scale = (x if x is None or x.ndim == 0 else jnp.ones((1, x.shape[1])) for x in (k_scale, v_scale))
    config = config or heuristic(max_q_len=max_q_len)
    block = config.block_kv

    def fetch(seq, index, low, high):
        rows = index[:, None] * block + jnp.arange(block, dtype=jnp.int32)
        rows = cu_kv_lens[seq][:, None] + rows
        return tuple(x if x is None or x.ndim < 2 else x.at[rows].get(mode="clip") for x in (k, v, k_scale, v_scale))

    rules = _Rules(sm_scale=sm_scale, mask=mask, logit_soft_cap=logit_soft_cap, sliding_window=sliding_window)
    tree = _tree(rules, q, tree_bits, tree_starts, tree_kv_positions, q_positions)
    sizes = _Sizes(k.shape[1], v.shape[2], block, max_q_len, num_splits, config)
    return _attend(q, fetch, sizes, cu_kv_lens[1:] - cu_kv_lens[:-1], cu_q_lens, rules, tree, sinks)


class _Sizes(NamedTuple):
    kv_heads: int
    v_dim: int
    block_kv: int
    max_q_len: int
    num_splits: int
    config: Config


def _attend(q, fetch: Callable, sizes: _Sizes, seq_lens, cu_q_lens, rules: _Rules, tree: _Tree | None, sinks):
    tokens, q_heads, _ = q.shape
    if q_heads % sizes.kv_heads:
        raise ValueError(f"q has {q_heads} heads, the keys {sizes.kv_heads}: want a multiple")
    block_q, splits = sizes.config.block_q, sizes.num_splits
    num_tiles = tiling.count(tokens, seq_lens.shape[0], sizes.max_q_len, block_q)
    out_type = jnp.float32 if splits > 1 else q.dtype
    shape = (tokens, q_heads)
    if num_tiles == 0 or tokens == 0:
        lead = (splits,) if splits > 1 else ()
        return jnp.zeros((*lead, *shape, sizes.v_dim), out_type), jnp.full((*lead, *shape), -jnp.inf, jnp.float32)
    tiles, tile_starts = tiling.make(seq_lens, cu_q_lens, num_tiles=num_tiles, block_q=block_q)
    tiles = _narrow(tiles, rules, tree, block_q)
    step = functools.partial(_tile, q, fetch, sizes, rules, tree, sinks if splits == 1 else None, out_type)
    outs, lses = lax.fori_loop(
        0,
        tile_starts[-1] * splits,
        functools.partial(_store, step, tiles, splits),
        (
            jnp.zeros((num_tiles * splits, block_q, q_heads, sizes.v_dim), out_type),
            jnp.full((num_tiles * splits, block_q, q_heads), -jnp.inf, jnp.float32),
        ),
    )
    return _unpack(outs, lses, tile_starts, cu_q_lens, tokens, num_tiles, splits)


def _store(step, tiles: Tiles, splits: int, index, state):
    outs, lses = state
    tile = jax.tree.map(lambda x: x[index // splits][None], tiles)
    out, lse = step(tile, index % splits)
    return outs.at[index].set(out[0]), lses.at[index].set(lse[0])


def _narrow(tiles: Tiles, rules: _Rules, tree: _Tree | None, block_q: int) -> Tiles:
    # leave out the keys that no row of a tile can see
    low, high = tiles.low, tiles.high
    if rules.mask == "causal":
        high = jnp.minimum(high, tiles.first + tiles.rows)
    if rules.sliding_window is not None:
        if tree is None:
            low = jnp.maximum(tiles.first - rules.sliding_window + 1, 0)
        else:
            rows = tiles.row[:, None] + jnp.minimum(jnp.arange(block_q), jnp.maximum(tiles.rows[:, None] - 1, 0))
            oldest = jnp.min(tree.q_positions.at[rows].get(mode="clip"), axis=1)
            low = jnp.clip(oldest - rules.sliding_window + 1, 0, tree.starts[tiles.seq])
    high = jnp.where(tiles.rows > 0, jnp.maximum(high, 0), 0)
    return dataclasses.replace(tiles, low=jnp.minimum(low, high), high=high)


def _tile(q, fetch, sizes: _Sizes, rules: _Rules, tree, sinks, out_type, tile: Tiles, split):
    # lanes of tiles -> out [lanes, block_q, q_heads, v_dim], lse [lanes, block_q, q_heads]
    block_q, lanes = sizes.config.block_q, tile.seq.shape[0]
    q_heads = q.shape[1]
    heads = (sizes.kv_heads, q_heads // sizes.kv_heads)
    rows = tile.row[:, None] + jnp.arange(block_q, dtype=jnp.int32)
    q_tile = q.at[rows].get(mode="clip").reshape(lanes, block_q, *heads, q.shape[-1])
    first, last = tile.low // sizes.block_kv, -(-tile.high // sizes.block_kv)
    share = -(-(last - first) // sizes.num_splits)
    first = first + split * share
    last = jnp.minimum(first + share, last)

    def more(state):
        return jnp.any(state[0] < last)

    def body(state):
        block, carry = state
        return block + 1, _block(q_tile, fetch, sizes, rules, tree, tile, rows, block, block < last, carry)

    carry = softmax.empty((lanes, *heads, block_q), sizes.v_dim)
    _, carry = lax.while_loop(more, body, (first, carry))
    sinks = None if sinks is None else sinks.astype(jnp.float32).reshape(1, *heads, 1)
    out, lse = softmax.finish(carry, sinks)
    out = jnp.transpose(out, (0, 3, 1, 2, 4)).reshape(lanes, block_q, q_heads, sizes.v_dim)
    return out.astype(out_type), jnp.transpose(lse, (0, 3, 1, 2)).reshape(lanes, block_q, q_heads)


def _block(q_tile, fetch, sizes: _Sizes, rules: _Rules, tree, tile: Tiles, rows, block, active, carry):
    k, v, k_scale, v_scale = fetch(tile.seq, block, tile.low, tile.high)
    keys = block[:, None] * sizes.block_kv + jnp.arange(sizes.block_kv, dtype=jnp.int32)
    held = (keys >= tile.low[:, None]) & (keys < tile.high[:, None]) & active[:, None]
    kind = _product_type(q_tile.dtype, k.dtype)
    exact = lax.Precision.HIGHEST if kind == jnp.float32 else None
    scores = jnp.einsum(
        "lthgd,lshd->lhgts",
        q_tile.astype(kind),
        k.astype(kind),
        precision=exact,
        preferred_element_type=jnp.float32,
    )
    scores = _scores(scores, rules, k_scale)
    visible = held[:, None, :] & _visible(rules, tree, tile, rows, keys)
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    weights, decay, top, total = softmax.weigh(carry, scores)
    if v_scale is not None:
        if v_scale.ndim:
            v_scale = jnp.where(held[..., None], v_scale, 0.0)
            weights = weights * jnp.transpose(v_scale, (0, 2, 1))[:, :, None, None, :]
        else:
            weights = weights * v_scale
    kind = _product_type(q_tile.dtype, v.dtype)
    v = jnp.where(held[:, :, None, None], v.astype(kind), jnp.zeros((), kind))  # 0 * NaN is NaN: mask values as well
    added = jnp.einsum(
        "lhgts,lshd->lhgtd", weights.astype(kind), v, precision=exact, preferred_element_type=jnp.float32
    )
    return softmax.Carry(top, total, carry.acc * decay[..., None] + added)


def _product_type(query, stored):
    # fp8 and int8 fit exactly in any 16-bit float that queries have (e5m2 and e4m3 in float16, int8 in bfloat16)
    return query if stored.itemsize == 1 else jnp.promote_types(query, stored)


def _scores(products, rules: _Rules, k_scale):
    # q . k f32[lanes, kv_heads, group, rows, keys] -> scaled, capped
    if k_scale is None:
        scores = products * jnp.float32(rules.sm_scale)
    elif k_scale.ndim == 0:
        scores = products * (jnp.float32(rules.sm_scale) * k_scale)
    else:
        scores = products * (jnp.float32(rules.sm_scale) * jnp.transpose(k_scale, (0, 2, 1))[:, :, None, None, :])
    if rules.logit_soft_cap is None:
        return scores
    cap = jnp.float32(rules.logit_soft_cap)
    return cap * jnp.tanh(scores / cap)


def _visible(rules: _Rules, tree: _Tree | None, tile: Tiles, rows, keys):
    # bool [lanes, block_q, keys]: which keys each row may see, by its mask and window (not by length)
    row = jnp.arange(rows.shape[1], dtype=jnp.int32)
    live = (row[None, :] < tile.rows[:, None])[:, :, None]
    if rules.mask == "full":
        return live
    place = (tile.first[:, None] + row[None, :])[:, :, None]
    keys = keys[:, None, :]
    if tree is None:
        seen = live & (keys <= place)
        return seen if rules.sliding_window is None else seen & (place - keys < rules.sliding_window)
    start = tree.starts[tile.seq][:, None, None]
    node = keys - start
    words = tree.bits.at[rows].get(mode="clip")  # [lanes, block_q, words]
    word = jnp.clip(node // 32, 0, words.shape[-1] - 1)
    picked = jnp.take_along_axis(words, jnp.broadcast_to(word, (*rows.shape, word.shape[-1])), axis=2)
    bit = (picked >> (node % 32).astype(jnp.uint32)) & jnp.uint32(1)
    seen = live & ((node < 0) | ((bit == 1) & (node < words.shape[-1] * 32)))
    if rules.sliding_window is None:
        return seen
    place = tree.q_positions.at[rows].get(mode="clip")[:, :, None]
    nodes = tree.kv_positions.at[tile.seq[:, None], jnp.maximum(node[:, 0], 0)].get(mode="clip")[:, None, :]
    return seen & (place - jnp.where(node < 0, keys, nodes) < rules.sliding_window)


def _unpack(outs, lses, tile_starts, cu_q_lens, tokens: int, num_tiles: int, splits: int):
    # tile-major results -> packed rows
    block_q = outs.shape[1]
    ids = jnp.arange(tokens, dtype=jnp.int32)
    real = ids < cu_q_lens[-1]
    seq = jnp.minimum(tiling.seq_of(cu_q_lens, ids), cu_q_lens.shape[0] - 2)
    offset = ids - cu_q_lens[seq]
    tile = tile_starts[seq] + offset // block_q
    row = jnp.where(real, offset % block_q, 0)
    tile = jnp.where(real, tile, 0)
    if splits == 1:
        out, lse = outs[tile, row], lses[tile, row]
    else:
        part = jnp.arange(splits, dtype=jnp.int32)[:, None]
        out, lse = outs[tile * splits + part, row], lses[tile * splits + part, row]
    keep = real[:, None]
    return jnp.where(keep[..., None], out, jnp.zeros((), out.dtype)), jnp.where(keep, lse, -jnp.inf)


def _pad_to_multiple(table, multiple: int):
    extra = -table.shape[1] % multiple
    return jnp.pad(table, ((0, 0), (0, extra))) if extra else table


def _tree(rules: _Rules, q, bits, starts, kv_positions, q_positions) -> _Tree | None:
    if rules.mask != "tree":
        if bits is not None:
            raise ValueError(f"tree_bits given with mask={rules.mask!r}: want mask='tree'")
        return None
    if bits is None or starts is None:
        raise ValueError("mask='tree' without tree_bits or tree_starts: give both")
    if bits.ndim != 2 or bits.shape[0] != q.shape[0] or bits.dtype != jnp.uint32:
        raise ValueError(f"tree_bits is {bits.dtype}{list(bits.shape)}: want uint32[tokens={q.shape[0]}, words]")
    if rules.sliding_window is not None and (kv_positions is None or q_positions is None):
        raise ValueError("sliding_window in a tree counts positions: give tree_kv_positions and q_positions")
    return _Tree(bits, starts, kv_positions, q_positions)


def _check_paged(k_pages, v_pages, page_table, seq_lens) -> None:
    if k_pages.shape[:3] != v_pages.shape[:3]:
        raise ValueError(f"k_pages.shape={k_pages.shape} but v_pages.shape={v_pages.shape}: want equal pages and heads")
    if k_pages.shape[0] * k_pages.shape[1] > _MAX_ROWS:
        raise ValueError(f"k_pages holds {k_pages.shape[0] * k_pages.shape[1]} slots: want at most {_MAX_ROWS} (int32)")
    if page_table.shape[0] != seq_lens.shape[0]:
        raise ValueError(
            f"page_table.shape[0]={page_table.shape[0]} but seq_lens.shape[0]={seq_lens.shape[0]}: one row a request"
        )
