"""One program of the portable GPU attention: a tile of (token, head) rows over a run of key blocks of one KV head.

Keys are gathered row by row through the page table, so that any page size will do; widths that are no power of two are
taken in pieces that are.

Source: arXiv:2205.14135, algorithm 1; arXiv:2309.06180 (paging).
"""

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels._common import latent_rows
from pallas_kernels._common.masks import Rules
from pallas_kernels.attention.gpu_config import Config

_LOG2E = math.log2(math.e)


class Static(NamedTuple):
    """What a program is compiled for."""

    config: Config
    rules: Rules
    group: int  # heads a KV head
    chunks: int  # parts of a group, one a program: a group may be wider than a tile
    k_dim: int
    v_dim: int
    page_size: int | None  # None: keys are packed request after request
    latent: bool  # values are the front of the keys
    kind: Any  # 8-bit float or None
    words: int  # of a tree's bits a row; 0 without a tree

    @property
    def heads(self) -> int:
        """Heads a program: rows a token."""
        return -(-self.group // self.chunks)


class Arrays(NamedTuple):
    """References in device memory; None where a call has none."""

    tiles: Any  # i32[tiles, 6], as `tiles.Tiles`
    where: Any  # i32[seqs, max_pages] page table, or i32[seqs + 1] first rows of packed keys
    offset: Any  # i32[1], added to page ids
    q: Any  # [tokens, q_heads, k_dim]
    k: Any  # [rows, kv_heads, k_dim]
    v: Any  # [rows, kv_heads, v_dim]
    k_scale: Any  # f32[1], or f32[rows, kv_heads]
    v_scale: Any
    sinks: Any  # f32[q_heads]
    bits: Any  # i32[tokens, words]
    starts: Any  # i32[seqs]
    kv_positions: Any  # i32[seqs, max_nodes], with a window
    q_positions: Any  # i32[tokens]
    out: Any  # [splits, tokens, q_heads, v_dim]
    lse: Any  # f32[splits, tokens, q_heads]


class _Tile(NamedTuple):
    seq: Any
    row: Any
    rows: Any
    first: Any
    low: Any
    high: Any


class _Rows(NamedTuple):
    """What each row of a tile stands for, i32[block_rows] each."""

    token: Any
    head: Any  # query head
    place: Any  # sequence index of the token
    real: Any  # bool


def pieces(dim: int, most: int = 512) -> tuple[tuple[int, int], ...]:
    """(start, size) of powers of two from 16 to `most` that cover `dim` columns; only the last may reach past the end.

    >>> pieces(80), pieces(576), pieces(20)
    (((0, 64), (64, 16)), ((0, 512), (512, 64)), ((0, 16), (16, 16)))
    """
    found, start = [], 0
    while start < dim:
        left = dim - start
        size = max(min(1 << (left.bit_length() - 1), most), 16)
        found.append((start, size))
        start += size
    return tuple(found)


def program(static: Static, arrays: Arrays) -> None:
    """Body of a program; grid (tiles, kv_heads * chunks, splits)."""
    at, head, part = (pl.program_id(axis) for axis in range(3))
    tile = _Tile(*(arrays.tiles[at, i] for i in range(6)))
    pl.when(tile.rows > 0)(lambda: _attend(static, arrays, tile, head, part))


def _attend(static: Static, arrays: Arrays, tile: _Tile, head, part) -> None:
    config = static.config
    kv_head, chunk = lax.div(head, jnp.int32(static.chunks)), lax.rem(head, jnp.int32(static.chunks))
    rows = _rows(static, tile, kv_head, chunk)
    size = config.block_kv
    queries = [
        _load(
            arrays.q, (rows.token[:, None], rows.head[:, None], _cols(piece)), rows.real[:, None], piece, static.k_dim
        )
        for piece in _k_pieces(static)
    ]
    begin, end = tile.low // size, (tile.high + size - 1) // size
    share = (end - begin + (config.splits - 1)) // config.splits
    begin = jnp.minimum(begin + part * share, end)
    end = jnp.minimum(begin + share, end)
    step = functools.partial(_step, static, arrays, tile, rows, kv_head, queries)
    carry = (
        jnp.full((config.block_rows,), -jnp.inf, jnp.float32),
        jnp.zeros((config.block_rows,), jnp.float32),
        *(jnp.zeros((config.block_rows, width), jnp.float32) for _, width in _v_pieces(static)),
    )
    edges = _whole_blocks(static, arrays, tile)
    inner = [jnp.clip(edge, begin, end) for edge in edges]
    runs = [(*inner, False), (inner[1], end, True)]
    if static.rules.sliding_window is not None:  # without one, the first block starts with the first key
        runs.insert(0, (begin, inner[0], True))
    for first, last, masked in runs:
        carry = lax.fori_loop(first, last, functools.partial(step, masked), carry)
    _finish(static, arrays, rows, part, *carry)


def _k_pieces(static: Static):
    if not static.latent:
        return pieces(static.k_dim)
    # the values' pieces first, so that a block of keys holds them
    most = latent_rows.GROUP if static.kind is not None else 512
    rope = pieces(static.k_dim - static.v_dim) if static.k_dim > static.v_dim else ()
    return (*pieces(static.v_dim, most), *((static.v_dim + start, size) for start, size in rope))


def _v_pieces(static: Static):
    return pieces(static.v_dim, latent_rows.GROUP if static.latent and static.kind is not None else 512)


def _cols(piece):
    return piece[0] + jnp.arange(piece[1], dtype=jnp.int32)[None, :]


def _load(ref, index: tuple, mask, piece, dim: int):
    # columns of a piece, 0 where masked or past `dim`
    if piece[0] + piece[1] > dim:
        mask = mask & (_cols(piece) < dim)
    shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in index))
    return plgpu.load(ref.at[index], mask=jnp.broadcast_to(mask, shape), other=jnp.zeros((), ref.dtype))


