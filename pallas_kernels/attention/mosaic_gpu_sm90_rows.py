"""Rows between device memory and registers on Hopper, where neither the copy engine nor a plain reference fits.

A tile packs the query tokens of a request times the heads of a group: 3, 6 or 7 heads a token, any token to start from,
and a last tile that is part empty. So each thread computes the addresses of its own elements, and stores only rows that
are valid. The interpreter runs no inline code: each function has a plain form with the same meaning.
"""
# Inline code and the decorators of `jax.experimental.pallas.mosaic_gpu` are typed more loosely than what they make.
# pyright: reportArgumentType=false, reportReturnType=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

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
ROW = plgpu.Layout.WGMMA.reduce(1)


class Rows(NamedTuple):
    """Where row r of a tile lies in a [rows, width] array: (first + r // group) * stride + r % group + offset."""

    first: jax.Array  # i32, first token
    offset: jax.Array  # i32, first head
    used: jax.Array  # i32, rows of the tile that exist; at least 1
    group: int  # rows a token
    stride: int  # rows of the array a token

    def at(self, row: jax.Array) -> jax.Array:
        """Array row of tile row `row`, or of the last used one."""
        row = jnp.minimum(row, self.used - 1)
        return (self.first + row // self.group) * self.stride + row % self.group + self.offset


def load(ref, rows: Rows, *, shape: tuple[int, int], start: jax.Array | int = 0, interpret: bool) -> jax.Array:
    """Rows `start` to `start + shape[0]` of a tile, from [rows, width >= shape[1]] in device memory.

    Rows past `rows.used` repeat the last used one: no branch, and never a byte that nobody wrote.
    """
    if interpret:
        picked = [ref[rows.at(jnp.int32(start + i)), : shape[1]] for i in range(shape[0])]
        return plgpu.layout_cast(jnp.stack(picked), TILE)
    scalar = plgpu.Layout.WG_SPLAT(())
    result = plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=TILE)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[scalar] * 4), return_type=result)
    def inline(_, gmem, first, offset, used, begin):
        first, offset, used, begin = (_scalar(x) for x in (first, offset, used, begin))
        kind = utils.dtype_to_ir_type(ref.dtype)
        pair = ir.VectorType.get((2,), kind)
        base = utils.memref_ptr(gmem)
        regs = np.empty(TILE.to_mgpu().registers_shape(shape), dtype=object)
        row_at, column = {}, None
        for place, row, col, lane_row, lane_col in _places(shape):
            if row not in row_at:
                tile_row = arith.minsi(_add(_add(lane_row, row), begin), arith.subi(used, _i32(1)))
                row_at[row] = _address(_array_row(tile_row, first, offset, rows), ref.shape[1], base, kind)
                column = lane_col
            at = utils.getelementptr(row_at[row], [_add(column, col)], kind)
            regs[place] = llvm.load(pair, at)
        return mgpu.FragmentedArray(_registers=regs, _layout=TILE.to_mgpu(), _is_signed=None)

    return inline(ref, *(jnp.asarray(x, jnp.int32) for x in (rows.first, rows.offset, rows.used, start)))


def load_vector(ref, rows: Rows, *, start: jax.Array | int = 0, interpret: bool) -> jax.Array:
    """One float32 a row, f32[64], from a flat array: as `load`."""
    if interpret:
        picked = [ref[rows.at(jnp.int32(start + i))] for i in range(64)]
        return plgpu.layout_cast(jnp.stack(picked), ROW)
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *[scalar] * 4), return_type=plgpu.ShapeDtypeStruct((64,), jnp.float32, layout=ROW)
    )
    def inline(_, gmem, first, offset, used, begin):
        first, offset, used, begin = (_scalar(x) for x in (first, offset, used, begin))
        kind = ir.F32Type.get()
        base = utils.memref_ptr(gmem)
        lane_row = _lane_row(arith.remui(utils.thread_idx(), _i32(utils.WARPGROUP_SIZE)))
        regs = np.empty(ROW.to_mgpu().registers_shape((64,)), dtype=object)
        for at, place in enumerate(np.ndindex(regs.shape)):
            tile_row = arith.minsi(_add(_add(lane_row, 8 * at), begin), arith.subi(used, _i32(1)))
            address = _address(_array_row(tile_row, first, offset, rows), 1, base, kind)
            regs[place] = llvm.load(ir.VectorType.get((1,), kind), address)
        return mgpu.FragmentedArray(_registers=regs, _layout=ROW.to_mgpu(), _is_signed=None)

    return inline(ref, *(jnp.asarray(x, jnp.int32) for x in (rows.first, rows.offset, rows.used, start)))


