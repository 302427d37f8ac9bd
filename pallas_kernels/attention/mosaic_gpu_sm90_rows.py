"""Rows between device memory and registers on Hopper, where neither the copy engine nor a plain reference fits.

A tile packs the query tokens of a request times the heads of a group: 3, 6 or 7 heads a token, any token to start from,
and a last tile that is part empty. So each thread computes the addresses of its own elements, and stores only rows that
are valid. The interpreter runs no inline code: each function has a plain form with the same meaning.
"""
# Inline code and the decorators of `jax.experimental.pallas.mosaic_gpu` are typed more loosely than what they make.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from typing import NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

# the MLIR that Mosaic GPU itself is written in
arith, ir, llvm, mgpu_vector = utils.arith, utils.ir, utils.llvm, utils.vector

TILE = plgpu.Layout.WGMMA
LANES = plgpu.Layout.WG_STRIDED((utils.WARPGROUP_SIZE,), vec_size=1)  # a number a thread
ROW = plgpu.Layout.WGMMA.reduce(1)


class Rows(NamedTuple):
    """Where row r of a tile lies in a [rows, width] array: (first + r // group) * stride + r % group + offset."""

    first: jax.Array  # i32, first token
    offset: jax.Array  # i32, first head
    used: jax.Array  # i32, rows of the tile that exist; at least 1
    group: int  # rows a token
    stride: int  # rows of the array a token
    most: int = 64  # rows that may exist of the 64 that a warpgroup has: the interpreter takes its time for each

    def at(self, row: jax.Array) -> jax.Array:
        """Array row of tile row `row`, or of the last used one."""
        row = jnp.minimum(row, self.used - 1)
        return (self.first + row // self.group) * self.stride + row % self.group + self.offset


def load(
    ref, rows: Rows, *, shape: tuple[int, int], start: jax.Array | int = 0, column: int = 0, interpret: bool
) -> jax.Array:
    """Rows `start` to `start + shape[0]` of a tile, columns `column` and on, from [rows, width] in device memory.

    Rows past `rows.used` repeat the last used one: no branch, and never a byte that nobody wrote.
    """
    if interpret:
        columns = slice(column, column + shape[1])
        picked = [ref[rows.at(jnp.int32(start + i)), columns] for i in range(min(shape[0], rows.most))]
        picked += picked[-1:] * (shape[0] - len(picked))
        return plgpu.layout_cast(jnp.stack(picked), TILE)
    scalar = plgpu.Layout.WG_SPLAT(())
    result = plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=TILE)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[scalar] * 4), return_type=result)
    def inline(_, gmem, first, offset, used, begin):
        first, offset, used, begin = (value_of(x) for x in (first, offset, used, begin))
        kind = utils.dtype_to_ir_type(ref.dtype)
        pair = ir.VectorType.get((2,), kind)
        base = utils.memref_ptr(gmem)
        regs = np.empty(TILE.to_mgpu().registers_shape(shape), dtype=object)
        row_at, first_col = {}, None
        for place, row, col, lane_row, lane_col in places_of(shape):
            if row not in row_at:
                tile_row = arith.minsi(plus(plus(lane_row, row), begin), arith.subi(used, constant(1)))
                row_at[row] = address_of(array_row(tile_row, first, offset, rows), ref.shape[1], base, kind)
                first_col = lane_col
            at = utils.getelementptr(row_at[row], [plus(first_col, column + col)], kind)
            regs[place] = llvm.load(pair, at)
        return mgpu.FragmentedArray(_registers=regs, _layout=TILE.to_mgpu(), _is_signed=None)

    return inline(ref, *(jnp.asarray(x, jnp.int32) for x in (rows.first, rows.offset, rows.used, start)))


def load_vector(ref, rows: Rows, *, start: jax.Array | int = 0, interpret: bool) -> jax.Array:
    """One number of 32 bits a row, [64], from a flat array: as `load`."""
    if interpret:
        picked = [ref[rows.at(jnp.int32(start + i))] for i in range(64)]
        return plgpu.layout_cast(jnp.stack(picked), ROW)
    scalar = plgpu.Layout.WG_SPLAT(())

    signed = ref.dtype == jnp.int32 if jnp.issubdtype(ref.dtype, jnp.integer) else None

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *[scalar] * 4), return_type=plgpu.ShapeDtypeStruct((64,), ref.dtype, layout=ROW)
    )
    def inline(_, gmem, first, offset, used, begin):
        first, offset, used, begin = (value_of(x) for x in (first, offset, used, begin))
        kind = utils.dtype_to_ir_type(ref.dtype)
        base = utils.memref_ptr(gmem)
        lane_row = row_of_lane(arith.remui(utils.thread_idx(), constant(utils.WARPGROUP_SIZE)))
        regs = np.empty(ROW.to_mgpu().registers_shape((64,)), dtype=object)
        for at, place in enumerate(np.ndindex(regs.shape)):
            tile_row = arith.minsi(plus(plus(lane_row, 8 * at), begin), arith.subi(used, constant(1)))
            address = address_of(array_row(tile_row, first, offset, rows), 1, base, kind)
            regs[place] = llvm.load(ir.VectorType.get((1,), kind), address)
        return mgpu.FragmentedArray(_registers=regs, _layout=ROW.to_mgpu(), _is_signed=signed)

    return inline(ref, *(jnp.asarray(x, jnp.int32) for x in (rows.first, rows.offset, rows.used, start)))


