"""The Hopper decode and verify kernel: one tile of (token, head) rows over a run of key blocks of one KV head.

Pages come by the copy engine into rings of key and value blocks; scores and sums stay in registers, and so do the
weights, which feed the second product from there. With one warpgroup a program, it copies for itself and two programs
an SM hide each other's waits; with two, a third warpgroup copies. The interpreter takes weights through shared memory.

Source: arXiv:2205.14135, algorithm 1; arXiv:2309.06180 (paging); arXiv:2407.08608 (products from registers).
"""
# `ACC` is public, exported without its name.
# pyright: reportPrivateImportUsage=false

import functools
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common.masks import Rules
from pallas_kernels.attention import mosaic_gpu_sm90_copy as copies
from pallas_kernels.attention import mosaic_gpu_sm90_masks as masks
from pallas_kernels.attention import mosaic_gpu_sm90_merge as merge
from pallas_kernels.attention import mosaic_gpu_sm90_rows as rows_io
from pallas_kernels.attention import mosaic_gpu_sm90_softmax as softmax
from pallas_kernels.attention.mosaic_gpu_sm90_blocks import Blocks
from pallas_kernels.attention.mosaic_gpu_sm90_records import Arrays, Item, Static
from pallas_kernels.attention.mosaic_gpu_sm90_rows import ROW, TILE, Rows
from pallas_kernels.attention.mosaic_gpu_sm90_schedule import pages_a_block

_LOG2E = math.log2(math.e)
_SLACK = 8.0  # how far, in powers of two, scores may outgrow a row's reference before what was summed is scaled


def program(static: Static, arrays: Arrays, smem: dict) -> None:
    """Body of a program."""
    config = static.config
    at, head = lax.axis_index("items"), lax.axis_index("kv_heads")
    if config.cluster > 1:
        at = at * config.cluster + lax.axis_index("parts")
    item, firsts = _load_item(static, arrays, at)
    if not static.interpret:
        copies.init_barriers(smem["full"])  # while the item is on its way
    first = None if static.wide else arrays.unserved[0] + at  # loaded here, where its way is shared

    @pl.when(item.tokens > 0)
    def _():
        blocks = Blocks(static, arrays, smem, item, head)
        if config.sharers > 1:
            copies.cluster_barrier()  # nobody copies to a program whose barriers are not made
        if not config.copies_apart:
            _compute(static, arrays, smem, item, at, head, jnp.int32(0), blocks, firsts)
            return
        who = lax.axis_index("warpgroups")

        @pl.when(who < config.groups)
        def _():
            plgpu.set_max_registers(240 if config.groups > 1 else 248, action="increase")
            _compute(static, arrays, smem, item, at, head, who, blocks)

        @pl.when(who == config.groups)
        def _():
            plgpu.set_max_registers(24, action="decrease")
            ids = firsts or _first_ids(static, arrays, at)
            blocks.begin(ids)
            blocks.fill(ids)
            blocks.run()

        if config.sharers > 1:
            copies.cluster_barrier(reads=False)  # nobody ends while another frees its places

    first = arrays.unserved[0] + at if first is None else first

    @pl.when(first < static.num_tokens)
    def _():
        mine = jnp.bool_(True)
        if config.copies_apart:
            mine = lax.axis_index("warpgroups") == 0
        if config.sharers > 1:
            mine = mine & (lax.axis_index("sharers") == 0)
        pl.when(mine)(lambda: _zero(static, arrays, first, head))


def _load_item(static: Static, arrays: Arrays, at) -> tuple[Item, list[tuple]]:
    # an item, and the page ids of its first blocks; a copying warpgroup loads its own
    fields, pages = len(Item._fields), pages_a_block(static.config, static.page_size)
    stages = static.config.stages if static.interpret or not static.config.copies_apart else 0
    count = fields + stages * pages
    if static.interpret or static.wide:
        row, offset = [arrays.items[at, i] for i in range(count)], arrays.page_offset[0]
    else:
        row = rows_io.load_scalars(arrays.items, at, count)
        (offset,) = rows_io.load_scalars(arrays.page_offset, jnp.int32(0), 1)
    ids = [x + offset for x in row[fields:]]
    return Item(*row[:fields]), [tuple(ids[i * pages : (i + 1) * pages]) for i in range(stages)]


