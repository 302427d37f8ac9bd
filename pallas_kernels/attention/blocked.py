"""The loops of the plain JAX attention: tiles of queries over blocks of keys, with trip counts that follow the data.

Source: arXiv:2205.14135, algorithm 1 (online softmax).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._common import ints, masks, rows, shards, softmax, tiles
from pallas_kernels._common.masks import Rules, Tree
from pallas_kernels._common.rows import Stored
from pallas_kernels._common.softmax import Carry
from pallas_kernels._common.tiles import Runs, Tiles
from pallas_kernels.attention.config import Config


class Problem(NamedTuple):
    """A call's arrays, and what is static about it."""

    q: jax.Array  # [tokens, q_heads, k_dim]
    stored: Stored
    seq_lens: jax.Array  # i32[seqs]
    cu_q_lens: jax.Array  # i32[seqs + 1]
    sinks: jax.Array | None  # f32[q_heads]
    tree: Tree | None
    rules: Rules
    max_q_len: int
    splits: int

    @property
    def heads(self) -> tuple[int, int]:
        """KV heads, and query heads a KV head."""
        return self.stored.kv_heads, self.q.shape[1] // self.stored.kv_heads

    @property
    def arrays(self) -> tuple:
        """A tree of all arrays, for what must vary over a mesh as they do."""
        return self.q, self.stored.arrays, self.seq_lens, self.cu_q_lens, self.sinks, self.tree


def attend(problem: Problem, configs: tuple[Config, ...]) -> tuple[jax.Array, jax.Array]:
    """out and lse as `paged_attention` returns them: each request by the first config that holds its rows."""
    tokens, q_heads, _ = problem.q.shape
    lead = (problem.splits,) if problem.splits > 1 else ()
    out_type = problem.q.dtype if problem.splits == 1 else jnp.float32
    out = jnp.zeros((*lead, tokens, q_heads, problem.stored.v_dim), out_type)
    lse = jnp.full((*lead, tokens, q_heads), -jnp.inf, jnp.float32)
    num_seqs = problem.seq_lens.shape[0]
    q_lens = problem.cu_q_lens[1:] - problem.cu_q_lens[:-1]
    shortest = 1
    for i, config in enumerate(configs):
        longest = problem.max_q_len if i + 1 == len(configs) else min(config.block_q, problem.max_q_len)
        num_tiles = tiles.count(tokens, num_seqs, longest, config.block_q, shortest)
        chosen = (q_lens >= shortest) & (q_lens <= longest)
        if num_tiles > 0:
            out, lse = _attend_class(problem, config, chosen, num_tiles, out, lse, only=len(configs) == 1)
        shortest = config.block_q + 1
    return out, lse


def _attend_class(problem: Problem, config: Config, chosen, num_tiles: int, out, lse, *, only: bool):
    # fill the rows of the chosen requests
    cut, starts = tiles.make(problem.seq_lens, problem.cu_q_lens, chosen, num_tiles=num_tiles, block_q=config.block_q)
    cut = masks.narrow(cut, problem.rules, problem.tree, config.block_q)
    runs = tiles.split(cut, block_kv=config.block_kv, splits=problem.splits)
    outs, lses = _run_all(problem, config, runs, out.dtype)
    ids = jnp.arange(problem.q.shape[0], dtype=jnp.int32)
    num_seqs = problem.seq_lens.shape[0]
    seq = jnp.minimum(tiles.run_of(problem.cu_q_lens, ids), num_seqs - 1)
    real = (ids < problem.cu_q_lens[-1]) & ints.pick(chosen, seq)
    offset = jnp.where(real, ids - ints.pick(problem.cu_q_lens, seq), 0)
    tile = jnp.where(real, ints.pick(starts, seq) + ints.div(offset, config.block_q), 0)
    if problem.splits == 1:
        run, row = ints.pick(runs.rank, tile), ints.rem(offset, config.block_q)
    else:
        part = jnp.arange(problem.splits, dtype=jnp.int32)[:, None]
        run = ints.pick(runs.rank, tile[None] * problem.splits + part)
        row = jnp.broadcast_to(ints.rem(offset, config.block_q)[None], run.shape)
    keep = jnp.broadcast_to(real, run.shape)[..., None]
    rest_out, rest_lse = (jnp.zeros((), out.dtype), -jnp.inf) if only else (out, lse)
    out, lse = ints.pick(outs, run, row), ints.pick(lses, run, row)
    return jnp.where(keep[..., None], out, rest_out), jnp.where(keep, lse, rest_lse)


