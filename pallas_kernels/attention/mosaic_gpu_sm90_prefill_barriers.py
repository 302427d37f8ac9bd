"""Barriers in shared memory of the Hopper prefill: made, waited for, arrived at by a warpgroup or by each thread."""
# Inline code and the decorators of `jax.experimental.pallas.mosaic_gpu` are typed more loosely than what they make.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAbstractUsage=false, reportPrivateImportUsage=false

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import mosaic_gpu_sm90_copy as copies
from pallas_kernels.attention import mosaic_gpu_sm90_rows as rows_io
from pallas_kernels.attention.mosaic_gpu_sm90_prefill_records import (
    Barrier,
)
from pallas_kernels.attention.mosaic_gpu_sm90_rows import constant

arith, gpu, ir, llvm, nvvm = utils.arith, utils.gpu, utils.ir, utils.llvm, utils.nvvm


def init_barriers(smem: dict) -> None:
    """Make a program's barriers; all its threads call this."""
    barriers = [x for x in smem.values() if isinstance(x, Barrier)]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def inline(_, words):
        one = utils.single_thread_predicate(scope=utils.ThreadSubset.BLOCK)
        for barrier in barriers:
            for i in range(barrier.places):
                place = place_of(words, constant(barrier.first + i))
                nvvm.mbarrier_init(place.get_ptr(), constant(barrier.arrivals), predicate=one)
        copies.asm("fence.mbarrier_init.release.cluster;")
        gpu.barrier()

    inline(smem["words"])


def wait(barrier: Barrier, stage, phase) -> None:
    """Wait until phase `phase` (0 or 1) of a barrier is complete."""
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scalar, scalar))
    def inline(_, words, stage, phase):
        odd = arith.cmpi(arith.CmpIPredicate.ne, rows_io.value_of(phase), constant(0))
        place_of(words, rows_io.value_of(stage)).wait_parity(odd)

    inline(barrier.words, *(jnp.asarray(x, jnp.int32) for x in (barrier.first + stage, phase)))


def arrive(barrier: Barrier, stage: jax.Array | int) -> None:
    """One arrival of this warpgroup at a barrier."""
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scalar))
    def inline(_, words, stage):
        one = utils.single_thread_predicate(scope=utils.ThreadSubset.WARPGROUP)
        copies.asm(
            "{ .reg .pred p; setp.ne.b32 p, $0, 0; @p mbarrier.arrive.shared::cta.b64 _, [$1]; }",
            arith.extui(ir.IntegerType.get_signless(32), one),
            address(place_of(words, rows_io.value_of(stage))),
            constraints="r,r",
        )

    inline(barrier.words, jnp.asarray(barrier.first + stage, jnp.int32))


def arrive_all(barrier: Barrier, stage) -> None:
    """Each thread arrives."""
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scalar))
    def inline(_, words, stage):
        at = address(place_of(words, rows_io.value_of(stage)))
        copies.asm("mbarrier.arrive.shared::cta.b64 _, [$0];", at, constraints="r")

    inline(barrier.words, jnp.asarray(barrier.first + stage, jnp.int32))


def arrive_copied(barrier: Barrier, stage) -> None:
    """Each thread arrives once its copies so far have landed."""
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scalar))
    def inline(_, words, stage):
        at = address(place_of(words, rows_io.value_of(stage)))
        copies.asm("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", at, constraints="r")

    inline(barrier.words, jnp.asarray(barrier.first + stage, jnp.int32))


def proxy_fence() -> None:
    """What was stored to shared memory by threads can be read by products from here on."""

    @plgpu.inline_mgpu()
    def inline(_):
        copies.asm("fence.proxy.async.shared::cta;")

    inline()


def place_of(memref, stage):
    """Barrier `stage` of the shared words, for inline code."""
    return utils.BarrierRef(utils.memref_ptr(memref), stage, None, 1)


def address(barrier):
    """Its address, i32."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), barrier.get_ptr())