def load_scalars(ref, row: jax.Array, count: int) -> list[jax.Array]:
    """The first numbers of a row of i32[rows, width] or i32[1], loaded here and together, not each where first used."""
    scalar = plgpu.Layout.WG_SPLAT(())
    result = plgpu.ShapeDtypeStruct((), jnp.int32, layout=scalar)
    width = ref.shape[-1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scalar), return_type=(result,) * count)
    def inline(_, gmem, row):
        i32 = ir.IntegerType.get_signless(32)
        address = address_of(value_of(row), width, utils.memref_ptr(gmem), i32)
        if width % 4:
            words = [_kept(utils.getelementptr(address, [i], i32), 1) for i in range(count)]
        else:
            several = [_kept(utils.getelementptr(address, [i], i32), 4) for i in range(0, count, 4)]
            words = [llvm.extractvalue(i32, four, [i]) for four in several for i in range(4)]
        return tuple(mgpu.FragmentedArray.splat(word, (), is_signed=True) for word in words[:count])

    return list(inline(ref, jnp.asarray(row, jnp.int32)))


def load_lanes(ref, row, first, last) -> jax.Array:
    """Lane n of each warp takes `ref[row, min(max(first, 0) + n, last)]` of i32[rows, width], for n under 32."""
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), scalar, scalar, scalar),
        return_type=plgpu.ShapeDtypeStruct((utils.WARPGROUP_SIZE,), jnp.int32, layout=LANES),
    )
    def inline(_, gmem, row, first, last):
        i32 = ir.IntegerType.get_signless(32)
        row, first, last = (value_of(x) for x in (row, first, last))
        lane = arith.remui(utils.thread_idx(), constant(utils.WARP_SIZE))
        at = arith.minsi(arith.addi(arith.maxsi(first, constant(0)), lane), last)
        address = address_of(row, ref.shape[1], utils.memref_ptr(gmem), i32)
        regs = np.empty((1,), dtype=object)
        word = llvm.load(i32, utils.getelementptr(address, [at], i32))
        regs[0] = mgpu_vector.broadcast(ir.VectorType.get((1,), i32), word)
        return mgpu.FragmentedArray(_registers=regs, _layout=LANES.to_mgpu(), _is_signed=True)

    return inline(ref, *(jnp.asarray(x, jnp.int32) for x in (row, first, last)))


def _kept(address, count: int):
    # One 32-bit word, or four at once, of what all layers of a step read: it stays in the L2 while keys and values run
    # through it, which are read once.
    policy = "createpolicy.fractional.L2::evict_last.b64 kept, 1.0;"
    if count == 1:
        kind, out, constraints = ir.IntegerType.get_signless(32), "b32 $0, [$1]", "=r,l"
    else:
        kind = ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>")
        out, constraints = "v4.b32 {$0, $1, $2, $3}, [$4]", "=r,=r,=r,=r,l"
    text = f"{{ .reg .b64 kept; {policy} ld.global.L2::cache_hint.{out}, kept; }}"
    return llvm.inline_asm(kind, [address], text, constraints, has_side_effects=True)


def store(ref, value: jax.Array, rows: Rows, *, start: jax.Array | int = 0, column: int = 0, interpret: bool) -> None:
    """Store those rows of a tile that exist: `value` [64, n] holds tile rows `start` and columns `column` and on."""
    if interpret:
        for i in range(min(value.shape[0], rows.most)):

            @pl.when(start + i < rows.used)
            def _(i=i):
                ref[rows.at(jnp.int32(start + i)), column : column + value.shape[1]] = value[i]

        return
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), TILE, *[scalar] * 4))
    def inline(_, gmem, tile, first, offset, used, begin):
        first, offset, used, begin = (value_of(x) for x in (first, offset, used, begin))
        kind = utils.dtype_to_ir_type(ref.dtype)
        bits = ir.IntegerType.get_signless(2 * utils.bitwidth(kind))
        base = utils.memref_ptr(gmem)
        row_at: dict = {}
        for place, row, col, lane_row, lane_col in places_of(value.shape):
            if row not in row_at:
                tile_row = plus(plus(lane_row, row), begin)
                exists = arith.cmpi(arith.CmpIPredicate.slt, tile_row, used)
                row_at[row] = exists, address_of(array_row(tile_row, first, offset, rows), ref.shape[1], base, kind)
            exists, address = row_at[row]
            word = llvm.bitcast(bits, tile.registers[place])
            store_if(exists, utils.getelementptr(address, [plus(lane_col, column + col)], kind), word)

    inline(ref, value, *(jnp.asarray(x, jnp.int32) for x in (rows.first, rows.offset, rows.used, start)))