def _first_ids(static: Static, arrays: Arrays, at) -> list[tuple]:
    # as `_load_item` loads them, a number a lane
    fields, pages = len(Item._fields), pages_a_block(static.config, static.page_size)
    starts = [fields + i * pages for i in range(static.config.stages)]
    found = [rows_io.load_lanes(arrays.items, at, start, start + pages - 1) for start in starts]
    return [(ids + arrays.page_offset[0],) for ids in found]


def _zero(static: Static, arrays: Arrays, first, head) -> None:
    # the rows that no request with keys answers for: each program takes some
    programs = arrays.items.shape[0]

    def row(i, _):
        token = first + i * programs

        def attended(seq, found):
            low, high = arrays.cu_q_lens[seq], arrays.cu_q_lens[seq + 1]
            mine = (low <= token) & (token < high) & (high - low <= static.max_q_len)
            return jnp.where(mine, jnp.int32(1), found)

        requests = jnp.where(token < arrays.unserved[1], arrays.cu_q_lens.shape[0] - 1, 0)  # no search past the last

        @pl.when(lax.fori_loop(0, requests, attended, jnp.int32(0)) == 0)
        def _():
            where = Rows(
                token, head * static.group, jnp.int32(static.group), static.group, static.kv_heads * static.group
            )
            nothing = plgpu.layout_cast(jnp.zeros((64, static.v_dim), arrays.out.dtype), TILE)
            rows_io.store(arrays.out, nothing, where, interpret=static.interpret)
            empty = plgpu.layout_cast(jnp.full((64,), -jnp.inf, jnp.float32), ROW)
            rows_io.store_vector(arrays.lse, empty, where, interpret=static.interpret)

    lax.fori_loop(0, (static.num_tokens - first + (programs - 1)) // programs, row, None)


def _compute(
    static: Static, arrays: Arrays, smem: dict, item: Item, at, head, who, blocks: Blocks, firsts: list | None = None
) -> None:
    # firsts: page ids of the first blocks, where this warpgroup copies
    config, group = static.config, static.group
    mine, shape = who * 64, (64, config.block_kv)
    others = lax.axis_index("sharers") * config.own_rows if config.sharers > 1 else 0
    start = others + mine
    q_rows = Rows(item.row, head * group, item.tokens * group, group, static.kv_heads * group)
    if static.words:
        pl.when(who == 0)(lambda: masks.fetch_tree(static, arrays, smem, item, others))
    if firsts is not None:
        blocks.begin(firsts)
    # Queries are on their way beside the first keys, and before the other copies: starting a copy takes some time.
    q = rows_io.load(arrays.q, q_rows, shape=(64, static.k_dim), start=start, interpret=static.interpret)
    if firsts is not None:
        blocks.fill(firsts)
    scale = static.rules.sm_scale if arrays.k_scale is None else static.rules.sm_scale * arrays.k_scale[0]
    if q.dtype != static.operand:
        q, power = _as_float16(q)
        scale = scale * power
        if static.q_in_smem:  # registers are short
            smem["scale"][...] = scale
    if static.q_in_smem:
        smem["q_tile"][who] = q
        plgpu.commit_smem()
        q = smem["q_tile"].at[who]
    if static.words:
        plgpu.barrier_wait(smem["tree_full"])

    def keys(block):
        return blocks.read("k", block).transpose((1, 0))

    def values(block):
        read = blocks.read("v", block)
        pl.when((block + 1) * shape[1] > item.kv_len)(lambda: _clear(item.kv_len, block, read))
        return read

    def ids(block):
        return blocks.source.ids(block) if blocks.copies_itself else ()

    def weigh(item, block, scores, top, slack=0.0):
        kept = plgpu.layout_cast(smem["scale"][...], ROW) if "scale" in smem else scale
        scores, unit = _capped(static.rules, scores, kept)
        whole = (block * shape[1] >= item.low) & ((block + 1) * shape[1] <= item.high)
        scores = lax.cond(
            whole, lambda s: s, functools.partial(masks.mask, static, smem, item, block, start, mine), scores
        )
        new = jnp.maximum(top, jnp.max(scores, axis=1) * unit)  # as sm_scale > 0
        if slack:
            new = jnp.where(new > top + slack, new, top)
        safe = jnp.where(new == -jnp.inf, 0.0, new)  # a row that saw nothing yet: exp2(-inf - 0), not -inf + inf
        decay = jnp.exp2(top - safe)
        weights = jnp.exp2(scores * _spread(unit, shape) - _spread(safe, shape))  # one fused multiply-add
        return weights, decay, new

    def step(block, carry):
        scores, top, total, acc, ids_v, ids_k = carry
        following = ids(block + 2 + config.stages)

        def body(next_scores):
            blocks.wait("k", block + 1)
            plgpu.wgmma(next_scores, q, keys(block + 1))  # past the end: of what is there, and dropped
            weights, decay, new = weigh(item, block, scores, top)
            more = total * decay + jnp.sum(weights, axis=1)
            decayed = acc * _spread(decay, acc.shape)
            blocks.wait("v", block)
            summed = _accumulate(static, smem, who, decayed, weights.astype(static.operand), values(block))
            return next_scores[...], new, more, summed

        scores, top, total, acc = pl.run_scoped(body, plgpu.ACC(shape, jnp.float32))
        blocks.renew(block + 1, block, (ids_k, ids_v))
        return scores, top, total, acc, ids_k, following

    def deferred(top):
        # a block's values are multiplied beside the weights of the block after
        if_any = item.begin < item.end
        some = item._replace(kv_len=jnp.where(if_any, item.kv_len, 0), high=jnp.where(if_any, item.high, 0))

        def body(acc):
            def step(block, carry):
                weights, top, total = carry
                blocks.wait("k", block)
                copies.take_turn(who)  # one warpgroup's products beside the other's weights

                def scored(scores):
                    plgpu.wgmma(scores, q, keys(block))
                    plgpu.wgmma(acc, weights, blocks.read("v", block - 1))
                    copies.end_turn(who)
                    made = plgpu.wgmma_accumulator_load(scores, wait_n=1)
                    blocks.release("k", block)
                    new, *rest = weigh(some, block, made, top, _SLACK)
                    # Both keep the compiler from waiting for the product of the values before it makes the weights.
                    new, more = softmax.settled(new, softmax.partial_sums(new))
                    blocks.wait("v", block)
                    return new, more, *rest

                weights, more, decay, top = pl.run_scoped(scored, plgpu.ACC(shape, jnp.float32))
                total = total * _spread(decay, total.shape) + more
                done = acc[...]
                blocks.release("v", block - 1)
                acc[...] = softmax.scaled(done, decay)
                return weights.astype(static.operand), top, total  # not earlier: they take the place of those in use

            pl.when(who == 1)(lambda: copies.end_turn(who))
            blocks.wait("k", item.begin)
            made = _product(q, keys(item.begin), shape)
            blocks.release("k", item.begin)
            weights, _, new = weigh(some, item.begin, made, top, _SLACK)
            blocks.wait("v", item.begin)
            carry = (weights.astype(static.operand), new, softmax.partial_sums(weights))
            weights, new, more = lax.fori_loop(item.begin + 1, item.end, step, carry)
            last = jnp.maximum(item.end - 1, item.begin)
            of_last = blocks.read("v", last)
            pl.when((last + 1) * shape[1] > some.kv_len)(lambda: _clear(some.kv_len, last, of_last))
            plgpu.wgmma(acc, weights, of_last)
            return new, jnp.sum(more, axis=1), acc[...]

        return pl.run_scoped(body, plgpu.ACC((64, static.v_dim), jnp.float32))

    def step_alone(block, carry):
        top, total, acc = carry
        blocks.wait("k", block)
        weights, decay, top = weigh(item, block, _product(q, keys(block), shape), top)
        total = total * decay + jnp.sum(weights, axis=1)
        weights = weights.astype(static.operand)
        acc = acc * _spread(decay, acc.shape)
        blocks.wait("v", block)
        acc = _accumulate(static, smem, who, acc, weights, values(block))
        now = ids(block + config.stages)  # not a block ahead: wide heads leave no registers for that
        blocks.renew(block, block, (now, now))
        return top, total, acc

    empty = (jnp.full((64,), -jnp.inf, jnp.float32), jnp.zeros((64,), jnp.float32))
    top, total = (plgpu.layout_cast(x, ROW) for x in empty)
    acc = plgpu.layout_cast(jnp.zeros((64, static.v_dim), jnp.float32), TILE)
    if static.looks_ahead:
        first = ids(item.begin + config.stages)
        blocks.wait("k", item.begin)
        scores = _product(q, keys(item.begin), shape)
        blocks.renew(item.begin, None, (first, ()))
        carry = (scores, top, total, acc, first, ids(item.begin + 1 + config.stages))
        carry = lax.fori_loop(item.begin, item.end, step, carry)[1:4]
    elif static.defers:
        carry = deferred(top)
    else:
        carry = lax.fori_loop(item.begin, item.end, step_alone, (top, total, acc))
    if static.wide:
        late = {name: arrays.items[at, Item._fields.index(name)] for name in ("row", "tokens", "parts")}
        item = item._replace(**late)
        q_rows = q_rows._replace(first=item.row, used=item.tokens * group)
    _finish(static, arrays, smem, item, at, head, start, q_rows, *carry)


def _product(a, b, shape):
    # a [64, k] in registers or shared memory, b [k, n] in shared memory -> f32 [64, n]
    def run(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))


