"""Weights from scores in registers, and the turns of the Hopper prefill's computing warpgroups.

Register by register, so that what runs beside the products is little more than one multiply-add, one power of two, one
maximum and one sum an element: rows are summed across the threads that share them once a tile, and only blocks that a
rule cuts are compared with it.
"""
# Inline code and the decorators of `jax.experimental.pallas.mosaic_gpu` are typed more loosely than what they make.
# pyright: reportArgumentType=false, reportCallIssue=false, reportPrivateImportUsage=false

import math

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import mosaic_gpu_sm90_copy as copies
from pallas_kernels.attention import mosaic_gpu_sm90_rows as rows_io
from pallas_kernels.attention.mosaic_gpu_sm90_prefill_records import Static, Tile
from pallas_kernels.attention.mosaic_gpu_sm90_rows import ROW, TILE, constant

arith, ir, llvm = utils.arith, utils.ir, utils.llvm
vector = utils.vector

_LOG2E = math.log2(math.e)
_FAR = 1 << 30


def weigh(static: Static, tile: Tile, block, start, scale, scores, top, total):
    """Weights of a block's scores [64, block_kv], and the running maximum and sum of each row.

    Returns: weights f32, the factor of what was summed so far, maximum (of logarithms to base 2), sum; the sum is each
    thread's own, see `row_sum`.
    """
    scores, unit = _capped(static.rules.logit_soft_cap, scores, scale)
    first = block * static.config.block_kv
    whole = (first >= tile.low) & (first + static.config.block_kv <= tile.high)
    scores = lax.cond(whole, lambda s: s, lambda s: mask(static, tile, first, start, s), scores)
    new = jnp.maximum(top, jnp.max(scores, axis=1) * unit)  # as sm_scale > 0
    safe = jnp.where(new == -jnp.inf, 0.0, new)  # a row that saw nothing yet: exp2(-inf - 0), not -inf + inf
    decay = jnp.exp2(top - safe)
    weights, total = _powers(static.config.polynomial, scores, unit, safe, total * decay)
    return weights, decay, new, total


def _capped(cap: float | None, scores, scale):
    # scores, and what makes them logarithms to base 2, so that a weight is one power of two
    if cap is None:
        return scores, scale * _LOG2E
    # cap * tanh(s / cap), with tanh(x) = 1 - 2 / (exp(2 x) + 1)
    return cap - (2.0 * cap) / (jnp.exp2(scores * (scale * (2.0 * _LOG2E / cap))) + 1.0), _LOG2E


def mask(static: Static, tile: Tile, first, start, scores):
    """Scores of keys `first` and on, -inf where a rule or the length hides the key."""
    rules, group = static.rules, static.group
    scalar = plgpu.Layout.WG_SPLAT(())
    result = plgpu.ShapeDtypeStruct(scores.shape, scores.dtype, layout=TILE)

    @plgpu.inline_mgpu(arg_types=(TILE, *[scalar] * 4), return_type=result)
    def inline(_, tile_, place, kv_len, first, start):
        place, kv_len, first, start = (rows_io.value_of(x) for x in (place, kv_len, first, start))
        regs = np.empty_like(tile_.registers)
        nothing = utils.c(-math.inf, ir.F32Type.get())
        bounds: dict = {}
        for at, row, col, lane_row, lane_col in rows_io.places_of(scores.shape):
            if row not in bounds:
                bounds[row] = _bounds(rules, group, place, kv_len, first, start, rows_io.plus(lane_row, row), lane_col)
            low, high = bounds[row]
            parts = []
            for i in range(2):
                score = vector.extract(tile_.registers[at], dynamic_position=[], static_position=[i])
                seen = arith.cmpi(arith.CmpIPredicate.sgt, high, constant(col + i))
                if low is not None:
                    seen = arith.andi(seen, arith.cmpi(arith.CmpIPredicate.sle, low, constant(col + i)))
                parts.append(arith.select(seen, score, nothing))
            regs[at] = vector.from_elements(ir.VectorType.get((2,), ir.F32Type.get()), parts)
        return mgpu.FragmentedArray(_registers=regs, _layout=TILE.to_mgpu(), _is_signed=None)

    scalars = (tile.first, tile.kv_len, first, start)
    return inline(plgpu.layout_cast(scores, TILE), *(jnp.asarray(x, jnp.int32) for x in scalars))