def store_vector(ref, value: jax.Array, rows: Rows, *, start: jax.Array | int = 0, interpret: bool) -> None:
    """Store one float32 a row into a flat array: as `store`, with `value` f32[64]."""
    if interpret:
        for i in range(min(value.shape[0], rows.most)):

            @pl.when(start + i < rows.used)
            def _(i=i):
                ref[rows.at(jnp.int32(start + i))] = value[i]

        return
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ROW, *[scalar] * 4))
    def inline(_, gmem, vector, first, offset, used, begin):
        first, offset, used, begin = (value_of(x) for x in (first, offset, used, begin))
        base = utils.memref_ptr(gmem)
        lane = arith.remui(utils.thread_idx(), constant(utils.WARPGROUP_SIZE))
        one_a_row = arith.cmpi(arith.CmpIPredicate.eq, arith.remui(lane, constant(4)), constant(0))
        lane_row = row_of_lane(lane)
        for at, register in enumerate(vector.registers.flat):  # rows 0 and 8 of the warp's 16
            tile_row = plus(plus(lane_row, 8 * at), begin)
            exists = arith.andi(one_a_row, arith.cmpi(arith.CmpIPredicate.slt, tile_row, used))
            address = address_of(array_row(tile_row, first, offset, rows), 1, base, ir.F32Type.get())
            store_if(exists, address, llvm.bitcast(ir.IntegerType.get_signless(32), register))

    inline(ref, value, *(jnp.asarray(x, jnp.int32) for x in (rows.first, rows.offset, rows.used, start)))


def places_of(shape):
    """Of each register of a tile: its index, its static (row, column), and the thread's own row and column."""
    layout = TILE.to_mgpu()
    tiling = mgpu.fragmented_array.Tiling(layout.tiling.tiles)
    strides = tiling.tile_strides((shape[1], 1))
    lane = arith.remui(utils.thread_idx(), constant(utils.WARPGROUP_SIZE))
    lane_row = row_of_lane(lane)
    lane_col = arith.muli(arith.remui(lane, constant(4)), constant(2))
    for place in np.ndindex(layout.registers_shape(shape)):
        row, col = divmod(int(sum(i * s for i, s in zip(place, strides, strict=True))), shape[1])
        yield place, row, col, lane_row, lane_col


def row_of_lane(lane):
    """The first tile row that a thread holds."""
    # a warp holds 16 rows, four lanes a row of 8
    warp, in_warp = arith.divui(lane, constant(32)), arith.remui(lane, constant(32))
    return arith.addi(arith.muli(warp, constant(16)), arith.divui(in_warp, constant(4)))


def array_row(tile_row, first, offset, rows: Rows):
    """Array row of a tile row."""
    group = constant(rows.group)
    token = arith.addi(first, arith.divui(tile_row, group))
    head = arith.addi(offset, arith.remui(tile_row, group))
    return arith.addi(arith.muli(token, constant(rows.stride)), head)


def address_of(row, width: int, base, kind):
    """Address of a row of `width` elements."""
    i64 = ir.IntegerType.get_signless(64)
    return utils.getelementptr(base, [arith.muli(arith.extsi(i64, row), utils.c(width, i64))], kind)


def store_if(condition, address, word, space: str = "global"):
    """Store 4 or 8 bytes if a condition holds."""
    # predicated in one instruction: an `if` a row would split the stores into as many branches
    width = ir.IntegerType(word.type).width
    kind, constraint = ("b32", "r") if width == 32 else ("b64", "l")
    where = "r" if space == "shared" else "l"
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"),
        [arith.extui(ir.IntegerType.get_signless(32), condition), address, word],
        f"{{ .reg .pred p; setp.ne.b32 p, $0, 0; @p st.{space}.{kind} [$1], $2; }}",
        f"r,{where},{constraint}",
        has_side_effects=True,
    )


def value_of(x):
    """The one register of a scalar."""
    return x.registers.item()


def constant(value: int):
    """A constant."""
    return utils.c(value, ir.IntegerType.get_signless(32))


def plus(x, value):
    """A sum with a constant or a value."""
    if isinstance(value, int):
        return x if value == 0 else arith.addi(x, constant(value))
    return arith.addi(x, value)
