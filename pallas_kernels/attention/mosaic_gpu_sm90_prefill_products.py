"""Products of queries and keys on Hopper's tensor cores, without an accumulator that must be zero before.

`plgpu.wgmma` adds to what is there; here the first instruction overwrites, which saves a thread 64 stores of zero a
block between its turn and its products. Source: the PTX manual, "Asynchronous warpgroup level matrix instructions".
"""
# Inline code and the decorators of `jax.experimental.pallas.mosaic_gpu` are typed more loosely than what they make.
# pyright: reportArgumentType=false, reportCallIssue=false, reportPrivateImportUsage=false

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import mosaic_gpu_sm90_copy as copies
from pallas_kernels.attention import mosaic_gpu_sm90_rows as rows_io
from pallas_kernels.attention.mosaic_gpu_sm90_rows import TILE

arith, ir, llvm, vector = utils.arith, utils.ir, utils.llvm, utils.vector

_DEPTH = 16  # of one instruction, in elements of 16 bits
_SWIZZLES = {128: 1, 64: 2, 32: 3}


def start_scores(q_ref, q_at, k_ref, k_at) -> jax.Array:
    """Start q_ref[q_at] [64, d] times k_ref[k_at] [n, d] transposed -> f32 [64, n], for `finished`; a group of its own.

    Both lie in shared memory as `copies.tiled` has them.
    """
    width, n, dim = q_ref.shape[2], k_ref.shape[1], jnp.dtype(q_ref.dtype)
    swizzle, layout = copies.transforms(width, 2)
    kind = {"bfloat16": "bf16", "float16": "f16"}[dim.name]
    scalar = plgpu.Layout.WG_SPLAT(())
    result = plgpu.ShapeDtypeStruct((64, n), jnp.float32, layout=TILE)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(layout), plgpu.RefType(layout), scalar, scalar), return_type=result)
    def inline(_, q, k, q_at, k_at):
        a = _descriptor(q, rows_io.value_of(q_at), 64, width, swizzle)
        b = _descriptor(k, rows_io.value_of(k_at), n, width, swizzle)
        copies.asm("wgmma.fence.sync.aligned;")
        registers: list = []
        for step in range(width // _DEPTH):
            column = step * _DEPTH * 2
            offset = column // swizzle * 8 * swizzle + column % swizzle
            registers = _multiply(registers, _advanced(a, offset), _advanced(b, offset), n, kind)
        copies.asm("wgmma.commit_group.sync.aligned;")
        regs = np.empty(TILE.to_mgpu().registers_shape((64, n)), dtype=object)
        # registers of the instruction go through columns first, 8 at a time: (row, row, row + 8, row + 8)
        for place, row, col, _, _ in rows_io.places_of((64, n)):
            first = col // 8 * 4 + row // 8 * 2
            regs[place] = vector.from_elements(ir.VectorType.get((2,), ir.F32Type.get()), registers[first : first + 2])
        return mgpu.FragmentedArray(_registers=regs, _layout=TILE.to_mgpu(), _is_signed=None)

    return inline(q_ref, k_ref, jnp.asarray(q_at, jnp.int32), jnp.asarray(k_at, jnp.int32))


def finished(scores: jax.Array, *, under_way: int) -> jax.Array:
    """The scores, once at most the last `under_way` groups of products are not done."""

    @plgpu.inline_mgpu(arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct(scores.shape, scores.dtype, layout=TILE))
    def inline(_, tile):
        copies.asm(f"wgmma.wait_group.sync.aligned {under_way};")
        return mgpu.optimization_barrier(tile)

    return inline(scores)


def _multiply(registers, a, b, n: int, kind: str):
    # one instruction: [64, 16] times [16, n] onto registers, or into new ones
    count = n // 2
    f32, i64 = ir.F32Type.get(), "l"
    names = ", ".join(f"${i}" for i in range(count))
    given = list(registers)
    at = count + len(given)
    multiply = f"wgmma.mma_async.sync.aligned.m64n{n}k{_DEPTH}.f32.{kind}.{kind}"
    adds = f".reg .pred p; setp.ne.b32 p, {int(bool(registers))}, 0;"
    text = f"{{ {adds} {multiply} {{{names}}}, ${at}, ${at + 1}, p, 1, 1, 0, 0; }}"
    constraints = ",".join(["=f"] * count + [str(i) for i in range(len(given))] + [i64, i64])
    struct = ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * count)})>")
    made = llvm.inline_asm(struct, [*given, a, b], text, constraints, has_side_effects=True)
    return [llvm.extractvalue(f32, made, [i]) for i in range(count)]


def _descriptor(memref, at, rows: int, width: int, swizzle: int):
    # Of rows whose columns lie together, in tiles of 8 rows by `swizzle` bytes, one row of tiles after the other: start
    # and stride between rows of tiles in units of 16 bytes, and the swizzle.
    i64 = ir.IntegerType.get_signless(64)
    base = arith.addi(copies.shared_address(memref), arith.muli(at, rows_io.constant(rows * width * 2)))
    start = arith.shrui(arith.andi(arith.extui(i64, base), utils.c(0x3FFFF, i64)), utils.c(4, i64))
    fixed = (8 * width * 2 >> 4) << 32 | _SWIZZLES[swizzle] << 62
    fixed = fixed - (1 << 64) if fixed >> 63 else fixed
    return arith.ori(start, utils.c(fixed, i64))


def _advanced(descriptor, offset: int):
    # further on by bytes; no carry, as shared memory ends before the field does
    return arith.addi(descriptor, utils.c(offset >> 4, ir.IntegerType.get_signless(64))) if offset else descriptor
