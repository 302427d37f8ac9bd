"""Barriers of the Hopper latent attention by name, on a GPU and in the interpreter, which counts phases itself."""
# Inline code and the decorators of `jax.experimental.pallas.mosaic_gpu` are typed more loosely than what they make.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAbstractUsage=false, reportPrivateImportUsage=false

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import mosaic_gpu_sm90_copy as copies
from pallas_kernels.attention import mosaic_gpu_sm90_prefill_barriers as barriers
from pallas_kernels.attention import mosaic_gpu_sm90_rows as rows_io
from pallas_kernels.attention.mosaic_gpu_sm90_prefill_records import Barrier

arith, gpu, ir, llvm = utils.arith, utils.gpu, utils.ir, utils.llvm


def init(smem: dict) -> None:
    """Make a program's barriers; all its threads call this."""
    made = [x for x in smem.values() if isinstance(x, Barrier)]
    if not made:
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def inline(_, words):
        i32 = ir.IntegerType.get_signless(32)
        one = arith.extui(i32, utils.single_thread_predicate(scope=utils.ThreadSubset.BLOCK))
        # A base of their own: else these addresses are those of the waits, and kept in registers until then.
        base = llvm.inline_asm(i32, [copies.shared_address(words)], "mov.b32 $0, $1;", "=r,r", has_side_effects=True)
        text = "{ .reg .pred p; setp.ne.b32 p, $0, 0; @p mbarrier.init.shared::cta.b64 [$1], $2; }"
        for barrier in made:
            for i in range(barrier.places):
                place = arith.addi(base, rows_io.constant(8 * (barrier.first + i)))
                copies.asm(text, one, place, rows_io.constant(barrier.arrivals), constraints="r,r,r")
        copies.asm("fence.mbarrier_init.release.cluster;")
        gpu.barrier()

    inline(made[0].words)


def wait(barrier, place, turn) -> None:
    """Wait until the phase number `turn` (from 0) of a barrier is complete, if it is the last or the one under way."""
    if isinstance(barrier, Barrier):
        barriers.wait(barrier, place, turn & 1)
    else:
        plgpu.barrier_wait(barrier.at[place])


def arrive(barrier, place, sharers: int = 1) -> None:
    """One arrival of this warpgroup; of several sharers, at the barrier of each."""
    if not isinstance(barrier, Barrier):
        plgpu.barrier_arrive(barrier.at[place])
    elif sharers == 1:
        barriers.arrive(barrier, place)
    else:
        _arrive_at_all(barrier, place, sharers)


def _arrive_at_all(barrier: Barrier, place, sharers: int) -> None:
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scalar))
    def inline(_, words, place):
        one = utils.single_thread_predicate(scope=utils.ThreadSubset.WARPGROUP)
        here = barriers.place_of(
            words, rows_io.value_of(place)
        ).get_ptr()  # as a number it would be kept from the start
        for rank in range(sharers):
            copies.asm(
                "{ .reg .pred p; .reg .b32 there; setp.ne.b32 p, $0, 0; mapa.shared::cluster.u32 there, $1, $2; "
                "@p mbarrier.arrive.shared::cluster.b64 _, [there]; }",
                arith.extui(ir.IntegerType.get_signless(32), one),
                here,
                rows_io.constant(rank),
                constraints="r,r,r",
            )

    inline(barrier.words, jnp.asarray(barrier.first + place, jnp.int32))