def _run_all(problem: Problem, config: Config, runs: Runs, out_type):
    # -> outs [runs, block_q, q_heads, v_dim], lses f32 [runs, block_q, q_heads], in the order of `runs`
    num = runs.begin.shape[0]
    lanes = min(config.lanes, num)
    extra = -num % lanes
    padded = jax.tree.map(lambda x: jnp.pad(x, (0, extra)), (runs.tile, runs.begin, runs.end)) if extra else runs[:3]
    busy = jnp.sum(runs.end > runs.begin, dtype=jnp.int32)
    q_heads, v_dim = problem.q.shape[1], problem.stored.v_dim

    def group(i, state):
        outs, lses = state
        at = i * lanes
        tile, begin, end = jax.tree.map(
            lambda x: lax.dynamic_slice_in_dim(x, at, lanes, allow_negative_indices=False), padded
        )
        out, lse = _finish(problem, config, _run(problem, config, tile, begin, end))
        return ints.put(outs, out.astype(out_type), at), ints.put(lses, lse, at)

    shape = (num + extra, config.block_q, q_heads)
    start = (jnp.zeros((*shape, v_dim), out_type), jnp.full(shape, -jnp.inf, jnp.float32))
    return lax.fori_loop(0, ints.cdiv(busy, lanes), group, shards.varying_like(start, problem.arrays))


def _run(problem: Problem, config: Config, tile: Tiles, begin, end) -> Carry:
    # All lanes together while each has a block left, then the longer ones alone: no lane ever works on nothing, so a
    # long request beside short ones costs its own length.
    lanes = begin.shape[0]
    kv_heads, group = problem.heads
    q_rows = tile.row[:, None] + jnp.arange(config.block_q, dtype=jnp.int32)[None]
    q = ints.clipped(problem.q, q_rows).reshape(lanes, config.block_q, kv_heads, group, problem.q.shape[2])
    q = jnp.swapaxes(q, 1, 2).reshape(lanes, kv_heads, config.block_q * group, problem.q.shape[2])
    step = functools.partial(_step, problem, config)
    carry = softmax.empty((lanes, kv_heads, config.block_q * group), problem.stored.v_dim)
    carry = shards.varying_like(carry, problem.arrays)

    def advance(i, inputs, carry):
        q, tile, q_rows, begin = inputs
        return step(q, tile, q_rows, begin + i, carry)

    inputs = (q, tile, q_rows, begin)
    shared = jnp.min(end - begin)
    carry = lax.fori_loop(0, shared, lambda i, c: advance(i, inputs, c), carry)
    if lanes == 1:
        return carry

    def alone(lane, carry):
        mine = jax.tree.map(
            lambda x: lax.dynamic_slice_in_dim(x, lane, 1, allow_negative_indices=False), (inputs, carry)
        )
        left = ints.pick(end - begin, lane)
        done = lax.fori_loop(shared, left, lambda i, c: advance(i, mine[0], c), mine[1])
        return jax.tree.map(lambda x, y: ints.put(x, y, lane), carry, done)

    return lax.fori_loop(0, jnp.sum(end - begin > shared, dtype=jnp.int32), alone, carry)  # longest first


