"""The Hopper prefill kernel: a program a multiprocessor, tile after tile of (token, head) rows of one KV head.

A warpgroup copies; the others compute 64 rows each. The products of a block's queries and keys are issued together with
those of the block before's weights and values, and the weights are made while they run; the computing warpgroups take
turns with the products, so that one's weights are made beside the other's products.

Source: arXiv:2205.14135, algorithm 1; arXiv:2407.08608, algorithm 2 and section 3.1; arXiv:2309.06180 (paging).
"""
# `ACC` is public, exported without its name.
# pyright: reportPrivateImportUsage=false

import functools
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import mosaic_gpu_sm90_prefill_barriers as barriers
from pallas_kernels.attention import mosaic_gpu_sm90_prefill_copy as producer
from pallas_kernels.attention import mosaic_gpu_sm90_prefill_products as products
from pallas_kernels.attention import mosaic_gpu_sm90_prefill_softmax as softmax
from pallas_kernels.attention import mosaic_gpu_sm90_rows as rows_io
from pallas_kernels.attention.mosaic_gpu_sm90_prefill_config import WIDE_STAGES
from pallas_kernels.attention.mosaic_gpu_sm90_prefill_load import starts_aligned
from pallas_kernels.attention.mosaic_gpu_sm90_prefill_records import (
    THREADS,
    Arrays,
    Static,
    Tile,
    with_barriers,
)
from pallas_kernels.attention.mosaic_gpu_sm90_rows import ROW, TILE, Rows

_LOG2E = math.log2(math.e)


def program(static: Static, arrays: Arrays, smem: dict) -> None:
    """Body of a program."""
    groups = static.config.groups
    smem = with_barriers(static, smem)
    barriers.init_barriers(smem)
    who = lax.axis_index("warpgroups")
    computing, copying = _registers(static)

    @pl.when(who < groups)
    def _():
        plgpu.set_max_registers(computing, action="increase")
        _Computing(static, arrays, smem, who).run()

    @pl.when(who == groups)
    def _():
        plgpu.set_max_registers(copying, action="decrease")
        producer.produce(static, arrays, smem)


def _registers(static: Static) -> tuple[int, int]:
    # A thread's registers, computing and copying. A program keeps the number it starts with, evenly spread: what the
    # copying warpgroup gives up is all that the others can take, and one that asks for more waits for ever.
    groups = static.config.groups
    started = 65536 // (THREADS * (groups + 1)) // 8 * 8
    copying = (40 if groups == 2 else 32) + 16 * (static.gathers or static.narrow is not None)
    return (started * (groups + 1) - copying) // groups // 8 * 8, copying


