"""The Hopper latent attention kernel: 64 (token, head) rows over a run of blocks of latent rows.

Two warpgroups compute. Each has one half of the 512 columns that are summed, as no thread has registers for all, and
they take blocks in turn: who has a block makes its scores and weights, adds what they weigh of its own half from
registers, and gives the weights to the other through shared memory. So scores of one block are multiplied while the
weights of the block before are made, and values are read from the rows that served as keys. Maxima are passed on from
block to block: all blocks' weights have the scale that one warpgroup alone would give them.

The copying warpgroup fills a half as soon as the one that sums it is done; nobody else reads it then, since weights
exist only when the scores are made. Source: arXiv:2405.04434, section 2.1 (absorbed latent attention); the halves and
the turns are FlashMLA's, https://github.com/deepseek-ai/FlashMLA; arXiv:2407.08608 (products from registers).
"""
# `ACC` is public, exported without its name.
# pyright: reportPrivateImportUsage=false, reportCallIssue=false

import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import mosaic_gpu_sm90_copy as copies
from pallas_kernels.attention import mosaic_gpu_sm90_prefill_barriers as gpu_barriers
from pallas_kernels.attention import mosaic_gpu_sm90_prefill_softmax as ring_io
from pallas_kernels.attention import mosaic_gpu_sm90_rows as rows_io
from pallas_kernels.attention import mosaic_gpu_sm90_softmax as softmax
from pallas_kernels.attention.mosaic_gpu_sm90_records import Item
from pallas_kernels.attention.mosaic_gpu_sm90_rows import ROW, TILE, Rows
from pallas_kernels.mla import mosaic_gpu_sm90_barriers as barriers
from pallas_kernels.mla import mosaic_gpu_sm90_copy as producer
from pallas_kernels.mla import mosaic_gpu_sm90_mask as masks
from pallas_kernels.mla.mosaic_gpu_sm90_records import HALVES, Arrays, Static, with_barriers

_LOG2E = math.log2(math.e)
_SLACK = 8.0  # how far, in powers of two, scores may outgrow a row's reference before what was summed is scaled


def program(static: Static, arrays: Arrays, smem: dict) -> None:
    """Body of a program."""
    smem = with_barriers(static, smem)
    barriers.init(smem)
    at, who = lax.axis_index("items"), lax.axis_index("warpgroups")

    def compute(mine: int):
        plgpu.set_max_registers(_registers(static)[0], action="increase")
        _with_item(static, arrays, at, lambda item: _Computing(static, arrays, smem, item, at, mine).run())
        if mine == 0:
            _zero(static, arrays, at)

    def produce():
        plgpu.set_max_registers(_registers(static)[1], action="decrease")
        _with_item(static, arrays, at, lambda item: producer.produce(static, arrays, smem, item, at))

    # Not three `when`, and each loads the item: else what one needs is kept in the few registers of the copying one.
    lax.cond(who == 2, produce, lambda: lax.cond(who == 0, lambda: compute(0), lambda: compute(1)))


def _with_item(static: Static, arrays: Arrays, at, run) -> None:
    # what a warpgroup does with the program's item, if it is one
    item = _load_item(static, arrays, at)

    @pl.when(item.tokens > 0)
    def _():
        if static.together:
            # Nobody copies to a program whose barriers are not made. Their making has a fence of its own: one for all
            # memory, here or at each arrival at another's barrier, costs a microsecond.
            copies.cluster_barrier(reads=False)
        run(item)
        if static.together:
            copies.cluster_barrier(reads=False)  # nobody ends while another copies to it, or arrives at its barriers


def _registers(static: Static) -> tuple[int, int]:
    # A thread's registers, computing and copying. A launch gives three warpgroups 168 each: what they ask for together
    # must not be more, or one waits for ever.
    return (232, 40) if static.gathers or static.packed else (240, 24)