def _step(problem: Problem, config: Config, q, tile: Tiles, q_rows, block, carry: Carry) -> Carry:
    # one block of keys for each lane: q [lanes, kv_heads, m, k_dim] with m = block_q * group
    rules, stored = problem.rules, problem.stored
    kv_heads, group = problem.heads
    keys = block[:, None] * config.block_kv + jnp.arange(config.block_kv, dtype=jnp.int32)[None]
    # A key outside the range stands for the nearest one in it: nothing unwritten is read, so no NaN needs masking.
    near = jnp.clip(keys, tile.low[:, None], tile.high[:, None] - 1)
    at = lax.optimization_barrier(stored.locate(tile.seq, near))  # else each copied float divides and looks up anew
    k, v = stored.fetch(at, q.dtype)
    scores = _products(q, k, config) * _scale(rules.sm_scale, stored.k_scale, at)
    if rules.logit_soft_cap is not None:
        scores = rules.logit_soft_cap * jnp.tanh(scores / rules.logit_soft_cap)
    seen = masks.visible(rules, problem.tree, tile, q_rows, keys)
    by_row = (q.shape[0], kv_heads, -1, group if seen.shape[1] > 1 else q.shape[2], config.block_kv)
    scores = jnp.where(seen[:, None, :, None, :], scores.reshape(by_row), -jnp.inf).reshape(scores.shape)
    weights, decay, top, total = softmax.weigh(carry, lax.optimization_barrier(scores))
    weights = lax.optimization_barrier(weights)  # else exp is computed once for the sum and once for the values
    if stored.v_scale is not None:
        weights = weights * _scale(1.0, stored.v_scale, at)
    return Carry(top, total, carry.acc * decay[..., None] + _weighted(weights, v, q.dtype, config))


def _scale(factor: float, scale, at):
    # f32 that broadcasts to [lanes, kv_heads, m, keys]
    if scale is None or scale.ndim == 0:
        return jnp.float32(factor) if scale is None else jnp.float32(factor) * scale
    return jnp.float32(factor) * jnp.swapaxes(rows.take(scale, at), 1, 2)[:, :, None, :]


def _products(q, k, config: Config):
    # q [lanes, kv_heads, m, k_dim] . k [lanes, keys, kv_heads, k_dim] -> f32 [lanes, kv_heads, m, keys]
    if config.form == "reduce":
        q, k = q.astype(jnp.float32), k.astype(jnp.float32)
        by_key = lax.optimization_barrier(jnp.sum(q[:, None] * k[:, :, :, None], axis=-1))
        return jnp.transpose(by_key, (0, 2, 3, 1))  # keys innermost, so that exp runs over them in full vectors
    kind, exact = _product_type(q.dtype, k.dtype)
    return lax.dot_general(
        q.astype(kind),
        jnp.swapaxes(k, 1, 2).astype(kind),
        (((3,), (3,)), ((0, 1), (0, 1))),
        precision=exact,
        preferred_element_type=jnp.float32,
    )


def _weighted(weights, v, q_type, config: Config):
    # weights f32 [lanes, kv_heads, m, keys] . v [lanes, keys, kv_heads, v_dim] -> f32 [lanes, kv_heads, m, v_dim]
    if config.form == "reduce":
        return jnp.sum(jnp.transpose(weights, (0, 3, 1, 2))[..., None] * v.astype(jnp.float32)[:, :, :, None], axis=1)
    kind, exact = _product_type(q_type, v.dtype)
    return lax.dot_general(
        weights.astype(kind),
        jnp.swapaxes(v, 1, 2).astype(kind),
        (((3,), (2,)), ((0, 1), (0, 1))),
        precision=exact,
        preferred_element_type=jnp.float32,
    )


def _product_type(query, stored):
    # fp8 and int8 fit exactly in any 16-bit float that queries have (e5m2 and e4m3 in float16, int8 in bfloat16)
    kind = query if stored.itemsize == 1 or stored == query else jnp.dtype(jnp.float32)  # float32 holds any mix
    return kind, lax.Precision.HIGHEST if kind == jnp.float32 else None


def _finish(problem: Problem, config: Config, carry: Carry):
    # -> out f32 [lanes, block_q, q_heads, v_dim], lse f32 [lanes, block_q, q_heads]
    kv_heads, group = problem.heads
    sinks = problem.sinks
    if sinks is not None:
        sinks = jnp.tile(sinks.astype(jnp.float32).reshape(1, kv_heads, group), (1, 1, config.block_q))
    out, lse = softmax.finish(carry, sinks)

    def by_query(x):
        x = x.reshape(x.shape[0], kv_heads, config.block_q, group, *x.shape[3:])
        return jnp.swapaxes(x, 1, 2).reshape(x.shape[0], config.block_q, kv_heads * group, *x.shape[4:])

    return by_query(out), by_query(lse)