def store(ref, value: jax.Array, rows: Rows, *, start: jax.Array | int = 0, interpret: bool) -> None:
    """Store those rows of a tile that exist: `value` [64, width] holds tile rows `start` and on."""
    if interpret:
        for i in range(value.shape[0]):

            @pl.when(start + i < rows.used)
            def _(i=i):
                ref[rows.at(jnp.int32(start + i)), : value.shape[1]] = value[i]

        return
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), TILE, *[scalar] * 4))
    def inline(_, gmem, tile, first, offset, used, begin):
        first, offset, used, begin = (_scalar(x) for x in (first, offset, used, begin))
        kind = utils.dtype_to_ir_type(ref.dtype)
        bits = ir.IntegerType.get_signless(2 * utils.bitwidth(kind))
        base = utils.memref_ptr(gmem)
        row_at: dict = {}
        for place, row, col, lane_row, lane_col in _places(value.shape):
            if row not in row_at:
                tile_row = _add(_add(lane_row, row), begin)
                exists = arith.cmpi(arith.CmpIPredicate.slt, tile_row, used)
                row_at[row] = exists, _address(_array_row(tile_row, first, offset, rows), ref.shape[1], base, kind)
            exists, address = row_at[row]
            word = llvm.bitcast(bits, tile.registers[place])
            _store_if(exists, utils.getelementptr(address, [_add(lane_col, col)], kind), word)

    inline(ref, value, *(jnp.asarray(x, jnp.int32) for x in (rows.first, rows.offset, rows.used, start)))


def store_vector(ref, value: jax.Array, rows: Rows, *, start: jax.Array | int = 0, interpret: bool) -> None:
    """Store one float32 a row into a flat array: as `store`, with `value` f32[64]."""
    if interpret:
        for i in range(value.shape[0]):

            @pl.when(start + i < rows.used)
            def _(i=i):
                ref[rows.at(jnp.int32(start + i))] = value[i]

        return
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ROW, *[scalar] * 4))
    def inline(_, gmem, vector, first, offset, used, begin):
        first, offset, used, begin = (_scalar(x) for x in (first, offset, used, begin))
        base = utils.memref_ptr(gmem)
        lane = arith.remui(utils.thread_idx(), _i32(utils.WARPGROUP_SIZE))
        one_a_row = arith.cmpi(arith.CmpIPredicate.eq, arith.remui(lane, _i32(4)), _i32(0))
        lane_row = _lane_row(lane)
        for at, register in enumerate(vector.registers.flat):  # rows 0 and 8 of the warp's 16
            tile_row = _add(_add(lane_row, 8 * at), begin)
            exists = arith.andi(one_a_row, arith.cmpi(arith.CmpIPredicate.slt, tile_row, used))
            address = _address(_array_row(tile_row, first, offset, rows), 1, base, ir.F32Type.get())
            _store_if(exists, address, llvm.bitcast(ir.IntegerType.get_signless(32), register))

    inline(ref, value, *(jnp.asarray(x, jnp.int32) for x in (rows.first, rows.offset, rows.used, start)))


def _places(shape):
    # of each register: its index, its static (row, column), and the thread's own row and column
    layout = TILE.to_mgpu()
    tiling = mgpu.fragmented_array.Tiling(layout.tiling.tiles)
    strides = tiling.tile_strides((shape[1], 1))
    lane = arith.remui(utils.thread_idx(), _i32(utils.WARPGROUP_SIZE))
    lane_row = _lane_row(lane)
    lane_col = arith.muli(arith.remui(lane, _i32(4)), _i32(2))
    for place in np.ndindex(layout.registers_shape(shape)):
        row, col = divmod(int(sum(i * s for i, s in zip(place, strides, strict=True))), shape[1])
        yield place, row, col, lane_row, lane_col


def _lane_row(lane):
    # a warp holds 16 rows, four lanes a row of 8
    warp, in_warp = arith.divui(lane, _i32(32)), arith.remui(lane, _i32(32))
    return arith.addi(arith.muli(warp, _i32(16)), arith.divui(in_warp, _i32(4)))


def _array_row(tile_row, first, offset, rows: Rows):
    group = _i32(rows.group)
    token = arith.addi(first, arith.divui(tile_row, group))
    head = arith.addi(offset, arith.remui(tile_row, group))
    return arith.addi(arith.muli(token, _i32(rows.stride)), head)


def _address(row, width: int, base, kind):
    i64 = ir.IntegerType.get_signless(64)
    return utils.getelementptr(base, [arith.muli(arith.extsi(i64, row), utils.c(width, i64))], kind)


def _store_if(condition, address, word):
    # predicated in one instruction: an `if` a row would split the stores into as many branches
    width = ir.IntegerType(word.type).width
    kind, constraint = ("b32", "r") if width == 32 else ("b64", "l")
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"),
        [arith.extui(ir.IntegerType.get_signless(32), condition), address, word],
        f"{{ .reg .pred p; setp.ne.b32 p, $0, 0; @p st.global.{kind} [$1], $2; }}",
        f"r,l,{constraint}",
        has_side_effects=True,
    )