def _load_item(static: Static, arrays: Arrays, at) -> Item:
    fields = len(Item._fields)
    if static.interpret:
        return Item(*(arrays.items[at, i] for i in range(fields)))
    return Item(*rows_io.load_scalars(arrays.items, at, fields))


def _zero(static: Static, arrays: Arrays, at) -> None:
    # the rows that no request with keys answers for: each program, or the first of its sharers, takes some
    first, programs, width = arrays.unserved[0] + at, arrays.items.shape[0], static.widths[0]

    def row(i, _):
        token = first + i * programs

        def attended(seq, found):
            low, high = arrays.cu_q_lens[seq], arrays.cu_q_lens[seq + 1]
            mine = (low <= token) & (token < high) & (high - low <= static.max_q_len)
            return jnp.where(mine, jnp.int32(1), found)

        requests = jnp.where(token < arrays.unserved[1], arrays.cu_q_lens.shape[0] - 1, 0)  # no search past the last

        @pl.when(lax.fori_loop(0, requests, attended, jnp.int32(0)) == 0)
        def _():
            where = Rows(token, jnp.int32(0), jnp.int32(static.group), static.group, static.group)
            for start in range(0, static.group, 64):
                nothing = plgpu.layout_cast(jnp.zeros((64, width), arrays.out.dtype), TILE)
                for column in (0, width):
                    rows_io.store(arrays.out, nothing, where, start=start, column=column, interpret=static.interpret)
                empty = plgpu.layout_cast(jnp.full((64,), -jnp.inf, jnp.float32), ROW)
                rows_io.store_vector(arrays.lse, empty, where, start=start, interpret=static.interpret)

    some = jnp.maximum(static.num_tokens - first + (programs - 1), 0) // programs
    if static.config.sharers > 1:
        some = jnp.where(lax.axis_index("sharers") == 0, some, 0)
    lax.fori_loop(0, some, row, None)


