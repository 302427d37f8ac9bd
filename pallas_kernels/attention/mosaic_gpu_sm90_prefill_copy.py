"""What the copying warpgroup of the Hopper prefill does: a tile's queries, then its key and value blocks, tile by tile.

It runs as far ahead of the computing warpgroups as the rings have room; a tile's record goes to them with its queries.
"""
# Inline code and the decorators of `jax.experimental.pallas.mosaic_gpu` are typed more loosely than what they make.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAbstractUsage=false, reportPrivateImportUsage=false

import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import mosaic_gpu_sm90_copy as copies
from pallas_kernels.attention import mosaic_gpu_sm90_prefill_barriers as barriers
from pallas_kernels.attention import mosaic_gpu_sm90_prefill_load as loading
from pallas_kernels.attention import mosaic_gpu_sm90_prefill_schedule as schedules
from pallas_kernels.attention import mosaic_gpu_sm90_rows as rows_io
from pallas_kernels.attention.mosaic_gpu_sm90_float8 import widen
from pallas_kernels.attention.mosaic_gpu_sm90_prefill_config import WIDE_STAGES
from pallas_kernels.attention.mosaic_gpu_sm90_prefill_records import (
    FIELDS,
    TILE_WORDS,
    Arrays,
    Static,
    Tile,
)
from pallas_kernels.attention.mosaic_gpu_sm90_rows import constant

arith, gpu, ir, llvm, nvvm = utils.arith, utils.gpu, utils.ir, utils.llvm, utils.nvvm


def my_tiles(static: Static, arrays: Arrays):
    """How many tiles this program has: those with key blocks, which come first, and all."""

    def mine(count):
        total = count * static.kv_heads
        rounds = total // static.programs
        return rounds + (_place(static, rounds) < total).astype(jnp.int32)

    some, every = rows_io.load_scalars(arrays.counts, jnp.int32(0), 2)
    return mine(some), mine(every)


def _place(static: Static, round_):
    # Dealt to and fro: who gets the longest tile of a round gets the shortest of the next.
    program = lax.axis_index("programs")
    mine = jnp.where(round_ % 2 == 0, program, static.programs - 1 - program)
    return round_ * static.programs + mine


def load_tile(static: Static, arrays: Arrays, turn, some) -> Tile:
    """Tile number `turn` of this program, from device memory; `some` of all tiles have key blocks."""
    at, head = schedules.of_place(_place(static, turn), some, static.kv_heads)
    return Tile(*rows_io.load_scalars(arrays.tiles, at, FIELDS - 1), head=head)


def put_tile(ref, place, tile: Tile) -> None:
    """Hand a tile to the computing warpgroups, through shared memory."""
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[scalar] * (FIELDS + 1)))
    def inline(_, memref, place, *fields):
        one = utils.single_thread_predicate(scope=utils.ThreadSubset.WARPGROUP)
        base = arith.addi(copies.shared_address(memref), arith.muli(rows_io.value_of(place), constant(4 * TILE_WORDS)))
        for i, field in enumerate(fields):
            rows_io.store_if(one, arith.addi(base, constant(4 * i)), rows_io.value_of(field), "shared")

    inline(ref, *(jnp.asarray(x, jnp.int32) for x in (place, *tile)))


def get_tile(ref, place) -> Tile:
    """The tile that `put_tile` left, for all threads of a warpgroup."""
    result = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(()))

    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scalar), return_type=(result,) * FIELDS)
    def inline(_, memref, place):
        i32 = ir.IntegerType.get_signless(32)
        base = arith.addi(copies.shared_address(memref), arith.muli(rows_io.value_of(place), constant(4 * TILE_WORDS)))
        four = ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>")
        words = []
        for i in range(0, FIELDS, 4):
            text = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
            at = arith.addi(base, constant(4 * i))
            loaded = llvm.inline_asm(four, [at], text, "=r,=r,=r,=r,r", has_side_effects=True)
            words += [llvm.extractvalue(i32, loaded, [j]) for j in range(4)]
        return tuple(mgpu.FragmentedArray.splat(word, (), is_signed=True) for word in words[:FIELDS])

    return Tile(*inline(ref, jnp.asarray(place, jnp.int32)))