def _scalar(x):
    return x.registers.item()


def _i32(value: int):
    return utils.c(value, ir.IntegerType.get_signless(32))


def _add(x, value):
    if isinstance(value, int):
        return x if value == 0 else arith.addi(x, _i32(value))
    return arith.addi(x, value)


_VECTOR = 4  # elements a thread takes at once: 16 bytes of float32


def strided_rows(width: int) -> int:
    """Fewest rows of `width` that a warpgroup's vectors cover evenly."""
    return next(n for n in (1, 2, 4, 8, 16, 32, 64) if n * width % (_VECTOR * utils.WARPGROUP_SIZE) == 0)


def strided(shape: tuple[int, int]):
    """Register layout of rows laid end to end over the threads."""
    return plgpu.Layout.WG_STRIDED(shape, vec_size=_VECTOR)


def load_strided(
    ref, rows: Rows, *, shape: tuple[int, int], start: jax.Array | int, one_a_row: bool = False
) -> jax.Array:
    """As `load`, in the strided layout; `one_a_row` spreads one element of a flat array over each row."""
    scalar = plgpu.Layout.WG_SPLAT(())
    result = plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=strided(shape))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[scalar] * 4), return_type=result)
    def inline(_, gmem, first, offset, used, begin):
        first, offset, used, begin = (_scalar(x) for x in (first, offset, used, begin))
        kind = utils.dtype_to_ir_type(ref.dtype)
        vector = ir.VectorType.get((_VECTOR,), kind)
        base = utils.memref_ptr(gmem)
        regs = []
        for row, col in _strided_places(shape):
            tile_row = arith.minsi(_add(row, begin), arith.subi(used, _i32(1)))
            address = _address(_array_row(tile_row, first, offset, rows), 1 if one_a_row else shape[1], base, kind)
            if one_a_row:
                regs.append(mgpu_vector.broadcast(vector, llvm.load(kind, address)))
            else:
                regs.append(llvm.load(vector, utils.getelementptr(address, [col], kind)))
        array = np.empty(len(regs), dtype=object)
        array[:] = regs
        return mgpu.FragmentedArray(_registers=array, _layout=strided(shape).to_mgpu(), _is_signed=None)

    return inline(ref, *(jnp.asarray(x, jnp.int32) for x in (rows.first, rows.offset, rows.used, start)))


def store_strided(ref, value: jax.Array, rows: Rows, *, start: jax.Array | int, one_a_row: bool = False) -> None:
    """As `store`, from the strided layout; `one_a_row` stores the first element of each row into a flat array."""
    scalar, shape = plgpu.Layout.WG_SPLAT(()), value.shape

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), strided(shape), *[scalar] * 4))
    def inline(_, gmem, array, first, offset, used, begin):
        first, offset, used, begin = (_scalar(x) for x in (first, offset, used, begin))
        kind = utils.dtype_to_ir_type(ref.dtype)
        base = utils.memref_ptr(gmem)
        for (row, col), register in zip(_strided_places(shape), array.registers.flat, strict=True):
            tile_row = _add(row, begin)
            exists = arith.cmpi(arith.CmpIPredicate.slt, tile_row, used)
            if one_a_row:
                exists = arith.andi(exists, arith.cmpi(arith.CmpIPredicate.eq, col, _i32(0)))
                address = _address(_array_row(tile_row, first, offset, rows), 1, base, kind)
                register = mgpu_vector.extract(register, dynamic_position=[], static_position=[0])
                _store_if(exists, address, llvm.bitcast(ir.IntegerType.get_signless(32), register))
                continue
            address = _address(_array_row(tile_row, first, offset, rows), shape[1], base, kind)
            address = utils.getelementptr(address, [col], kind)
            half = _VECTOR // 2
            for i in range(2):  # 4 or 8 bytes at a time
                bits = ir.IntegerType.get_signless(half * utils.bitwidth(kind))
                part = mgpu_vector.extract_strided_slice(
                    ir.VectorType.get((half,), kind), register, offsets=[half * i], sizes=[half], strides=[1]
                )
                _store_if(exists, utils.getelementptr(address, [half * i], kind), llvm.bitcast(bits, part))

    inline(ref, value, *(jnp.asarray(x, jnp.int32) for x in (rows.first, rows.offset, rows.used, start)))


def _strided_places(shape):
    lane = arith.remui(utils.thread_idx(), _i32(utils.WARPGROUP_SIZE))
    each = _VECTOR * utils.WARPGROUP_SIZE
    for i in range(shape[0] * shape[1] // each):
        linear = _add(arith.muli(lane, _i32(_VECTOR)), i * each)
        yield arith.divui(linear, _i32(shape[1])), arith.remui(linear, _i32(shape[1]))
