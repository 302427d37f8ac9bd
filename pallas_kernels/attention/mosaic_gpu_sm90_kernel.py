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
from pallas_kernels.attention import mosaic_gpu_sm90_rows as rows_io
from pallas_kernels.attention.mosaic_gpu_sm90_blocks import Blocks
from pallas_kernels.attention.mosaic_gpu_sm90_records import Arrays, Item, Static
from pallas_kernels.attention.mosaic_gpu_sm90_rows import ROW, TILE, Rows

_LOG2E = math.log2(math.e)


def program(static: Static, arrays: Arrays, smem: dict) -> None:
    """Body of a program."""
    config = static.config
    at, head = lax.axis_index("items"), lax.axis_index("kv_heads")
    item = Item(*(arrays.items[at, i] for i in range(len(Item._fields))))
    first = arrays.unserved[0] + at  # loaded here, where its way is shared

    @pl.when(item.tokens > 0)
    def _():
        blocks = Blocks(static, arrays, smem, item, head)
        if not static.interpret:
            copies.init_barriers(smem["k_full"], smem["v_full"])
        if config.groups == 1:
            blocks.fill()
            _compute(static, arrays, smem, item, at, head, jnp.int32(0), blocks)
            return
        who = lax.axis_index("warpgroups")

        @pl.when(who < config.groups)
        def _():
            plgpu.set_max_registers(240, action="increase")
            _compute(static, arrays, smem, item, at, head, who, blocks)

        @pl.when(who == config.groups)
        def _():
            plgpu.set_max_registers(24, action="decrease")
            blocks.fill()
            blocks.run()

    @pl.when(first < static.num_tokens)
    def _():
        if config.groups == 1:
            _zero(static, arrays, first, head)
        else:
            pl.when(lax.axis_index("warpgroups") == 0)(lambda: _zero(static, arrays, first, head))


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


def _compute(static: Static, arrays: Arrays, smem: dict, item: Item, at, head, who, blocks: Blocks) -> None:
    config, group = static.config, static.group
    start, shape = who * 64, (64, config.block_kv)
    q_rows = Rows(item.row, head * group, item.tokens * group, group, static.kv_heads * group)
    if static.words:
        pl.when(who == 0)(lambda: _fetch_tree(static, arrays, smem, item))
    q = rows_io.load(arrays.q, q_rows, shape=(64, static.k_dim), start=start, interpret=static.interpret)
    if static.q_in_smem:
        smem["q_tile"][who] = q
        plgpu.commit_smem()
        q = smem["q_tile"].at[who]
    if static.words:
        plgpu.barrier_wait(smem["tree_full"])

    def keys(block):
        return smem["k_ring"].at[blocks.stage(block)].transpose((1, 0))

    def ids(block):
        return blocks.source.ids(block) if blocks.copies_itself else ()

    def weigh(block, scores, top, total):
        scores, unit = _capped(static.rules, scores)
        whole = (block * shape[1] >= item.low) & ((block + 1) * shape[1] <= item.high)
        scores = lax.cond(whole, lambda s: s, functools.partial(_mask, static, smem, item, block, start), scores)
        new = jnp.maximum(top, jnp.max(scores, axis=1) * unit)  # as sm_scale > 0
        safe = jnp.where(new == -jnp.inf, 0.0, new)  # a row that saw nothing yet: exp2(-inf - 0), not -inf + inf
        decay = jnp.exp2(top - safe)
        weights = jnp.exp2(scores * unit - lax.broadcast_in_dim(safe, shape, (0,)))  # one fused multiply-add
        return weights.astype(arrays.v.dtype), decay, new, total * decay + jnp.sum(weights, axis=1)

    def step(block, carry):
        scores, top, total, acc, ids_v, ids_k = carry
        following = ids(block + 2 + config.stages)

        def body(next_scores):
            blocks.wait("k", block + 1)
            plgpu.wgmma(next_scores, q, keys(block + 1))  # past the end: of what is there, and dropped
            weights, decay, new, more = weigh(block, scores, top, total)
            decayed = acc * lax.broadcast_in_dim(decay, acc.shape, (0,))
            blocks.wait("v", block)
            stage = blocks.stage(block)
            pl.when((block + 1) * shape[1] > item.kv_len)(lambda: _clear(static, smem, item, block, stage))
            summed = _accumulate(static, smem, who, decayed, weights, smem["v_ring"].at[stage])
            return next_scores[...], new, more, summed

        scores, top, total, acc = pl.run_scoped(body, plgpu.ACC(shape, jnp.float32))
        blocks.release(block + 1, block, (ids_k, ids_v))
        return scores, top, total, acc, ids_k, following

    def step_alone(block, carry):
        top, total, acc, ids_now = carry
        following = ids(block + 1 + config.stages)
        blocks.wait("k", block)
        weights, decay, top, total = weigh(block, _product(q, keys(block), shape), top, total)
        acc = acc * lax.broadcast_in_dim(decay, acc.shape, (0,))
        blocks.wait("v", block)
        stage = blocks.stage(block)
        pl.when((block + 1) * shape[1] > item.kv_len)(lambda: _clear(static, smem, item, block, stage))
        acc = _accumulate(static, smem, who, acc, weights, smem["v_ring"].at[stage])
        blocks.release(block, block, (ids_now, ids_now))
        return top, total, acc, following

    empty = (jnp.full((64,), -jnp.inf, jnp.float32), jnp.zeros((64,), jnp.float32))
    top, total = (plgpu.layout_cast(x, ROW) for x in empty)
    acc = plgpu.layout_cast(jnp.zeros((64, static.v_dim), jnp.float32), TILE)
    first = ids(item.begin + config.stages)
    if static.looks_ahead:
        blocks.wait("k", item.begin)
        scores = _product(q, keys(item.begin), shape)
        blocks.release(item.begin, None, (first, ()))
        carry = (scores, top, total, acc, first, ids(item.begin + 1 + config.stages))
        carry = lax.fori_loop(item.begin, item.end, step, carry)[1:4]
    else:
        carry = lax.fori_loop(item.begin, item.end, step_alone, (top, total, acc, first))[:3]
    _finish(static, arrays, item, at, head, start, q_rows, *carry)


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


