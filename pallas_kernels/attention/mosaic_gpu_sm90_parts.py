"""Rows laid end to end over the threads on Hopper, in device memory and in the shared memory of a cluster.

The merge of parts wants the same elements of every part in a thread; four at once are one load.
"""
# Inline code and the decorators of `jax.experimental.pallas.mosaic_gpu` are typed more loosely than what they make.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import mosaic_gpu_sm90_rows as rows_io

# the MLIR that Mosaic GPU itself is written in
arith, ir, llvm, mgpu_vector = utils.arith, utils.ir, utils.llvm, utils.vector

_VECTOR = 4  # elements a thread takes at once: 16 bytes of float32


def strided_rows(width: int) -> int:
    """Fewest rows of `width` that a warpgroup's vectors cover evenly."""
    return next(n for n in (1, 2, 4, 8, 16, 32, 64) if n * width % (_VECTOR * utils.WARPGROUP_SIZE) == 0)


def strided(shape: tuple[int, int]):
    """Register layout of rows laid end to end over the threads."""
    return plgpu.Layout.WG_STRIDED(shape, vec_size=_VECTOR)


def load_strided(
    ref, rows: rows_io.Rows, *, shape: tuple[int, int], start: jax.Array | int, one_a_row: bool = False
) -> jax.Array:
    """As `load`, in the strided layout; `one_a_row` spreads one element of a flat array over each row."""
    scalar = plgpu.Layout.WG_SPLAT(())
    result = plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=strided(shape))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[scalar] * 4), return_type=result)
    def inline(_, gmem, first, offset, used, begin):
        first, offset, used, begin = (rows_io.value_of(x) for x in (first, offset, used, begin))
        kind = utils.dtype_to_ir_type(ref.dtype)
        vector = ir.VectorType.get((_VECTOR,), kind)
        base = utils.memref_ptr(gmem)
        regs = []
        for row, col in _strided_places(shape):
            tile_row = arith.minsi(rows_io.plus(row, begin), arith.subi(used, rows_io.constant(1)))
            address = rows_io.address_of(
                rows_io.array_row(tile_row, first, offset, rows), 1 if one_a_row else shape[1], base, kind
            )
            if one_a_row:
                regs.append(mgpu_vector.broadcast(vector, llvm.load(kind, address)))
            else:
                regs.append(llvm.load(vector, utils.getelementptr(address, [col], kind)))
        array = np.empty(len(regs), dtype=object)
        array[:] = regs
        return mgpu.FragmentedArray(_registers=array, _layout=strided(shape).to_mgpu(), _is_signed=None)

    return inline(ref, *(jnp.asarray(x, jnp.int32) for x in (rows.first, rows.offset, rows.used, start)))


def store_strided(
    ref, value: jax.Array, rows: rows_io.Rows, *, start: jax.Array | int, one_a_row: bool = False
) -> None:
    """As `store`, from the strided layout; `one_a_row` stores the first element of each row into a flat array."""
    scalar, shape = plgpu.Layout.WG_SPLAT(()), value.shape

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), strided(shape), *[scalar] * 4))
    def inline(_, gmem, array, first, offset, used, begin):
        first, offset, used, begin = (rows_io.value_of(x) for x in (first, offset, used, begin))
        kind = utils.dtype_to_ir_type(ref.dtype)
        base = utils.memref_ptr(gmem)
        for (row, col), register in zip(_strided_places(shape), array.registers.flat, strict=True):
            tile_row = rows_io.plus(row, begin)
            exists = arith.cmpi(arith.CmpIPredicate.slt, tile_row, used)
            if one_a_row:
                exists = arith.andi(exists, arith.cmpi(arith.CmpIPredicate.eq, col, rows_io.constant(0)))
                address = rows_io.address_of(rows_io.array_row(tile_row, first, offset, rows), 1, base, kind)
                register = mgpu_vector.extract(register, dynamic_position=[], static_position=[0])
                rows_io.store_if(exists, address, llvm.bitcast(ir.IntegerType.get_signless(32), register))
                continue
            address = rows_io.address_of(rows_io.array_row(tile_row, first, offset, rows), shape[1], base, kind)
            address = utils.getelementptr(address, [col], kind)
            half = _VECTOR // 2
            for i in range(2):  # 4 or 8 bytes at a time
                bits = ir.IntegerType.get_signless(half * utils.bitwidth(kind))
                part = mgpu_vector.extract_strided_slice(
                    ir.VectorType.get((half,), kind), register, offsets=[half * i], sizes=[half], strides=[1]
                )
                rows_io.store_if(exists, utils.getelementptr(address, [half * i], kind), llvm.bitcast(bits, part))

    inline(ref, value, *(jnp.asarray(x, jnp.int32) for x in (rows.first, rows.offset, rows.used, start)))