class _Computing:
    """What computing warpgroup `who` does: blocks `who`, `who` + 2 ... and, with the others, its half of the sums."""

    def __init__(self, static: Static, arrays: Arrays, smem: dict, item: Item, at, who: int):
        self.static, self.arrays, self.smem, self.item, self.at, self.who = static, arrays, smem, item, at, who
        self.half, self.other = HALVES[who], 1 - who
        self.start = lax.axis_index("sharers") * 64 if static.config.sharers > 1 else jnp.int32(0)
        self.unit = static.rules.sm_scale * _LOG2E  # makes scores logarithms to base 2

    def _rows(self, item: Item) -> Rows:
        group = self.static.group
        return Rows(item.row, jnp.int32(0), item.tokens * group, group, group, self.static.most_rows)

    def run(self) -> None:
        """All blocks of the item, then the results."""
        self._load_queries()
        blocks = self.item.end - self.item.begin
        top, total = (plgpu.layout_cast(jnp.full((64,), x, jnp.float32), ROW) for x in (-jnp.inf, 0.0))

        def all_blocks(sums):
            turns = self._first if self.who == 0 else self._second
            self._finish(*turns(sums, blocks, (top, total)), sums[...])

        if self.static.interpret:
            sums = self.smem["sums"].at[self.who]
            sums[...] = jnp.zeros(sums.shape, jnp.float32)
            all_blocks(sums)
        else:
            pl.run_scoped(all_blocks, plgpu.ACC((64, self.static.widths[0]), jnp.float32))

    def _first(self, sums, blocks, carry):
        # blocks by twos: one of its own, then one of the other's, if there is one
        def two(turn, carry):
            i = 2 * turn
            carry = self._own(sums, i, self._scores(i), carry)
            more = jnp.minimum(blocks - 1 - i, 1)
            return lax.fori_loop(0, more, lambda _, carry: self._others(sums, i + 1, carry), carry)

        return lax.fori_loop(0, lax.div(blocks + 1, 2), two, carry)

    def _second(self, sums, blocks, carry):
        # One of the other's and one of its own, whose scores come first: they are made beside the other's weights. The
        # other's values are multiplied beside the weights of its own.
        def two(turn, carry):
            i = 2 * turn
            scores = self._scores(i + 1)
            carry = self._others(sums, i, carry, waits=False)
            return self._own(sums, i + 1, scores, carry, under_way=i)

        carry = lax.fori_loop(0, lax.div(blocks, 2), two, carry)
        odd = lambda _, carry: self._others(sums, blocks - 1, carry)  # noqa: E731
        return lax.fori_loop(0, lax.rem(blocks, 2), odd, carry)

    def _item_again(self) -> Item:
        # The item, loaded anew where most of it is wanted, as registers are short until then; from the same address in
        # other words, or that is kept.
        return _load_item(self.static, self.arrays, self.at + jnp.minimum(self.item.begin, 0))

    def _load_queries(self) -> None:
        # each warpgroup brings one half
        target, rows = self.smem[f"{self.half}_q"], self._rows(self.item)
        producer.load_queries(self.static, self.arrays, target, self.half, rows, self.start)
        barriers.arrive(self.smem["queries"], 0)
        barriers.wait(self.smem["queries"], 0, jnp.int32(0))

    def _stage(self, i):
        return lax.rem(i, self.static.config.stages)

    def _wait(self, half: str, i) -> None:
        # until half of block `i` is there
        barriers.wait(self.smem[f"{half}_full"], self._stage(i), lax.div(i, self.static.config.stages))
        if self.static.gathers and not self.static.interpret:
            gpu_barriers.proxy_fence()

    def _scores(self, i):
        # f32[64, 64], of the half that is handed back first
        order = HALVES if self.who == 0 else HALVES[::-1]

        def run(scores):
            for half in order:
                self._wait(half, i)
                keys = self.smem[half].at[self._stage(i)].transpose((1, 0))
                # 0, but neither constant nor alike for all blocks: else the addresses of all parts of the queries are
                # kept in registers, which are short.
                none = jnp.minimum(self.item.begin + i, 0)
                plgpu.wgmma(scores, self.smem[f"{half}_q"].at[none], keys)
            return scores[...]

        return pl.run_scoped(run, plgpu.ACC((64, self.static.config.block_kv), jnp.float32))

    def _own(self, sums, i, scores, carry, under_way=None):
        # Weights of block `i`, and what they weigh of this half. under_way: the block whose sums are being made.
        static, smem, (top, total) = self.static, self.smem, carry
        block = self.item.begin + i
        whole = (block + 1) * static.config.block_kv <= self.item.high  # there are no windows

        def hide(scores):
            item = self._item_again() if static.words else self.item
            return masks.mask(static, self.arrays, item, block, self.start, scores)

        scores = lax.cond(whole, lambda s: s, hide, scores)
        new = jnp.maximum(top, jnp.max(scores, axis=1) * self.unit)  # as sm_scale > 0
        new = jnp.where(new > top + _SLACK, new, top)
        safe = _safe(new)
        weights = jnp.exp2(scores * self.unit - lax.broadcast_in_dim(safe, scores.shape, (0,)))
        if under_way is not None:
            if not static.interpret:
                # Both keep the compiler from waiting for the other products before it makes the weights; the second
                # wait is for what is there.
                (weights,) = softmax.settled(weights)
                self._wait(self.half, under_way)
                plgpu.wgmma_wait(0)
            self._release(under_way)
        given = smem["weights"].at[self.who % static.weight_places]
        given[...] = weights.astype(static.dtype)
        smem["rows"][self.who] = new
        plgpu.commit_smem()
        barriers.arrive(smem["given"], self.who)
        decay = jnp.exp2(top - safe)
        total = total * decay + jnp.sum(weights, axis=1)
        self._scale(sums, decay)
        self._add(sums, given if static.interpret else weights.astype(static.dtype), i)
        self._release(i)
        return new, total

    def _others(self, sums, i, carry, waits: bool = True):
        # What the other warpgroup's weights of block `i` weigh of this half.
        top, total = carry
        barriers.wait(self.smem["given"], self.other, lax.div(i, 2))
        new = plgpu.layout_cast(self.smem["rows"][self.other], ROW)
        decay = jnp.exp2(top - _safe(new))
        self._scale(sums, decay)
        self._wait(self.half, i)
        self._add(sums, self.smem["weights"].at[self.other % self.static.weight_places], i, waits=waits)
        if waits:
            self._release(i)
        return new, total * decay

    def _values(self, i):
        # this half's columns of a block, zero past the last key: they may be NaN there, and 0 * NaN is NaN
        ring, stage = self.smem[self.half], self._stage(i)
        end = (self.item.begin + i + 1) * self.static.config.block_kv

        @pl.when(end > self.item.kv_len)
        def _():
            first = self.item.kv_len - (end - self.static.config.block_kv)
            if self.static.interpret:
                held = ring[stage]
                ring[stage] = jnp.where(lax.broadcasted_iota(jnp.int32, held.shape, 0) < first, held, 0)
                plgpu.commit_smem()
            else:
                ring_io.clear_rows(ring, stage, first, self.static.swizzle)

        return ring.at[stage, :, pl.ds(0, self.static.widths[0])]

    def _add(self, sums, weights, i, waits: bool = True) -> None:
        values = self._values(i)
        if self.static.interpret:

            def run(acc):
                plgpu.wgmma(acc, weights, values)
                return acc[...]

            sums[...] = sums[...] + pl.run_scoped(run, plgpu.ACC(sums.shape, jnp.float32))
            return
        plgpu.wgmma(sums, weights, values)
        if waits:
            plgpu.wgmma_wait(0)

    def _scale(self, sums, decay) -> None:
        if self.static.interpret:
            sums[...] = sums[...] * lax.broadcast_in_dim(decay, sums.shape, (0,))
        else:
            sums[...] = softmax.scaled(sums[...], decay)

    def _release(self, i) -> None:
        # this half of block `i` is read
        sharers = self.static.config.sharers if self.static.together else 1
        barriers.arrive(self.smem[f"{self.half}_free"], self._stage(i), sharers)

    def _finish(self, top, total, summed) -> None:
        # out = summed / total, 0 where nothing was seen; lse in natural log
        static, arrays = self.static, self.arrays
        item = self._item_again()
        rows = self._rows(item)
        self.smem["rows"][2 + self.who] = total
        plgpu.commit_smem()
        barriers.arrive(self.smem["totals"], 0)
        barriers.wait(self.smem["totals"], 0, jnp.int32(0))
        first, second = (plgpu.layout_cast(self.smem["rows"][2 + who], ROW) for who in range(2))
        total = first + second
        seen = total > 0
        some = jnp.where(seen, total, 1.0)
        lse = jnp.where(seen, top * math.log(2.0) + jnp.log(some), -jnp.inf)
        value = summed * lax.broadcast_in_dim(jnp.where(seen, 1.0 / some, 0.0), summed.shape, (0,))

        def keep(out, out_lse, where: Rows) -> None:
            column = self.who * static.widths[0]
            rows_io.store(
                out,
                value.astype(out.dtype),
                where,
                start=self.start,
                column=column,
                interpret=static.interpret,
            )
            if self.who == 0:
                rows_io.store_vector(out_lse, lse, where, start=self.start, interpret=static.interpret)

        if not static.config.splits:
            keep(arrays.out, arrays.lse, rows)
            return
        pl.when(item.parts == 1)(lambda: keep(arrays.out, arrays.lse, rows))

        @pl.when(item.parts > 1)
        def _():
            offset = self.at * (static.block_q * static.group)
            where = Rows(jnp.int32(0), offset, rows.used, static.config.rows, 0, static.most_rows)
            keep(arrays.parts, arrays.part_lse, where)


def _safe(top):
    # a row that saw nothing yet: exp2(-inf - 0), not -inf + inf
    return jnp.where(top == -jnp.inf, 0.0, top)