def produce(static: Static, arrays: Arrays, smem: dict) -> None:
    """All tiles of this program."""
    _, count = my_tiles(static, arrays)
    (some,) = rows_io.load_scalars(arrays.counts, jnp.int32(0), 1)
    offset = jnp.int32(0)
    if arrays.page_offset is not None:
        (offset,) = rows_io.load_scalars(arrays.page_offset, jnp.int32(0), 1)
    kind = _Blocks if static.narrow is None else _Narrow
    blocks, q_stages = kind(static, arrays, smem, offset), static.config.q_stages

    def step(turn, done):
        tile = load_tile(
            static, arrays, turn, some
        )  # not a tile ahead: that would take registers, and the rings are ahead
        blocks.first(tile, done)
        stage = lax.rem(turn, q_stages)
        barriers.wait(smem["q_free"], stage, (lax.div(turn, q_stages) & 1) ^ 1)
        loading.gather_q(static, arrays, smem, tile, stage)
        put_tile(smem["words"], stage, tile)
        barriers.arrive(smem["q_full"], stage)
        blocks.rest(tile, done)
        return done + tile.blocks

    lax.fori_loop(0, count, step, jnp.int32(0))


class _Blocks:
    """Keys and values of a tile into the rings; keys run a block ahead, as products want them."""

    def __init__(self, static: Static, arrays: Arrays, smem: dict, offset):
        self.static, self.arrays, self.smem, self.offset = static, arrays, smem, offset

    def first(self, tile: Tile, done) -> None:
        """Start the first block of keys."""
        self._start("k", tile, jnp.int32(0), done, tile.blocks > 0)

    def rest(self, tile: Tile, done) -> None:
        """Start all others."""

        def step(i, _):
            self._start("k", tile, i, done, i < tile.blocks)
            self._start("v", tile, i - 1, done, True)

        lax.fori_loop(1, tile.blocks + 1, step, None)

    def _start(self, name: str, tile: Tile, i, done, when) -> None:
        # wait for block i's place in its ring, and start copying there
        stages = self.static.config.stages
        at = done + i
        loading.load(
            self.static,
            self.arrays,
            dict(k=self.arrays.k, v=self.arrays.v)[name],
            self.smem[name],
            full=self.smem[f"{name}_full"],
            free=self.smem[f"{name}_free"],
            tile=tile,
            offset=self.offset,
            block=tile.begin + i,
            stage=lax.rem(at, stages),
            phase=(lax.div(at, stages) & 1) ^ 1,
            when=when,
            first_warp=0 if name == "k" else 2,
        )


class _Narrow:
    """8-bit keys and values into rings of their own, and widened from there into those that products read."""

    def __init__(self, static: Static, arrays: Arrays, smem: dict, offset):
        self.static, self.arrays, self.smem, self.offset = static, arrays, smem, offset

    def first(self, tile: Tile, done) -> None:
        """Start the first blocks."""
        for i in range(self.static.config.stages):
            self._start("k", tile, jnp.int32(i), done)
            self._start("v", tile, jnp.int32(i), done)

    def rest(self, tile: Tile, done) -> None:
        """Widen block after block, and start those that follow."""

        def step(i, _):
            self._widen("k", tile, i, done)
            self._start("k", tile, i + self.static.config.stages, done)
            self._widen("v", tile, i, done)
            self._start("v", tile, i + self.static.config.stages, done)

        lax.fori_loop(0, tile.blocks, step, None)

    def _start(self, name: str, tile: Tile, i, done) -> None:
        loading.load(
            self.static,
            self.arrays,
            dict(k=self.arrays.k, v=self.arrays.v)[name],
            self.smem[f"{name}_bits"],
            full=self.smem[f"{name}_bits_full"],
            free=None,
            tile=tile,
            offset=self.offset,
            block=tile.begin + i,
            stage=lax.rem(done + i, self.static.config.stages),
            phase=0,
            when=i < tile.blocks,
            first_warp=0 if name == "k" else 2,
        )

    def _widen(self, name: str, tile: Tile, i, done) -> None:
        stages, at = self.static.config.stages, done + i
        stage, wide = lax.rem(at, stages), lax.rem(at, WIDE_STAGES)
        barriers.wait(self.smem[f"{name}_bits_full"], stage, lax.div(at, stages) & 1)
        barriers.wait(self.smem[f"{name}_free"], wide, (lax.div(at, WIDE_STAGES) & 1) ^ 1)
        widen(self.smem[f"{name}_bits"], self.smem[name].at[wide], stage, self.static.narrow)
        barriers.arrive(self.smem[f"{name}_full"], wide)