class _Computing:
    """What one computing warpgroup does."""

    def __init__(self, static: Static, arrays: Arrays, smem: dict, who):
        self.static, self.arrays, self.smem, self.who = static, arrays, smem, who
        self.start = who * 64
        self.stages = static.config.stages if static.narrow is None else WIDE_STAGES
        scale = static.rules.sm_scale
        self.scale = scale if arrays.k_scale is None else scale * arrays.k_scale[0]

    def run(self) -> None:
        """All tiles of this program: those with keys, then those whose rows see nothing."""
        some, every = producer.my_tiles(self.static, self.arrays)
        pl.when(self.who == self.static.config.groups - 1)(lambda: softmax.end_turn(self.static, self.who))
        run = self._overlapped if self.static.config.q_stages > 1 else self._one_by_one
        pl.when(some > 0)(lambda: run(some))

        def nothing(turn, _):
            self._empty(self._tile(turn), turn)

        lax.fori_loop(some, every, nothing, None)

    def _overlapped(self, count) -> None:
        # The last values of a tile are multiplied beside the weights of the next tile's first block.
        static = self.static

        def body(acc):
            first = self._tile(jnp.int32(0))
            carry = self._first(jnp.int32(0), first, jnp.int32(0))

            def each(turn, carry):
                done, *rest = carry
                tile = self._known(turn - 1)
                rest = self._middle(acc, turn - 1, tile, done, rest)
                done = done + tile.blocks
                following = self._tile(turn)
                rest = self._next(acc, turn - 1, tile, turn, following, done, rest)
                return done, *rest

            done, *rest = lax.fori_loop(1, count, each, (jnp.int32(0), *carry))
            last = self._known(count - 1)
            weights, top, total = self._middle(acc, count - 1, last, done, rest)
            self._last(acc, last, done + last.blocks, weights)
            self._finish(last, top, total, acc[...])
            barriers.arrive(self.smem["q_free"], self._q_stage(count - 1))

        pl.run_scoped(body, plgpu.ACC((64, static.v_dim), jnp.float32))

    def _one_by_one(self, count) -> None:
        def each(turn, done):
            tile = self._tile(turn)

            def body(acc):
                carry = self._first(turn, tile, done)
                weights, top, total = self._middle(acc, turn, tile, done, carry)
                barriers.arrive(self.smem["q_free"], self._q_stage(turn))
                self._last(acc, tile, done + tile.blocks, weights)
                self._finish(tile, top, total, acc[...])

            pl.run_scoped(body, plgpu.ACC((64, self.static.v_dim), jnp.float32))
            return done + tile.blocks

        lax.fori_loop(0, count, each, jnp.int32(0))

    def _tile(self, turn) -> Tile:
        # tile `turn` and its queries, once they are there
        self._wait_q(turn)
        barriers.proxy_fence()
        return self._known(turn)

    def _wait_q(self, turn) -> None:
        phase = lax.div(turn, self.static.config.q_stages) & 1
        barriers.wait(self.smem["q_full"], self._q_stage(turn), phase)

    def _known(self, turn) -> Tile:
        return producer.get_tile(self.smem["words"], self._q_stage(turn))

    def _q_stage(self, turn):
        return lax.rem(turn, self.static.config.q_stages)

    def _wait(self, name: str, at, tile: Tile) -> None:
        # until block `at`, one of `tile`, is there
        barriers.wait(self.smem[f"{name}_full"], lax.rem(at, self.stages), lax.div(at, self.stages) & 1)
        if self.static.gathers and self.static.narrow is None:
            barriers.proxy_fence()
        elif self.static.gathers_some:
            pl.when(jnp.logical_not(starts_aligned(tile)))(barriers.proxy_fence)

    def _read(self, name: str, at):
        return self.smem[name].at[lax.rem(at, self.stages)]

    def _release(self, name: str, at) -> None:
        barriers.arrive(self.smem[f"{name}_free"], lax.rem(at, self.stages))

    def _rows(self, tile: Tile) -> Rows:
        group = self.static.group
        return Rows(tile.row, tile.head * group, tile.tokens * group, group, self.static.kv_heads * group)

    def _empty(self, tile: Tile, turn) -> None:
        # rows that see nothing
        nothing = plgpu.layout_cast(jnp.zeros((64, self.static.v_dim), self.arrays.out.dtype), TILE)
        rows_io.store(self.arrays.out, nothing, self._rows(tile), start=self.start, interpret=False)
        none = plgpu.layout_cast(jnp.full((64,), -jnp.inf, jnp.float32), ROW)
        rows_io.store_vector(self.arrays.lse, none, self._rows(tile), start=self.start, interpret=False)
        barriers.arrive(self.smem["q_free"], self._q_stage(turn))

    def _weigh(self, tile: Tile, i, scores, top, total):
        return softmax.weigh(self.static, tile, tile.begin + i, self.start, self.scale, scores, top, total)

    def _scores(self, turn, at):
        q_at = self._q_stage(turn) * self.static.config.groups + self.who
        return products.start_scores(self.smem["q"], q_at, self.smem["k"], lax.rem(at, self.stages))

    def _first(self, turn, tile: Tile, at):
        # weights of a tile's first block, with nothing beside
        self._wait("k", at, tile)
        scores = products.finished(self._scores(turn, at), under_way=0)
        self._release("k", at)
        weights, _, top, total = self._weigh(tile, 0, scores, *_nothing_yet())
        return weights.astype(self.static.dtype), top, total

    def _middle(self, acc, turn, tile: Tile, done, carry):
        # the other blocks of a tile; the last one's values are left
        def step(i, carry):
            weights, top, total = carry
            weigh = functools.partial(self._weigh, tile, i)
            made, decay, top, total = self._products(
                acc, turn, (tile, tile), done + i, weights, lambda s: weigh(s, top, total)
            )
            summed = acc[...]
            self._release("v", done + i - 1)
            acc[...] = summed * lax.broadcast_in_dim(decay, summed.shape, (0,))
            return made.astype(self.static.dtype), top, total  # not earlier: they take the place of those in use

        return lax.fori_loop(1, tile.blocks, step, tuple(carry))

    def _next(self, acc, turn, tile: Tile, next_turn, following: Tile, at, carry):
        # the end of a tile beside the first block `at` of the one that follows
        weights, top, total = carry
        self._wait("v", at - 1, tile)
        self._clear(tile, at - 1)
        weigh = functools.partial(self._weigh, following, 0)
        made = self._products(acc, next_turn, (following, tile), at, weights, lambda s: weigh(s, *_nothing_yet()))
        summed = acc[...]
        self._release("v", at - 1)
        self._finish(tile, top, total, summed)
        barriers.arrive(self.smem["q_free"], self._q_stage(turn))
        acc[...] = plgpu.layout_cast(jnp.zeros(summed.shape, jnp.float32), TILE)
        return made[0].astype(self.static.dtype), *made[2:]

    def _products(self, acc, turn, tiles: tuple[Tile, Tile], at, weights, weigh):
        # Scores of block `at` and sums of the block before, together; and what is made of the scores. tiles: whose keys
        # and whose values these are.
        self._wait("k", at, tiles[0])
        self._wait("v", at - 1, tiles[1])
        softmax.take_turn(self.static, self.who)
        scores = self._scores(turn, at)
        plgpu.wgmma(acc, weights, self._read("v", at - 1))
        softmax.end_turn(self.static, self.who)
        scores = products.finished(scores, under_way=1)
        self._release("k", at)
        new, *rest = weigh(scores)
        # Both keep the compiler from waiting for the product of the values before it makes the weights; the wait is for
        # what is there.
        new = softmax.settled(new)
        self._wait_q(turn)
        return new, *rest

    def _last(self, acc, tile: Tile, end, weights) -> None:
        # the values of a tile's last block, the one before `end`, with nothing beside
        self._wait("v", end - 1, tile)
        self._clear(tile, end - 1)
        plgpu.wgmma(acc, weights, self._read("v", end - 1))
        plgpu.wgmma_wait(0)
        self._release("v", end - 1)

    def _clear(self, tile: Tile, at) -> None:
        # values past the end may be NaN, and 0 * NaN is NaN
        block_kv = self.static.config.block_kv
        end = (tile.begin + tile.blocks) * block_kv

        @pl.when(end > tile.kv_len)
        def _():
            softmax.clear_rows(self.smem["v"], lax.rem(at, self.stages), tile.kv_len - (end - block_kv))

    def _finish(self, tile: Tile, top, total, summed) -> None:
        # out = summed / total, 0 where nothing was seen; lse in natural log, without sinks
        static, arrays = self.static, self.arrays
        total = softmax.row_sum(total)
        v_scale = 1.0 if arrays.v_scale is None else arrays.v_scale[0]
        seen = total > 0
        some = jnp.where(seen, total, 1.0)
        lse = jnp.where(seen, top * math.log(2.0) + jnp.log(some), -jnp.inf)
        scale = jnp.where(seen, v_scale / some, 0.0)
        if static.sinks:
            per_row = Rows(jnp.int32(0), tile.head * static.group, jnp.int32(static.config.rows), static.group, 0)
            sink = rows_io.load_vector(arrays.sinks, per_row, start=self.start, interpret=False) * _LOG2E
            high = jnp.maximum(top, sink)
            decay = jnp.where(seen, jnp.exp2(top - high), 0.0)
            scale = v_scale * decay / (some * decay + jnp.exp2(sink - high))
        value = (summed * lax.broadcast_in_dim(scale, summed.shape, (0,))).astype(arrays.out.dtype)
        rows_io.store(arrays.out, value, self._rows(tile), start=self.start, interpret=False)
        rows_io.store_vector(arrays.lse, lse, self._rows(tile), start=self.start, interpret=False)


def _nothing_yet():
    # maximum and sum of rows before the first block
    top, total = jnp.full((64,), -jnp.inf, jnp.float32), jnp.zeros((64,), jnp.float32)
    return plgpu.layout_cast(top, ROW), plgpu.layout_cast(total, ROW)