def store_part(ref, lse_ref, value: jax.Array, lse: jax.Array, *, used: jax.Array, start: jax.Array | int) -> None:
    """Store those rows of a tile that exist in shared memory, f32 [rows, width or more] and f32[rows]."""
    scalar, pitch = plgpu.Layout.WG_SPLAT(()), ref.shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), rows_io.TILE, rows_io.ROW, scalar, scalar))
    def inline(_, smem, smem_lse, tile, vector, used, begin):
        used, begin = rows_io.value_of(used), rows_io.value_of(begin)
        kind, i64 = ir.F32Type.get(), ir.IntegerType.get_signless(64)
        base, base_lse = utils.memref_ptr(smem), utils.memref_ptr(smem_lse)
        row_at: dict = {}
        for place, row, col, lane_row, lane_col in rows_io.places_of(value.shape):
            if row not in row_at:
                tile_row = rows_io.plus(rows_io.plus(lane_row, row), begin)
                exists = arith.cmpi(arith.CmpIPredicate.slt, tile_row, used)
                row_at[row] = exists, utils.getelementptr(base, [arith.muli(tile_row, rows_io.constant(pitch))], kind)
            exists, address = row_at[row]
            address = utils.getelementptr(address, [rows_io.plus(lane_col, col)], kind)
            rows_io.store_if(exists, address, llvm.bitcast(i64, tile.registers[place]), "shared")
        lane = arith.remui(utils.thread_idx(), rows_io.constant(utils.WARPGROUP_SIZE))
        one_a_row = arith.cmpi(arith.CmpIPredicate.eq, arith.remui(lane, rows_io.constant(4)), rows_io.constant(0))
        for at, register in enumerate(vector.registers.flat):
            tile_row = rows_io.plus(rows_io.plus(rows_io.row_of_lane(lane), 8 * at), begin)
            exists = arith.andi(one_a_row, arith.cmpi(arith.CmpIPredicate.slt, tile_row, used))
            word = llvm.bitcast(ir.IntegerType.get_signless(32), register)
            rows_io.store_if(exists, utils.getelementptr(base_lse, [tile_row], kind), word, "shared")

    inline(ref, lse_ref, value, lse, jnp.asarray(used, jnp.int32), jnp.asarray(start, jnp.int32))


def load_part(ref, lse_ref, rank, used: jax.Array, start: jax.Array, size: tuple[int, int]):
    """lse spread over its row, and rows `start` and on, of what program `rank` of this cluster stored by `store_part`.

    Rows past `used` repeat the last used one. Both in the strided layout of `size`.
    """
    scalar, pitch = plgpu.Layout.WG_SPLAT(()), ref.shape[1]
    result = plgpu.ShapeDtypeStruct(size, jnp.float32, layout=strided(size))

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), scalar, scalar, scalar), return_type=(result, result)
    )
    def inline(_, smem, smem_lse, rank, used, begin):
        rank, used, begin = rows_io.value_of(rank), rows_io.value_of(used), rows_io.value_of(begin)
        kind = ir.F32Type.get()
        vector = ir.VectorType.get((_VECTOR,), kind)
        base, base_lse = (utils.get_cluster_ptr(utils.memref_ptr(x), rank, generic=False) for x in (smem, smem_lse))
        logs, values = [], []
        for row, col in _strided_places(size):
            tile_row = arith.minsi(rows_io.plus(row, begin), arith.subi(used, rows_io.constant(1)))
            log = llvm.load(kind, utils.getelementptr(base_lse, [tile_row], kind))
            logs.append(mgpu_vector.broadcast(vector, log))
            at = arith.addi(arith.muli(tile_row, rows_io.constant(pitch)), col)
            values.append(llvm.load(vector, utils.getelementptr(base, [at], kind)))

        def array(regs):
            held = np.empty(len(regs), dtype=object)
            held[:] = regs
            return mgpu.FragmentedArray(_registers=held, _layout=strided(size).to_mgpu(), _is_signed=None)

        return array(logs), array(values)

    return inline(ref, lse_ref, *(jnp.asarray(x, jnp.int32) for x in (rank, used, start)))


def _strided_places(shape):
    lane = arith.remui(utils.thread_idx(), rows_io.constant(utils.WARPGROUP_SIZE))
    each = _VECTOR * utils.WARPGROUP_SIZE
    for i in range(shape[0] * shape[1] // each):
        linear = rows_io.plus(arith.muli(lane, rows_io.constant(_VECTOR)), i * each)
        yield arith.divui(linear, rows_io.constant(shape[1])), arith.remui(linear, rows_io.constant(shape[1]))