def _capped(rules: Rules, scores):
    # scores, and what makes them logarithms to base 2, so that a weight is one exp2
    cap = rules.logit_soft_cap
    if cap is None:
        return scores, rules.sm_scale * _LOG2E
    # cap * tanh(s / cap), with tanh(x) = 1 - 2 / (exp(2 x) + 1)
    return cap - (2.0 * cap) / (jnp.exp2(scores * (rules.sm_scale * 2.0 * _LOG2E / cap)) + 1.0), _LOG2E


def _iota(shape, axis):
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=TILE)


def _mask(static: Static, smem: dict, item: Item, block, start, scores):
    rules, shape = static.rules, scores.shape
    key = _iota(shape, 1) + block * static.config.block_kv
    seen = key < item.kv_len
    if static.words:
        node = key - item.high
        seen = seen & ((node < 0) | _bit(static, smem, node, start))
        if rules.sliding_window is not None:
            low = plgpu.layout_cast(smem["low"][pl.ds(start, 64)], ROW)
            seen = seen & ((node >= 0) | (key >= lax.broadcast_in_dim(low, shape, (0,))))
    elif rules.mask == "causal" and static.block_q > 1:
        place = (_iota(shape, 0) + start) // static.group + item.first
        seen = seen & (key <= place)
        if rules.sliding_window is not None:
            seen = seen & (place - key < rules.sliding_window)
    elif rules.sliding_window is not None:
        seen = seen & (key >= item.low)
    return jnp.where(seen, scores, -jnp.inf)


def _bit(static: Static, smem: dict, node, start):
    picked = jnp.zeros(node.shape, jnp.uint32)
    for word in range(static.words):
        bits = plgpu.layout_cast(smem["bits"][word, pl.ds(start, 64)], ROW)
        picked = jnp.where(node >> 5 == word, lax.broadcast_in_dim(bits, node.shape, (0,)), picked)
    return ((picked >> (node & 31).astype(jnp.uint32)) & jnp.uint32(1)) == 1


def _fetch_tree(static: Static, arrays: Arrays, smem: dict, item: Item) -> None:
    plgpu.copy_gmem_to_smem(arrays.bits.at[item.tile], smem["bits"], smem["tree_full"])
    if static.rules.sliding_window is not None:
        plgpu.copy_gmem_to_smem(arrays.low.at[item.tile], smem["low"], smem["tree_full"])


def _clear(static: Static, smem: dict, item: Item, block, stage) -> None:
    # Values past the end may be NaN, and 0 * NaN is NaN: the last block's are set to zero in place.
    shape = (static.config.block_kv, static.v_dim)
    key = _iota(shape, 0) + block * static.config.block_kv
    values = plgpu.layout_cast(smem["v_ring"][stage], TILE)
    smem["v_ring"][stage] = jnp.where(key < item.kv_len, values, jnp.zeros_like(values))
    plgpu.commit_smem()


def _finish(static: Static, arrays: Arrays, item: Item, at, head, start, q_rows: Rows, top, total, acc) -> None:
    # out = acc / total, 0 where nothing was seen; lse in natural log, without sinks
    seen = total > 0
    some = jnp.where(seen, total, 1.0)
    scale = jnp.where(seen, 1.0 / some, 0.0)
    lse = jnp.where(seen, top * math.log(2.0) + jnp.log(some), -jnp.inf)

    def keep(out, out_lse, scale, where: Rows):
        value = (acc * lax.broadcast_in_dim(scale, acc.shape, (0,))).astype(out.dtype)
        rows_io.store(out, value, where, start=start, interpret=static.interpret)
        rows_io.store_vector(out_lse, lse, where, start=start, interpret=static.interpret)

    def whole():
        scale_ = scale
        if static.sinks:
            per_row = Rows(jnp.int32(0), head * static.group, jnp.int32(static.config.rows), static.group, 0)
            sink = rows_io.load_vector(arrays.sinks, per_row, start=start, interpret=static.interpret) * _LOG2E
            high = jnp.maximum(top, sink)
            decay = jnp.where(seen, jnp.exp2(top - high), 0.0)
            scale_ = decay / (total * decay + jnp.exp2(sink - high))
        keep(arrays.out, arrays.lse, scale_, q_rows)

    if not static.config.splits:
        return whole()
    pl.when(item.parts == 1)(whole)

    @pl.when(item.parts > 1)
    def _():
        offset = (at * static.kv_heads + head) * (static.block_q * static.group)
        where = Rows(jnp.int32(0), offset, item.tokens * static.group, static.config.rows, 0)
        keep(arrays.parts, arrays.part_lse, scale, where)

    return None