def _rows(static: Static, tile: _Tile, kv_head, chunk) -> _Rows:
    row = jnp.arange(static.config.block_rows, dtype=jnp.int32)
    token, head = row // static.heads, chunk * static.heads + row % static.heads
    real = (token < tile.rows) & (head < static.group)
    token = jnp.minimum(token, tile.rows - 1)
    head = kv_head * static.group + jnp.minimum(head, static.group - 1)
    return _Rows(tile.row + token, head, tile.first + token, real)


def _whole_blocks(static: Static, arrays: Arrays, tile: _Tile):
    # blocks [first, last) whose every key every row of the tile sees
    size, rules = static.config.block_kv, static.rules
    last = tile.high
    if static.words:
        last = jnp.minimum(last, arrays.starts[tile.seq])
    elif rules.mask == "causal":
        last = jnp.minimum(last, tile.first + 1)
    first = tile.low
    if rules.sliding_window is not None:  # the last row's window ends last; a tree's rows have positions of their own
        if static.words:
            return jnp.int32(0), jnp.int32(0)
        first = jnp.maximum(first, tile.first + tile.rows - rules.sliding_window)
    first, last = (first + (size - 1)) // size, jnp.maximum(last, 0) // size
    return first, jnp.maximum(last, first)


def _step(static: Static, arrays: Arrays, tile: _Tile, rows: _Rows, kv_head, queries, masked: bool, block, carry):
    top, total, *sums = carry
    size, rules = static.config.block_kv, static.rules
    keys = block * size + jnp.arange(size, dtype=jnp.int32)
    held = (keys >= tile.low) & (keys < tile.high) if masked else jnp.full((size,), True)
    at = _stored_rows(static, arrays, tile, keys, held)
    key_pieces = _keys(static, arrays, kv_head, at, held, queries[0].dtype)
    scores = functools.reduce(jnp.add, (_product(q, k.T) for q, k in zip(queries, key_pieces, strict=True)))
    scores = scores * (rules.sm_scale * _scale(arrays.k_scale, at, kv_head, held))
    cap = rules.logit_soft_cap
    if cap is None:
        scores = scores * _LOG2E
    else:  # cap * tanh(s / cap), with tanh(x) = 1 - 2 / (exp(2 x) + 1)
        scores = (cap - (2.0 * cap) / (jnp.exp2(scores * (2.0 * _LOG2E / cap)) + 1.0)) * _LOG2E
    if masked:
        scores = jnp.where(_seen(static, arrays, tile, rows, keys, held), scores, -jnp.inf)
    new = jnp.maximum(top, jnp.max(scores, axis=1))
    safe = jnp.where(new == -jnp.inf, 0.0, new)  # a row that saw nothing yet: exp2(-inf - 0), not -inf + inf
    decay = jnp.exp2(top - safe)
    weights = jnp.exp2(scores - safe[:, None])
    total = total * decay + jnp.sum(weights, axis=1)
    weights = weights * _scale(arrays.v_scale, at, kv_head, held)
    if static.latent:
        values = key_pieces[: len(sums)]
    else:
        values = [
            _values(static, arrays.v, kv_head, at, held, p, static.v_dim, queries[0].dtype) for p in _v_pieces(static)
        ]
    weights = weights.astype(values[0].dtype)
    sums = [acc * decay[:, None] + _product(weights, value) for acc, value in zip(sums, values, strict=True)]
    return new, total, *sums