def _accumulate(static: Static, smem: dict, who, acc, weights, values):
    if static.interpret:
        smem["weights"][who] = weights
        plgpu.commit_smem()
        return acc + _product(smem["weights"].at[who], values, acc.shape)

    def run(ref):
        plgpu.wgmma(ref, weights, values)

    return pl.run_state(run)(plgpu.ACC.init(acc))


def _capped(rules: Rules, scores, scale):
    # scores, and what makes them logarithms to base 2, so that a weight is one exp2
    cap = rules.logit_soft_cap
    if cap is None:
        return scores, scale * _LOG2E
    # cap * tanh(s / cap), with tanh(x) = 1 - 2 / (exp(2 x) + 1)
    twice = scores * _spread(scale * (2.0 * _LOG2E / cap), scores.shape)
    return cap - (2.0 * cap) / (jnp.exp2(twice) + 1.0), _LOG2E


def _spread(x, shape):
    # a number a row over its row; a scalar is for all
    return lax.broadcast_in_dim(x, shape, (0,)) if jnp.ndim(x) else x


def _as_float16(q):
    # bfloat16 rows as float16, and the power of two that gives each back: its largest value becomes 1024 to 2048, so
    # that what float16 cannot hold is under 2**-34 of it
    largest = jnp.maximum(jnp.max(jnp.abs(q), axis=1).astype(jnp.float32), 2.0**-100)
    power = lax.bitcast_convert_type(lax.bitcast_convert_type(largest, jnp.int32) & 0x7F800000, jnp.float32)
    return (q.astype(jnp.float32) * _spread(1024.0 / power, q.shape)).astype(jnp.float16), power * (1.0 / 1024.0)


