"""Merge the parts of split requests on Hopper: one program takes a few rows of a tile over all of its parts.

A thread keeps the same elements of every part, and loads the log-sum of their row itself: nothing is exchanged, and the
loads of several parts are in flight. Source: https://pytorch.org/blog/flash-decoding/ (reduction).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import mosaic_gpu_sm90_copy as copies
from pallas_kernels.attention import mosaic_gpu_sm90_parts as parts_io
from pallas_kernels.attention import mosaic_gpu_sm90_rows as rows_io
from pallas_kernels.attention.mosaic_gpu_sm90_rows import Rows

_ELEMENTS = 64  # elements a thread has in flight, of some rows and parts
_MOST = 128  # of some parts of few rows
_PROGRAMS = 528  # at most: four an SM; a program that finds nothing to do costs its launch


class Shape(NamedTuple):
    """What a merge is compiled for."""

    kv_heads: int
    group: int
    rows: int  # rows stored a part and KV head
    v_dim: int
    sinks: bool


def merge(out, lse, parts, part_lse, tiles, sinks, shape: Shape) -> tuple[jax.Array, jax.Array]:
    """out [tokens * q_heads, v_dim] and lse f32[tokens * q_heads] with the rows of tiles in several parts filled in.

    Args: out, lse: the other tiles' rows; updated in place. parts: f32[items * kv_heads * rows, v_dim], normalised.
      part_lse: f32[items * kv_heads * rows], natural log. tiles: i32[n, 4], of `mosaic_gpu_sm90_schedule`.
      sinks: f32[q_heads] or None.
    """
    expected = parts.shape[0] // (shape.kv_heads * shape.rows * tiles.shape[0])  # parts a tile, more or less
    chunk = parts_io.strided_rows(shape.v_dim)
    at_once = min(max(pl.next_power_of_2(expected), 4), 32)  # more than there are would be loaded in vain
    chunk = min(chunk * max(_ELEMENTS // (chunk * shape.v_dim // 128 * at_once), 1), 64)
    chunks = min(-(-shape.rows // chunk), max(_PROGRAMS // (tiles.shape[0] * shape.kv_heads), 1))
    launch = pl.kernel(
        functools.partial(_kernel, shape=shape, chunk=chunk, chunks=chunks, at_once=at_once),
        out_type=(),
        mesh=plgpu.Mesh(grid=(tiles.shape[0], chunks, shape.kv_heads), grid_names=("tiles", "chunks", "kv_heads")),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        cost_estimate=pl.CostEstimate(
            flops=2 * parts.size, bytes_accessed=4 * (parts.size + part_lse.size), transcendentals=parts.size
        ),
        name="jattn_attention_merge",
    )
    refs = jax.new_ref(out), jax.new_ref(lse)
    launch(parts, part_lse, tiles, *(() if sinks is None else (sinks,)), *refs)  # pyright: ignore[reportCallIssue]
    return jax.freeze(refs[0]), jax.freeze(refs[1])


def _kernel(parts, part_lse, tiles, *rest, shape: Shape, chunk: int, chunks: int, at_once: int):
    sinks, out, lse = rest if shape.sinks else (None, *rest)
    tile, head = lax.axis_index("tiles"), lax.axis_index("kv_heads")
    row, tokens, first, count = rows_io.load_scalars(tiles, tile, 4)
    used = tokens * shape.group

    def rows_from(i, _):
        start, size = i * chunk, (chunk, shape.v_dim)
        fetch = _fetched(parts, part_lse, first, count, used, start, head, shape, size)
        out_rows, out_lse = _merged(fetch, count, sinks, used, start, head, shape.group, size, at_once)
        where = Rows(row, head * shape.group, used, shape.group, shape.kv_heads * shape.group)
        parts_io.store_strided(out, out_rows.astype(out.dtype), where, start=start)
        parts_io.store_strided(lse, out_lse, where, start=start, one_a_row=True)

    @pl.when(count > 1)
    def _():
        mine, all_chunks = lax.axis_index("chunks"), (used + (chunk - 1)) // chunk
        lax.fori_loop(
            0, (all_chunks - mine + (chunks - 1)) // chunks, lambda i, _: rows_from(mine + i * chunks, _), None
        )


def in_cluster(static, arrays, smem: dict, head, start, q_rows: Rows, out, lse) -> None:
    """Merge a cluster's parts of a tile into rows of `arrays.out` and `arrays.lse`: each warpgroup takes some rows.

    Args: out: f32[64, v_dim], this warpgroup's part, normalised. lse: f32[64], natural log. start: its first tile row.
    """
    config, size = static.config, (parts_io.strided_rows(static.v_dim), static.v_dim)
    parts_io.store_part(smem["part"], smem["part_lse"], out, lse, used=q_rows.used, start=start)
    copies.cluster_barrier()
    worker = lax.axis_index("parts") * config.groups
    if config.copies_apart:
        worker = worker + lax.axis_index("warpgroups")
    workers, chunks = config.cluster * config.groups, (q_rows.used + (size[0] - 1)) // size[0]

    def rows_from(i, _):
        begin = (worker + i * workers) * size[0]

        def fetch(part):
            return parts_io.load_part(smem["part"], smem["part_lse"], part, q_rows.used, begin, size)

        merged, merged_lse = _merged(fetch, config.cluster, arrays.sinks, q_rows.used, begin, head, static.group, size)
        parts_io.store_strided(arrays.out, merged.astype(arrays.out.dtype), q_rows, start=begin)
        parts_io.store_strided(arrays.lse, merged_lse, q_rows, start=begin, one_a_row=True)

    lax.fori_loop(0, (chunks - worker + (workers - 1)) // workers, rows_from, None)
    copies.cluster_barrier(reads=False)  # nobody ends while another reads its memory


def _fetched(parts, part_lse, first, count, used, start, head, shape: Shape, size):
    # the way to a part's rows in device memory
    def fetch(part):
        at = (first + jnp.minimum(part, count - 1)) * shape.kv_heads + head
        where = Rows(jnp.int32(0), at * shape.rows, used, shape.rows, 0)
        logs = parts_io.load_strided(part_lse, where, shape=size, start=start, one_a_row=True)
        hidden = jnp.where(part < count, jnp.float32(0), jnp.float32(-jnp.inf))  # repeats of the last part
        return logs + hidden, parts_io.load_strided(parts, where, shape=size, start=start)

    return fetch


def _merged(fetch, count, sinks, used, start, head, group: int, size, at_once: int = 0):
    # rows `start` and on of a tile over all its parts, `at_once` of them together where their number is not static
    known = isinstance(count, int)
    unrolled = min(max(2, (_ELEMENTS if known else _MOST) // (size[0] * size[1] // 128)), count if known else at_once)

    def step(i, carry):
        top, total, acc = carry
        fetched = [fetch(i * unrolled + j) for j in range(unrolled)]
        new = functools.reduce(jnp.maximum, [logs for logs, _ in fetched], top)
        safe = jnp.where(new == -jnp.inf, 0.0, new)
        decay = jnp.exp(top - safe)
        total, acc = total * decay, acc * decay
        for logs, values in fetched:
            weight = jnp.exp(logs - safe)
            total, acc = total + weight, acc + weight * values
        return new, total, acc

    layout = parts_io.strided(size)
    carry = tuple(plgpu.layout_cast(jnp.full(size, x, jnp.float32), layout) for x in (-jnp.inf, 0.0, 0.0))
    top, total, acc = lax.fori_loop(0, (count + (unrolled - 1)) // unrolled, step, carry)
    seen = total > 0
    some = jnp.where(seen, total, 1.0)
    lse = jnp.where(seen, top + jnp.log(some), -jnp.inf)
    if sinks is None:
        return acc * jnp.where(seen, 1.0 / some, 0.0), lse
    per_row = Rows(jnp.int32(0), head * group, used, group, 0)
    sink = parts_io.load_strided(sinks, per_row, shape=size, start=start, one_a_row=True)
    high = jnp.maximum(top, sink)
    decay = jnp.where(seen, jnp.exp(top - high), 0.0)
    return acc * (decay / (total * decay + jnp.exp(sink - high))), lse


def merge_plain(out, lse, parts, part_lse, tiles, sinks, shape: Shape) -> tuple[jax.Array, jax.Array]:
    """The same in plain JAX, for where the kernel is interpreted."""
    items = parts.shape[0] // (shape.kv_heads * shape.rows)
    size = (items, shape.kv_heads, shape.rows)
    row, tokens, first, count = tiles.T
    item = jnp.arange(items, dtype=jnp.int32)
    mine = (item[None] >= first[:, None]) & (item[None] < (first + count)[:, None])
    logs = jnp.where(mine[..., None, None], part_lse.reshape(size)[None], -jnp.inf)  # [tiles, items, kv_heads, rows]
    top = jnp.max(logs, axis=1)
    safe = jnp.where(top == -jnp.inf, 0.0, top)
    weights = jnp.exp(logs - safe[:, None])
    values = jnp.where(weights[..., None] > 0, parts.reshape(*size, shape.v_dim)[None], 0.0)
    total = jnp.sum(weights, axis=1)
    seen = total > 0
    merged_lse = jnp.where(seen, safe + jnp.log(jnp.where(seen, total, 1.0)), -jnp.inf)
    scale = jnp.where(seen, 1.0 / jnp.where(seen, total, 1.0), 0.0)
    used = jnp.arange(shape.rows, dtype=jnp.int32)
    head = jnp.arange(shape.kv_heads, dtype=jnp.int32)[:, None] * shape.group + (used % shape.group)[None]
    if sinks is not None:
        scale = jnp.where(seen, scale / (1.0 + jnp.exp(sinks[head][None] - merged_lse)), 0.0)
    merged = jnp.sum(weights[..., None] * values, axis=1) * scale[..., None]
    token = row[:, None] + (used // shape.group)[None]
    at = token[:, None, :] * (shape.kv_heads * shape.group) + head[None]
    mine = ((used // shape.group)[None] < tokens[:, None]) & (count > 1)[:, None]
    at = jnp.where(mine[:, None, :], at, out.shape[0])  # dropped
    return out.at[at].set(merged.astype(out.dtype), mode="drop"), lse.at[at].set(merged_lse, mode="drop")