def _bounds(rules, group: int, place, kv_len, first, start, row, lane_col):
    # a row's first visible key (None: the first of all) and one past its last, counted from this thread's first column
    near = arith.addi(first, lane_col)
    if rules.mask == "full":
        return None, arith.subi(kv_len, near)
    mine = arith.addi(place, arith.divsi(arith.addi(row, start), constant(group)))
    high = arith.subi(arith.minsi(arith.addi(mine, constant(1)), kv_len), near)
    if rules.sliding_window is None:
        return None, high
    return arith.subi(mine, arith.addi(near, constant(min(rules.sliding_window, _FAR) - 1))), high


def _powers(polynomial: int, scores, unit, top, total):
    # 2 ** (scores * unit - top), and `total` plus this thread's own of each row
    result = plgpu.ShapeDtypeStruct(scores.shape, jnp.float32, layout=TILE)
    sums = plgpu.ShapeDtypeStruct((scores.shape[0],), jnp.float32, layout=ROW)

    @plgpu.inline_mgpu(arg_types=(TILE, plgpu.Layout.WG_SPLAT(()), ROW, ROW), return_type=(result, sums))
    def inline(_, tile, unit, top, total):
        f32 = ir.F32Type.get()
        unit = rows_io.value_of(unit)
        tops = [arith.negf(_one(x)) for x in top.registers.flat]  # rows 0 and 8 of the warp's 16
        summed = [[_one(x), None] for x in total.registers.flat]
        regs = np.empty_like(tile.registers)
        for n, (at, row, _, _, _) in enumerate(rows_io.places_of(scores.shape)):
            half = row % 16 // 8
            parts = []
            for i in range(2):
                score = vector.extract(tile.registers[at], dynamic_position=[], static_position=[i])
                power = llvm.intr_fma(score, unit, tops[half])
                weight = _polynomial(power) if (2 * n + i) // 2 % 16 < polynomial else _power(power)
                summed[half][i] = weight if summed[half][i] is None else arith.addf(summed[half][i], weight)
                parts.append(weight)
            regs[at] = vector.from_elements(ir.VectorType.get((2,), f32), parts)
        sums = np.empty_like(total.registers)
        for half, place in enumerate(np.ndindex(sums.shape)):
            sums[place] = vector.from_elements(ir.VectorType.get((1,), f32), [arith.addf(*summed[half])])
        return (
            mgpu.FragmentedArray(_registers=regs, _layout=TILE.to_mgpu(), _is_signed=None),
            mgpu.FragmentedArray(_registers=sums, _layout=ROW.to_mgpu(), _is_signed=None),
        )

    return inline(plgpu.layout_cast(scores, TILE), jnp.float32(unit), top, total)


def _power(x):
    return llvm.inline_asm(ir.F32Type.get(), [x], "ex2.approx.ftz.f32 $0, $1;", "=f,f", has_side_effects=False)


# 2 ** f for f in [-1/2, 1/2], of least relative error: 3e-6
_COEFFICIENTS = (0.99999926, 0.69312181, 0.24024745, 0.05591786, 0.0095701)
_ROUND = 12582912.0  # 1.5 * 2 ** 23: a sum with it has the nearest integer in its low bits


def _polynomial(x):
    # 2 ** x for x <= 0 by multiply-adds: where these wait for nothing, they relieve the unit that makes the others
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
    x = arith.maxnumf(x, utils.c(-126.0, f32))
    shifted = arith.addf(x, utils.c(_ROUND, f32))
    rest = arith.subf(x, arith.subf(shifted, utils.c(_ROUND, f32)))
    power = utils.c(_COEFFICIENTS[-1], f32)
    for coefficient in _COEFFICIENTS[-2::-1]:
        power = llvm.intr_fma(power, rest, utils.c(coefficient, f32))
    exponent = arith.shli(arith.bitcast(i32, shifted), constant(23))
    return arith.bitcast(f32, arith.addi(arith.bitcast(i32, power), exponent))


