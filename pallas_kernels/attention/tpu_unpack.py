"""Blocks that arrived on TPU, made into rows that products can read: words, 8-bit latents, scales, rows of no key."""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._common.tpu_rows import LANES, LatentBytes
from pallas_kernels.attention.tpu_records import Item, Refs, Static


def unpack(static: Static, refs: Refs, slot):
    """Make rows of keys and values of the block that arrived at `slot`; where they lie in `refs.kv`."""
    if static.words:
        _unpack_words(static, refs, slot)
        slot = 0
    if static.latent is not None:
        _unpack_latents(static, refs, static.latent, slot)
        slot = 0
    if static.row.scales:
        _take_scales(static, refs, slot)
    return slot


def _unpack_words(static: Static, refs: Refs, slot) -> None:
    # a block of words as rows: word i of a tile row holds entry i of the next `parts` tiles of that token
    target = refs.kv if static.latent is None else refs.kv_bytes
    parts = 4 // static.arriving.itemsize
    bits, step = 32 // parts, 8 * parts

    def unpack(group, _):
        at = pl.ds(pl.multiple_of(group * step, step), step)
        for tile in range(target.shape[2] // LANES):
            rows = [pl.ds(group * step + i, 8, stride=parts) for i in range(parts)]
            words = [refs.kv_words[slot, row, tile // parts, 0] for row in rows]
            out = words[0]
            if parts > 1:
                picked = [lax.shift_right_logical(x, bits * (tile % parts)) & ((1 << bits) - 1) for x in words]
                out = functools.reduce(jnp.bitwise_or, (x << bits * i for i, x in enumerate(picked)))
            target[0, at, tile * LANES : (tile + 1) * LANES] = pltpu.bitcast(out, static.arriving)
        return 0

    lax.fori_loop(0, static.block_kv // step, unpack, 0)


def _planes(x, plane: int, count: int):
    # bytes int32[rows, count * plane] as numbers of 8 * count bits, int32[rows, max(plane, 128)]; see `to_planes`
    parts = []
    for byte in range(count):
        part = x if plane < LANES else x[:, byte * plane : (byte + 1) * plane]
        if plane < LANES and byte:
            part = pltpu.roll(part, LANES - byte * plane, 1)
        parts.append((part & 255) << 8 * byte)
    return functools.reduce(jnp.bitwise_or, parts)


_STEP = 32  # rows at a time: a register of bytes


def _unpack_latents(static: Static, refs: Refs, held: LatentBytes, slot) -> None:
    groups, plane = held.groups, held.rope_plane
    key_lanes = max(plane, LANES)

    def unpack(step, _):
        at = pl.ds(pl.multiple_of(step * _STEP, _STEP), _STEP)
        numbers = refs.kv_bytes[slot, at, held.scales_at : held.lanes].astype(jnp.int32)
        scales = pltpu.bitcast(_planes(numbers, (held.lanes - held.scales_at) // 4, 4), jnp.float32)
        for group in range(groups):
            lanes = slice(group * LANES, (group + 1) * LANES)
            values = pltpu.bitcast(refs.kv_bytes[slot, at, lanes], jnp.float8_e4m3fn).astype(jnp.float32)
            scale = jnp.broadcast_to(scales[:, group : group + 1], values.shape)
            refs.kv[0, at, lanes] = (values * scale).astype(static.kind)
        numbers = refs.kv_bytes[slot, at, held.rope_at : held.scales_at].astype(jnp.int32)
        key = pltpu.bitcast(_planes(numbers, plane, 2) << 16, jnp.float32)
        lane = lax.broadcasted_iota(jnp.int32, key.shape, 1)
        key = jnp.where(lane < held.rope_dim, key, 0.0)
        refs.kv[0, at, held.rope_at : held.rope_at + key_lanes] = key.astype(static.kind)
        return 0

    lax.fori_loop(0, static.block_kv // _STEP, unpack, 0)


def _take_scales(static: Static, refs: Refs, slot) -> None:
    # The matrix unit turns bytes down the rows into bytes along lanes: products with 1, sums of one term, so exact.
    row, count = static.row, refs.token_scales.shape[0]
    area = row.lanes - row.scales_at
    out, lane = (lax.broadcasted_iota(jnp.int32, (4 * count, area), axis) for axis in (0, 1))
    pick = lane == out // count * row.plane + lax.rem(out, count)
    numbers = refs.kv[slot, :, row.scales_at : row.lanes].astype(jnp.float32).astype(jnp.bfloat16)
    dims = (((1,), (1,)), ((), ()))
    found = lax.dot_general(
        pick.astype(jnp.float32).astype(jnp.bfloat16), numbers, dims, preferred_element_type=jnp.float32
    )
    parts = [found[byte * count : (byte + 1) * count].astype(jnp.int32) for byte in range(4)]
    word = functools.reduce(jnp.bitwise_or, ((part & 255) << 8 * byte for byte, part in enumerate(parts)))
    refs.token_scales[...] = pltpu.bitcast(word, jnp.float32)


def clear(static: Static, refs: Refs, item: Item, j, slot) -> None:
    """Zero the values of rows of block j that hold no key of the item."""
    # Rows of values that nothing was copied to, or that hold no token, may be NaN: a weight of 0 would not help.
    if not jnp.issubdtype(static.kind, jnp.floating):
        return
    begin, first_lane = item.low - j * static.keys, static.row.offset("v", 0) // LANES * LANES
    end = jnp.minimum(item.high - j * static.keys, static.keys)
    parts = 4 // static.held.itemsize
    step, bits = 8 * parts, 32 // parts

    def zero(i, _):
        at = pl.ds(pl.multiple_of(i * step, step), step)
        old = pltpu.bitcast(refs.kv[slot, at, first_lane:], jnp.int32)  # entries of `parts` rows a word
        row = i * step + parts * lax.broadcasted_iota(jnp.int32, old.shape, 0)
        keep = jnp.zeros_like(old)
        for part in range(parts):
            held = (row + part >= begin) & (row + part < end)
            keep |= jnp.where(held, _signed(((1 << bits) - 1) << bits * part), 0)
        refs.kv[slot, at, first_lane:] = pltpu.bitcast(old & keep, static.held)
        return 0

    lax.fori_loop(0, jnp.clip((begin + step - 1) // step, 0, static.block_kv // step), zero, 0)
    lax.fori_loop(jnp.clip(end // step, 0, static.block_kv // step), static.block_kv // step, zero, 0)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