def _product(a, b):
    # float32 operands are multiplied as they are, never as TF32
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)


def _stored_rows(static: Static, arrays: Arrays, tile: _Tile, keys, held):
    # rows of the pool where keys lie, i32[keys]; any row for keys that are not held
    if static.page_size is None:
        return jnp.where(held, arrays.where[tile.seq] + keys, 0)
    seq = jnp.full(keys.shape, tile.seq)
    entry = jnp.where(held, keys // static.page_size, 0)
    page = plgpu.load(arrays.where.at[seq, entry], mask=held, other=jnp.int32(0)) + arrays.offset[0]
    return jnp.where(held, page * static.page_size + keys % static.page_size, 0)


def _keys(static: Static, arrays: Arrays, kv_head, at, held, dtype):
    if static.latent and static.kind is not None:
        return _packed_latents(static, arrays.k, kv_head, at, held, dtype)
    return [_values(static, arrays.k, kv_head, at, held, piece, static.k_dim, dtype) for piece in _k_pieces(static)]


def _values(static: Static, ref, kv_head, at, held, piece, dim: int, dtype):
    # [keys, columns of a piece]; 8-bit values exactly, in the queries' dtype
    got = _load(ref, (at[:, None], jnp.full((1, 1), kv_head), _cols(piece)), held[:, None], piece, dim)
    if static.kind is not None:
        return widened(got, static.kind).astype(dtype)
    return got.astype(dtype) if got.dtype == jnp.int8 else got


def _packed_latents(static: Static, ref, kv_head, at, held, dtype):
    # rows as `_common/latent_rows.py` packs them: 8-bit latents, their groups' scales and the key, all as bytes
    def byte(column):
        index = (at[:, None], jnp.full((1, 1), kv_head), column)
        shape = jnp.broadcast_shapes(at[:, None].shape, column.shape)
        got = plgpu.load(ref.at[index], mask=jnp.broadcast_to(held[:, None], shape), other=jnp.zeros((), ref.dtype))
        return got.astype(jnp.int32)

    found = []
    scales_at, key_at = static.v_dim, latent_rows.num_bytes(static.v_dim, 0)
    for start, size in _k_pieces(static):
        cols = jnp.arange(size, dtype=jnp.int32)[None, :]
        if start < static.v_dim:
            first = jnp.full((1, 1), scales_at + 4 * (start // latent_rows.GROUP), jnp.int32)
            bits = functools.reduce(jnp.bitwise_or, (byte(first + i) << (8 * i) for i in range(4)))
            scale = lax.bitcast_convert_type(bits, jnp.float32)
            inside = cols < static.v_dim - start
            values = widened(jnp.where(inside, byte(jnp.minimum(start + cols, static.v_dim - 1)), 0), static.kind)
            found.append((values * scale).astype(dtype))
        else:
            inside = cols < static.k_dim - start
            at_byte = key_at + 2 * (jnp.minimum(start + cols, static.k_dim - 1) - static.v_dim)
            bits = (byte(at_byte) | (byte(at_byte + 1) << 8)) << 16  # a bfloat16 is the front of a float32
            found.append(jnp.where(inside, lax.bitcast_convert_type(bits, jnp.float32), 0.0).astype(dtype))
    return found


def widened(bits, kind):
    """8-bit floats `kind`, as their bits in any integer dtype, as float32: no GPU before sm_89 converts e4m3."""
    bits = bits.astype(jnp.int32)
    sign = (bits & 0x80) << 24
    mantissa = 3 if kind == jnp.float8_e4m3fn else 2
    bias, largest = (7, 0x7F) if mantissa == 3 else (15, 0x7C)
    low = bits & ((1 << mantissa) - 1)
    exponent = (bits & 0x7F) >> mantissa
    normal = lax.bitcast_convert_type(((exponent + (127 - bias)) << 23) | (low << (23 - mantissa)), jnp.float32)
    small = low.astype(jnp.float32) * 2.0 ** (1 - bias - mantissa)
    size = jnp.where(exponent == 0, small, normal)
    magnitude = bits & 0x7F
    if mantissa == 3:
        size = jnp.where(magnitude == largest, jnp.nan, size)
    else:
        size = jnp.where(magnitude == largest, jnp.inf, jnp.where(magnitude > largest, jnp.nan, size))
    return jnp.where(sign != 0, -size, size)


def _scale(ref, at, kv_head, held):
    # what stored values are multiplied by: 1, one number for all, or f32[1, keys]
    if ref is None:
        return 1.0
    if len(ref.shape) == 1:
        return ref[0]
    return plgpu.load(ref.at[at, jnp.full(at.shape, kv_head)], mask=held, other=jnp.float32(0))[None, :]


def _seen(static: Static, arrays: Arrays, tile: _Tile, rows: _Rows, keys, held):
    # bool[block_rows, keys]
    rules, seen = static.rules, held[None, :]
    if static.words:
        node = keys - arrays.starts[tile.seq]
        inside = (node >= 0) & (node < 32 * static.words)
        word = jnp.where(inside, node >> 5, 0)
        index = (rows.token[:, None], word[None, :])
        shape = (static.config.block_rows, static.config.block_kv)
        bits = plgpu.load(arrays.bits.at[index], mask=jnp.broadcast_to(inside[None, :], shape), other=jnp.int32(0))
        seen = seen & ((node[None, :] < 0) | ((bits >> (node & 31)[None, :]) & 1 == 1))
        if rules.sliding_window is None:
            return seen
        place = arrays.q_positions.at[rows.token]
        place = plgpu.load(place, mask=rows.real, other=jnp.int32(0))[:, None]
        nodes = arrays.kv_positions.shape[1]
        known = (node >= 0) & (node < nodes)
        index = (jnp.full(node.shape, tile.seq), jnp.where(known, node, 0))
        theirs = plgpu.load(arrays.kv_positions.at[index], mask=known, other=jnp.int32(0))
        return seen & (place - jnp.where(node < 0, keys, theirs)[None, :] < rules.sliding_window)
    if rules.mask == "causal":
        seen = seen & (keys[None, :] <= rows.place[:, None])
        if rules.sliding_window is not None:
            seen = seen & (rows.place[:, None] - keys[None, :] < rules.sliding_window)
    return seen


def _finish(static: Static, arrays: Arrays, rows: _Rows, part, top, total, *sums) -> None:
    # out = sums / total, 0 where nothing was seen; lse in natural log, without sinks
    seen = total > 0
    some = jnp.where(seen, total, 1.0)
    scale = jnp.where(seen, 1.0 / some, 0.0)
    lse = jnp.where(seen, (top + jnp.log2(some)) * math.log(2.0), -jnp.inf)
    if arrays.sinks is not None:
        sink = plgpu.load(arrays.sinks.at[rows.head], mask=rows.real, other=jnp.float32(0)) * _LOG2E
        high = jnp.maximum(jnp.where(seen, top, sink), sink)
        decay = jnp.where(seen, jnp.exp2(top - high), 0.0)
        scale = decay / (total * decay + jnp.exp2(sink - high))
    # The interpreter writes back what masked entries hold: so they must not stand for an entry that is written.
    token = jnp.where(rows.real, rows.token, arrays.lse.shape[1])
    for piece, acc in zip(_v_pieces(static), sums, strict=True):
        cols = _cols(piece)
        mask = rows.real[:, None] & (cols < static.v_dim)
        target = arrays.out.at[jnp.full((1, 1), part), token[:, None], rows.head[:, None], cols]
        plgpu.store(target, (acc * scale[:, None]).astype(arrays.out.dtype), mask=mask)
    plgpu.store(arrays.lse.at[jnp.full(token.shape, part), token, rows.head], lse, mask=rows.real)
