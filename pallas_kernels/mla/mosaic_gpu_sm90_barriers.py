"""Barriers of the Hopper latent attention by name, on a GPU and in the interpreter, which keeps count of phases itself."""
# Inline code and the decorators of `jax.experimental.pallas.mosaic_gpu` are typed more loosely than what they make.
# pyright: reportArgumentType=false, reportCallIssue=false

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import mosaic_gpu_sm90_copy as copies
from pallas_kernels.attention import mosaic_gpu_sm90_prefill_barriers as barriers
from pallas_kernels.attention import mosaic_gpu_sm90_rows as rows_io
from pallas_kernels.attention.mosaic_gpu_sm90_prefill_records import Barrier

arith, ir = utils.arith, utils.ir


def init(smem: dict) -> None:
    """Make a program's barriers; all its threads call this."""
    if any(isinstance(x, Barrier) for x in smem.values()):
        barriers.init_barriers(smem)


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
        here = barriers.address(barriers.place_of(words, rows_io.value_of(place)))
        for rank in range(sharers):
            copies.asm(
                "{ .reg .pred p; .reg .b32 there; setp.ne.b32 p, $0, 0; mapa.shared::cluster.u32 there, $1, $2; "
                "@p mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there]; }",
                arith.extui(ir.IntegerType.get_signless(32), one),
                here,
                rows_io.constant(rank),
                constraints="r,r,r",
            )

    inline(barrier.words, jnp.asarray(barrier.first + place, jnp.int32))
