"""Scores and sums of a block of keys on TPU: the mask, the products, the running softmax, and its end.

Source: arXiv:2205.14135, algorithm 1 (online softmax, here in base 2).
"""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._common.tpu_rows import LANES
from pallas_kernels.attention.tpu_records import LOG2E, Item, Refs, Static


def is_whole(static: Static, item: Item, j):
    """Whether every query of the item sees every key of block j."""
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


def visible(static: Static, refs: Refs, item: Item, j, place):
    """bool [block_q, block_kv]: what each query token sees of block j."""
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


def attend_block(
    static: Static, refs: Refs, item: Item, j, slot, place, scales, *, masked: bool, meanwhile=None
) -> None:
    """Fold block j into the state of all tiles. Args: meanwhile: code to mix with that of unrolled heads."""
    seen = visible(static, refs, item, j, place) if masked else None
    if static.config.unroll_heads:
        tiles, parts = range(static.tiles), _parts(static)
        raws = [[raw_scores(static, refs, tile, slot, place, keys) for keys in parts] for tile in tiles]
        if meanwhile is not None:
            meanwhile()
        states = []
        for tile in tiles:
            state = None
            for keys, raw in zip(parts, raws[tile], strict=True):
                mine = seen if seen is None or len(parts) == 1 else seen[:, keys.start : keys.start + keys.size]
                state = fold(static, refs, tile, slot, raw, mine, state, keys, scales)
            states.append(state)
        for tile in tiles:
            refs.top[tile], refs.total[tile], refs.acc[tile] = states[tile]
        return

    def one(tile, _):
        raw = raw_scores(static, refs, tile, slot, place)
        refs.top[tile], refs.total[tile], refs.acc[tile] = fold(static, refs, tile, slot, raw, seen, scales=scales)
        return 0

    lax.fori_loop(0, static.tiles, one, 0)


def _parts(static: Static) -> list:
    # Where one tile is all there is, the sums of one half of the keys are for the products of the other to hide behind.
    half = static.block_kv // 2
    if static.tiles > 1 or static.row.scales or half < LANES:
        return [slice(None)]
    return [pl.ds(0, half), pl.ds(half, half)]


def _window(static: Static, refs: Refs, side: str, tile, slot, keys):
    # keys or values of a tile's heads, [keys, lanes of the window]
    heads, row = static.config.heads, static.row
    if isinstance(tile, int):
        base, wide = row.window(side, tile * heads, heads)
    else:
        base, wide = row.window_of_tile(side, tile, heads)
        base = pl.multiple_of(base, LANES)
    lanes = pl.ds(base, wide)
    held = refs.kv[slot, keys, lanes]
    return (held if static.held == static.kind else pltpu.bitcast(held, static.kind)).astype(static.compute)


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


def token_scales(static: Static, refs: Refs):
    """(side, tile) -> [rows, block_kv]: the scale of each key for the head of each row."""
    heads, copies = static.config.heads, static.group * static.config.block_q

    def of(side: str, tile):
        base = (0 if side == "k" else static.row.kv_heads) + tile * heads
        held = [refs.token_scales[pl.ds(base + head, 1)] for head in range(heads)]
        spare = static.rows - heads * copies
        sizes = [copies] * heads + ([spare] if spare else [])
        wide = [jnp.broadcast_to(x, (size, x.shape[1])) for x, size in zip([*held, held[0]], sizes, strict=False)]
        return jnp.concatenate(wide, axis=0) if len(wide) > 1 else wide[0]

    return of


def _for_rows(static: Static, seen):
    # [block_q, keys] for the rows of a product, which are head after head, tokens of a head together
    copies = static.config.heads * static.group
    if static.config.block_q == 1:
        return jnp.broadcast_to(seen, (static.rows, seen.shape[1]))
    return jnp.concatenate([seen] * copies, axis=0) if copies > 1 else seen


def finish(static: Static, refs: Refs, place) -> None:
    """Outputs and log-sum-exps of an item, from the state of all tiles."""

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