def settled(value: jax.Array) -> jax.Array:
    """The same tile, computed before anything with an effect that follows."""

    @plgpu.inline_mgpu(arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct(value.shape, value.dtype, layout=TILE))
    def inline(_, tile):
        return mgpu.optimization_barrier(tile)

    return inline(value)


def row_sum(total: jax.Array) -> jax.Array:
    """Sums of rows [64] from the own sums of the four threads that share each."""

    @plgpu.inline_mgpu(arg_types=(ROW,), return_type=plgpu.ShapeDtypeStruct(total.shape, jnp.float32, layout=ROW))
    def inline(_, total):
        regs = np.empty_like(total.registers)
        for place in np.ndindex(regs.shape):
            value = _one(total.registers[place])
            for lanes in (1, 2):
                value = arith.addf(value, utils.shfl_bfly(value, lanes))
            regs[place] = vector.from_elements(ir.VectorType.get((1,), ir.F32Type.get()), [value])
        return mgpu.FragmentedArray(_registers=regs, _layout=ROW.to_mgpu(), _is_signed=None)

    return inline(total)


def _one(register):
    return vector.extract(register, dynamic_position=[], static_position=[0])


def clear_rows(ring, stage, first, swizzle: int | None = None) -> None:
    """Set rows `first` and on of `ring[stage]` to zero, for products to read; this warpgroup's threads do it.

    swizzle: of the ring in bytes, where it is not the widest that fits.
    """
    _, rows, dim = ring.shape
    row_bytes = dim * jnp.dtype(ring.dtype).itemsize
    swizzle, layout = copies.transforms(dim, jnp.dtype(ring.dtype).itemsize, swizzle)
    scalar = plgpu.Layout.WG_SPLAT(())
    a_pass = utils.WARPGROUP_SIZE * 16 // row_bytes  # whole rows a pass, and perhaps idle threads
    chunks = row_bytes // 16

    def some(i, _):
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(layout), *[scalar] * 2))
        def inline(_, smem, stage, at):
            base = arith.addi(
                copies.shared_address(smem), arith.muli(rows_io.value_of(stage), constant(rows * row_bytes))
            )
            lane = arith.remui(utils.thread_idx(), constant(utils.WARPGROUP_SIZE))
            row = arith.addi(rows_io.value_of(at), arith.divui(lane, constant(chunks)))
            byte = arith.muli(arith.remui(lane, constant(chunks)), constant(16))
            mine = arith.cmpi(arith.CmpIPredicate.slt, lane, constant(a_pass * chunks))
            with mgpu.when(arith.andi(mine, arith.cmpi(arith.CmpIPredicate.slt, row, constant(rows)))):
                target = arith.addi(base, copies.swizzled(row, byte, row_bytes, swizzle))
                copies.asm("st.shared.v4.b32 [$0], {$1, $1, $1, $1};", target, constant(0), constraints="r,r")

        inline(ring, jnp.asarray(stage, jnp.int32), jnp.asarray(first + i * a_pass, jnp.int32))

    lax.fori_loop(0, (rows - first + (a_pass - 1)) // a_pass, some, None)
    copies.handed_over()


_TURNS = 12
"""Hardware barriers 13 to 15, one a computing warpgroup; Mosaic GPU counts from 1, one a warpgroup."""


def take_turn(static: Static, who) -> None:
    """Wait until the computing warpgroup before this one has ended its turn."""
    _turn("bar.sync", jnp.asarray(who, jnp.int32))


def end_turn(static: Static, who) -> None:
    """Let the next computing warpgroup go on."""
    _turn("bar.arrive", jnp.where(who == static.config.groups - 1, 0, who + 1).astype(jnp.int32))


def _turn(instruction: str, whose) -> None:
    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT(()),))
    def inline(_, whose):
        barrier = arith.addi(rows_io.value_of(whose), constant(_TURNS + 1))
        copies.asm(f"{instruction} $0, {2 * utils.WARPGROUP_SIZE};", barrier, constraints="r")

    inline(whose)
