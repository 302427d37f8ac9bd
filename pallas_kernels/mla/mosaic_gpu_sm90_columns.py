"""The Hopper latent attention kernel for tiles of 128 rows: two programs of a cluster have half of the columns each.

A program holds its columns of the queries of all rows, and copies its columns of each block: half of what values are
read from, and half of the rotated key. So a block's bytes are read once for 128 rows, three blocks fit beside the
queries, and no program is given what the other has. A warpgroup has 64 rows. It multiplies its columns of queries and
keys, sends these parts of the scores to the warpgroup of the other program that has the same rows, and adds what that
one sends: both have the same scores then, to the bit, and make the same weights, each for its own columns of values.
Scores of a block are multiplied together with the values of the block before, and exchanged and made into weights while
those and the other warpgroup's products run.

Source: arXiv:2405.04434, section 2.1 (absorbed latent attention); arXiv:2407.08608, algorithm 2.
"""
# `ACC` is public, exported without its name.
# pyright: reportPrivateImportUsage=false

import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import mosaic_gpu_sm90_prefill_products as products
from pallas_kernels.attention import mosaic_gpu_sm90_prefill_softmax as ring_io
from pallas_kernels.attention import mosaic_gpu_sm90_rows as rows_io
from pallas_kernels.attention import mosaic_gpu_sm90_softmax as softmax
from pallas_kernels.attention.mosaic_gpu_sm90_records import Item
from pallas_kernels.attention.mosaic_gpu_sm90_rows import ROW, Rows
from pallas_kernels.mla import mosaic_gpu_sm90_barriers as barriers
from pallas_kernels.mla import mosaic_gpu_sm90_columns_copy as copy
from pallas_kernels.mla import mosaic_gpu_sm90_exchange as exchange
from pallas_kernels.mla import mosaic_gpu_sm90_mask as masks
from pallas_kernels.mla.mosaic_gpu_sm90_records import Arrays, Static

_LOG2E = math.log2(math.e)
_SLACK = 8.0  # how far, in powers of two, scores may outgrow a row's reference before what was summed is scaled


