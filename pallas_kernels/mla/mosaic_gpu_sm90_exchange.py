"""Parts of scores from a warpgroup to the one that has the same rows in the other program of a cluster, on Hopper.

A thread sends what it holds to the thread of its number, straight from registers, and the bytes complete the other's
barrier: nobody waits for a fence. There is one place a warpgroup, which the other may fill again once it was read.
Source: the PTX manual, `st.async` and "mbarrier based completion mechanism".
"""
# Inline code and the decorators of `jax.experimental.pallas.mosaic_gpu` are typed more loosely than what they make.
# pyright: reportArgumentType=false, reportCallIssue=false, reportPrivateImportUsage=false

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import mosaic_gpu_sm90_copy as copies
from pallas_kernels.attention import mosaic_gpu_sm90_prefill_barriers as gpu_barriers
from pallas_kernels.attention import mosaic_gpu_sm90_rows as rows_io
from pallas_kernels.attention.mosaic_gpu_sm90_prefill_records import THREADS, Barrier
from pallas_kernels.attention.mosaic_gpu_sm90_rows import TILE, constant
from pallas_kernels.mla import mosaic_gpu_sm90_barriers as barriers

arith, ir, llvm, vector = utils.arith, utils.ir, utils.llvm, utils.vector

WARPS = 4
"""Arrivals at `read`: of the warps that read a place."""

_BYTES = 16  # that a thread sends at once


def room(rows: int, keys: int) -> tuple[int, ...]:
    """Shape of float32 in shared memory for a place a warpgroup."""
    return (2, rows * keys)


def send(smem: dict, who, i, part: jax.Array) -> None:
    """Send f32[64, keys], part `i` (from 0), once the one before was read there."""
    read, sent = smem["read"], smem["sent"]
    pl.when(i > 0)(lambda: barriers.wait(read, who, i - 1))
    scalar, nbytes = plgpu.Layout.WG_SPLAT(()), 4 * part.size

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), scalar, TILE))
    def inline(_, places, words, who, tile):
        who = rows_io.value_of(who)
        to = _there(_mine(places, who, nbytes))
        barrier = _there(gpu_barriers.address(gpu_barriers.place_of(words, rows_io.plus(who, sent.first))))
        floats = _floats(tile)
        for n in range(0, len(floats), 4):
            copies.asm(
                "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [$0], {$1, $2, $3, $4}, [$5];",
                rows_io.plus(to, n // 4 * THREADS * _BYTES),
                *floats[n : n + 4],
                barrier,
                constraints="r,f,f,f,f,r",
            )

    inline(smem["places"], sent.words, jnp.asarray(who, jnp.int32), part)


def received(smem: dict, who, i, part: jax.Array) -> jax.Array:
    """The sum of part `i` and the other's, f32[64, keys]: the same bits there."""
    sent, read, shape = smem["sent"], smem["read"], part.shape
    nbytes = 4 * part.size
    _announce(sent, who, nbytes)
    barriers.wait(sent, who, i)
    scalar = plgpu.Layout.WG_SPLAT(())
    result = plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=TILE)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), scalar, TILE), return_type=result)
    def inline(_, places, words, who, tile):
        who = rows_io.value_of(who)
        f32 = ir.F32Type.get()
        four = ir.Type.parse("!llvm.struct<(f32, f32, f32, f32)>")
        here, floats = _mine(places, who, nbytes), []
        mine = _floats(tile)
        for n in range(0, len(mine), 4):
            at = rows_io.plus(here, n // 4 * THREADS * _BYTES)
            text = "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];"
            loaded = llvm.inline_asm(four, [at], text, "=f,=f,=f,=f,r", has_side_effects=True)
            floats += [arith.addf(mine[n + j], llvm.extractvalue(f32, loaded, [j])) for j in range(4)]
        copies.asm("bar.warp.sync 0xffffffff;")
        one = utils.single_thread_predicate(scope=utils.ThreadSubset.WARP)
        copies.asm(
            "{ .reg .pred p; setp.ne.b32 p, $0, 0; @p mbarrier.arrive.shared::cluster.b64 _, [$1]; }",
            arith.extui(ir.IntegerType.get_signless(32), one),
            _there(gpu_barriers.address(gpu_barriers.place_of(words, rows_io.plus(who, read.first)))),
            constraints="r,r",
        )
        regs = np.empty(TILE.to_mgpu().registers_shape(shape), dtype=object)
        for n, place in enumerate(np.ndindex(regs.shape)):
            regs[place] = vector.from_elements(ir.VectorType.get((2,), f32), floats[2 * n : 2 * n + 2])
        return mgpu.FragmentedArray(_registers=regs, _layout=TILE.to_mgpu(), _is_signed=None)

    return inline(smem["places"], sent.words, jnp.asarray(who, jnp.int32), part)


def _announce(sent: Barrier, who, nbytes: int) -> None:
    # how many bytes complete the phase, which waits for this arrival, too
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
    def inline(_, words, who):
        barrier = gpu_barriers.place_of(words, rows_io.plus(rows_io.value_of(who), sent.first))
        copies._expect(barrier, nbytes, utils.single_thread_predicate(scope=utils.ThreadSubset.WARPGROUP))

    inline(sent.words, jnp.asarray(who, jnp.int32))


def _floats(tile) -> list:
    registers = tile.registers.flat
    return [vector.extract(x, dynamic_position=[], static_position=[n]) for x in registers for n in range(2)]


def _mine(places, who, nbytes: int):
    # address of this thread's first 16 bytes in a warpgroup's place
    lane = arith.remui(utils.thread_idx(), constant(THREADS))
    base = arith.addi(copies.shared_address(places), arith.muli(who, constant(nbytes)))
    return arith.addi(base, arith.muli(lane, constant(_BYTES)))


def _there(address):
    # the same address in the shared memory of the other of two programs
    i32 = ir.IntegerType.get_signless(32)
    text = (
        "{ .reg .b32 rank; mov.u32 rank, %cluster_ctarank; xor.b32 rank, rank, 1; "
        "mapa.shared::cluster.u32 $0, $1, rank; }"
    )
    return llvm.inline_asm(i32, [address], text, "=r,r", has_side_effects=True)