def _clear(kv_len, block, values) -> None:
    # Values past the end may be NaN, and 0 * NaN is NaN: the last block's are set to zero in place.
    key = masks.iota(values.shape, 0) + block * values.shape[0]
    held = plgpu.layout_cast(values[...], TILE)
    values[...] = jnp.where(key < kv_len, held, jnp.zeros_like(held))
    plgpu.commit_smem()


def _finish(
    static: Static, arrays: Arrays, smem: dict, item: Item, at, head, start, q_rows: Rows, top, total, acc
) -> None:
    # out = acc / total, 0 where nothing was seen; lse in natural log, without sinks
    v_scale = 1.0 if arrays.v_scale is None else arrays.v_scale[0]
    seen = total > 0
    some = jnp.where(seen, total, 1.0)
    scale = jnp.where(seen, v_scale / some, 0.0)
    lse = jnp.where(seen, top * math.log(2.0) + jnp.log(some), -jnp.inf)

    def keep(out, out_lse, scale, where: Rows):
        value = (acc * _spread(scale, acc.shape)).astype(out.dtype)
        rows_io.store(out, value, where, start=start, interpret=static.interpret)
        rows_io.store_vector(out_lse, lse, where, start=start, interpret=static.interpret)

    def whole():
        scale_ = scale
        if static.sinks:
            per_row = Rows(jnp.int32(0), head * static.group, jnp.int32(static.config.rows), static.group, 0)
            sink = rows_io.load_vector(arrays.sinks, per_row, start=start, interpret=static.interpret) * _LOG2E
            high = jnp.maximum(top, sink)
            decay = jnp.where(seen, jnp.exp2(top - high), 0.0)
            scale_ = v_scale * decay / (total * decay + jnp.exp2(sink - high))
        keep(arrays.out, arrays.lse, scale_, q_rows)

    if static.config.cluster > 1:
        part = acc * _spread(scale, acc.shape)
        return merge.in_cluster(static, arrays, smem, head, start, q_rows, part, lse)
    if not static.config.splits:
        return whole()
    pl.when(item.parts == 1)(whole)

    @pl.when(item.parts > 1)
    def _():
        offset = (at * static.kv_heads + head) * (static.block_q * static.group)
        where = Rows(jnp.int32(0), offset, item.tokens * static.group, static.config.rows, 0)
        keep(arrays.parts, arrays.part_lse, scale, where)

    return None