class Computing:
    """What computing warpgroup `who` does: 64 rows over all blocks of the item, in this program's columns."""

    def __init__(self, static: Static, arrays: Arrays, smem: dict, item: Item, at, who, load_item: Callable):
        self.static, self.arrays, self.smem, self.item, self.at, self.who = static, arrays, smem, item, at, who
        # Loaded anew where most of it is wanted, as registers are short until then; from the same address in other
        # words, or that is kept.
        self.item_again = lambda: load_item(static, arrays, at + jnp.minimum(item.begin, 0))
        self.start = who * 64
        self.unit = static.rules.sm_scale * _LOG2E  # makes scores logarithms to base 2

    def run(self) -> None:
        """All blocks of the item, then the results."""
        static, item = self.static, self.item
        copy.load_queries(static, self.arrays, self.smem, self._rows(item), self.who)

        def all_blocks(acc):
            blocks = item.end - item.begin

            def one():
                return self._last(acc, jnp.int32(0), *self._first())

            def several():
                part, *nothing = self._first()
                following = self._start_scores(jnp.int32(1))
                weights, _, *rest = self._weigh(jnp.int32(0), part, *nothing)
                following = self._sent(1, weights, following)
                carry = lax.fori_loop(1, blocks - 1, lambda i, carry: self._block(acc, i, *carry), (*following, *rest))
                return self._last(acc, blocks - 1, *carry[1:], before=carry[0])

            some = lambda: lax.cond(blocks > 1, several, one)  # noqa: E731
            top, total = lax.cond(blocks > 0, some, _nothing_yet)
            self._finish(top, total, acc[...])

        pl.run_scoped(all_blocks, plgpu.ACC((64, static.widths[0]), jnp.float32))

    def _rows(self, item: Item) -> Rows:
        group = self.static.group
        return Rows(item.row, jnp.int32(0), item.tokens * group, group, group)

    def _first(self):
        # this program's part of the scores of the first block, which is sent, and of rows before it
        part = products.finished(self._start_scores(jnp.int32(0)), under_way=0)
        exchange.send(self.smem, self.who, jnp.int32(0), part)
        return part, *_nothing_yet()

    def _block(self, acc, i, weights, part, top, total):
        # Weights of block `i` beside the values of the one before it and the scores of the one after it.
        self._add(acc, i - 1, weights)
        following = self._start_scores(i + 1)
        plgpu.wgmma_wait(1)
        barriers.arrive(self.smem["free"], self._stage(i - 1))
        weights, decay, top, total = self._weigh(i, part, top, total)
        weights, following = self._sent(i + 1, weights, following)
        acc[...] = softmax.scaled(acc[...], decay)
        return weights, following, top, total

    def _sent(self, i, weights, part):
        # Weights as values want them, and the part of the scores of block `i` once it is made and sent.
        (weights,) = softmax.settled(weights)  # or the compiler makes them after the wait
        part = products.finished(part, under_way=0)
        exchange.send(self.smem, self.who, i, part)
        return weights.astype(self.static.dtype), part

    def _last(self, acc, i, part, top, total, before=None):
        # before: weights of the block before, if there is one
        if before is not None:
            self._add(acc, i - 1, before)
        weights, decay, top, total = self._weigh(i, part, top, total)
        (weights,) = softmax.settled(weights)
        self._wait(i)  # with the above, keeps the compiler from waiting for the product first; it is there
        if before is not None:
            acc[...] = softmax.scaled(acc[...], decay)
        self._clear(i)
        self._add(acc, i, weights.astype(self.static.dtype))
        plgpu.wgmma_wait(0)
        return top, total

    def _add(self, acc, i, weights) -> None:
        plgpu.wgmma(acc, weights, self.smem["values"].at[self._stage(i)])

    def _stage(self, i):
        return lax.rem(i, self.static.config.stages)

    def _wait(self, i) -> None:
        # until block `i` is there
        barriers.wait(self.smem["full"], self._stage(i), lax.div(i, self.static.config.stages))

    def _start_scores(self, i):
        self._wait(i)
        names = self.static.column_parts
        queries, keys = [self.smem[f"{name}_q"] for name in names], [self.smem[name] for name in names]
        return products.start_scores(queries, self.who, keys, self._stage(i), self.static.column_swizzles)

    def _weigh(self, i, part, top, total):
        # Weights of block `i` f32[64, keys], the factor of what was summed, maximum, and this thread's own sums.
        static, block = self.static, self.item.begin + i
        scores = exchange.received(self.smem, self.who, i, part)
        whole = (block + 1) * static.config.block_kv <= self.item.high  # there are no windows
        hide = lambda s: masks.mask(static, self.arrays, self.item_again(), block, self.start, s)  # noqa: E731
        scores = lax.cond(whole, lambda s: s, hide, scores)
        new = jnp.maximum(top, jnp.max(scores, axis=1) * self.unit)  # as sm_scale > 0
        new = jnp.where(new > top + _SLACK, new, top)
        safe = jnp.where(new == -jnp.inf, 0.0, new)  # a row that saw nothing yet: exp2(-inf - 0), not -inf + inf
        decay = jnp.exp2(top - safe)
        weights, total = ring_io.powers(0, scores, self.unit, safe, total * decay)
        return weights, decay, new, total

    def _clear(self, i) -> None:
        # values past the end may be NaN, and 0 * NaN is NaN: only the last block has any
        end = (self.item.begin + i + 1) * self.static.config.block_kv

        @pl.when(end > self.item.kv_len)
        def _():
            first = self.item.kv_len - (end - self.static.config.block_kv)
            ring_io.clear_rows(self.smem["values"], self._stage(i), first, self.static.column_swizzles[0])

    def _finish(self, top, total, summed) -> None:
        # out = summed / total, 0 where nothing was seen; lse in natural log
        static, arrays, item = self.static, self.arrays, self.item_again()
        rows = self._rows(item)
        total = ring_io.row_sum(total)
        seen = total > 0
        some = jnp.where(seen, total, 1.0)
        lse = jnp.where(seen, top * math.log(2.0) + jnp.log(some), -jnp.inf)
        value = summed * lax.broadcast_in_dim(jnp.where(seen, 1.0 / some, 0.0), summed.shape, (0,))

        def keep(out, out_lse, where: Rows) -> None:
            rank = lax.axis_index("sharers")
            column, mine = rank * static.widths[0], value.astype(out.dtype)
            rows_io.store(out, mine, where, start=self.start, column=column, interpret=False)
            store_lse = lambda: rows_io.store_vector(out_lse, lse, where, start=self.start, interpret=False)  # noqa: E731
            pl.when(rank == 0)(store_lse)

        if not static.config.splits:
            keep(arrays.out, arrays.lse, rows)
            return
        pl.when(item.parts == 1)(lambda: keep(arrays.out, arrays.lse, rows))

        @pl.when(item.parts > 1)
        def _():
            offset = self.at * (static.block_q * static.group)
            keep(arrays.parts, arrays.part_lse, Rows(jnp.int32(0), offset, rows.used, static.config.rows, 0))


def _nothing_yet():
    # maximum and sum of rows before the first block
    top, total = jnp.full((64,), -jnp.inf, jnp.float32), jnp.zeros((64,), jnp.float32)
    return plgpu.layout_cast(top, ROW), plgpu.layout_cast(total, ROW)
