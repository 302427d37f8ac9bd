"""Steps of the running softmax of one warpgroup on Hopper that plain arrays don't express.

Between two products that wait for each other, each instruction is time that the tensor cores have nothing to do.
"""
# Inline code and the decorators of `jax.experimental.pallas.mosaic_gpu` are typed more loosely than what they make.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

import functools

import jax
import jax.experimental.mosaic.gpu as mgpu
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import mosaic_gpu_sm90_rows as rows_io
from pallas_kernels.attention.mosaic_gpu_sm90_rows import ROW, TILE

# the MLIR that Mosaic GPU itself is written in
arith, ir, llvm, scf, mgpu_vector = utils.arith, utils.ir, utils.llvm, utils.scf, utils.vector

SUMS = 8  # columns of `partial_sums`


def settled(*values: jax.Array) -> list[jax.Array]:
    """The same tiles, computed before anything with an effect that follows."""
    types = tuple(plgpu.ShapeDtypeStruct(value.shape, value.dtype, layout=TILE) for value in values)

    @plgpu.inline_mgpu(arg_types=(TILE,) * len(values), return_type=types)
    def inline(_, *tiles):
        return tuple(mgpu.optimization_barrier(tile) for tile in tiles)

    return list(inline(*values))


def partial_sums(value: jax.Array) -> jax.Array:
    """f32[64, n] -> f32[64, SUMS], columns that add up to the sums of rows: threads exchange nothing."""
    shape = (value.shape[0], SUMS)

    @plgpu.inline_mgpu(arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct(shape, value.dtype, layout=TILE))
    def inline(_, tile):
        layout = TILE.to_mgpu()
        result = np.empty(layout.registers_shape(shape), dtype=object)
        places = list(np.ndindex(tile.registers.shape))
        for place in np.ndindex(result.shape):
            mine = [tile.registers[other] for other in places if other[2:] == place[2:] and other[0] == place[0]]
            # two chains: adding takes four cycles
            chains = [functools.reduce(arith.addf, chain) for chain in (mine[::2], mine[1::2]) if chain]
            result[place] = functools.reduce(arith.addf, chains)
        return mgpu.FragmentedArray(_registers=result, _layout=layout, _is_signed=None)

    return inline(value)


def scaled(value: jax.Array, factor: jax.Array) -> jax.Array:
    """f32[64, n] with each row times its factor f32[64]; a warp whose factors are all 1 passes over it."""

    @plgpu.inline_mgpu(arg_types=(TILE, ROW), return_type=plgpu.ShapeDtypeStruct(value.shape, value.dtype, layout=TILE))
    def inline(_, tile, factors):
        f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
        by_row = [mgpu_vector.extract(x, dynamic_position=[], static_position=[0]) for x in factors.registers.flat]
        one = arith.constant(f32, 1.0)
        changed = [arith.cmpf(arith.CmpFPredicate.UNE, x, one) for x in by_row]
        mine = arith.extui(i32, functools.reduce(arith.ori, changed))
        text = "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.b32 $0, 1, 0, p; }"
        some = arith.cmpi(
            arith.CmpIPredicate.ne,
            llvm.inline_asm(i32, [mine], text, "=r,r", has_side_effects=True),
            rows_io.constant(0),
        )
        row_of = {place: row // 8 for place, row, *_ in rows_io.places_of(value.shape)}
        places = list(np.ndindex(tile.registers.shape))
        parts = [
            mgpu_vector.extract(tile.registers[place], dynamic_position=[], static_position=[i])
            for place in places
            for i in range(2)
        ]
        branch = scf.IfOp(some, [f32] * len(parts), has_else=True)
        with ir.InsertionPoint(branch.then_block):
            scf.yield_([arith.mulf(x, by_row[row_of[places[n // 2]]]) for n, x in enumerate(parts)])
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(parts)
        result = np.empty(tile.registers.shape, dtype=object)
        for n, place in enumerate(places):
            pair = mgpu_vector.from_elements(ir.VectorType.get((2,), f32), list(branch.results)[2 * n : 2 * n + 2])
            result[place] = pair
        return mgpu.FragmentedArray(_registers=result, _layout=tile.layout, _is_signed=None)

    return inline(value, factor)
