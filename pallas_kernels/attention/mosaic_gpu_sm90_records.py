"""What a program of the Hopper attention is compiled for, what it is given, and the shared memory it takes."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common.masks import Rules
from pallas_kernels.attention import mosaic_gpu_sm90_copy as copies
from pallas_kernels.attention.mosaic_gpu_sm90_config import Config

PART_PAD = 8  # so that rows of a part start in different banks


class Static(NamedTuple):
    """What a program is compiled for."""

    config: Config
    rules: Rules
    group: int
    kv_heads: int
    k_dim: int
    v_dim: int
    page_size: int
    block_q: int
    num_tokens: int
    max_q_len: int
    words: int  # of a tree's bits a row; 0 without a tree
    sinks: bool
    dtype: Any  # of queries
    narrow: Any  # 8-bit float of the pages, which hold its bits; None: pages are of `dtype`
    interpret: bool

    @property
    def operand(self) -> Any:
        """Dtype of what products multiply: float16 for 8-bit pages, whose values it holds exactly."""
        return self.dtype if self.narrow is None else jnp.float16

    @property
    def wide(self) -> bool:
        """Whether heads are so wide that no registers are left to load ahead, or to keep what is needed late."""
        return max(self.k_dim, self.v_dim) > 128

    @property
    def q_in_smem(self) -> bool:
        """Whether queries are kept in shared memory: the interpreter asks for it, or registers are short."""
        return self.interpret or self.k_dim > 128 or self.config.block_kv > 64

    @property
    def looks_ahead(self) -> bool:
        """Whether the next block's scores are made beside this one's weights, as far as registers go."""
        return not self.wide and self.config.block_kv == 64

    @property
    def defers(self) -> bool:
        """Whether a block's values are multiplied beside the next block's weights."""
        return not self.interpret and not self.looks_ahead and self.config.groups > 1


class Arrays(NamedTuple):
    """References in device memory; None where a call has none."""

    items: Any
    unserved: Any
    cu_q_lens: Any
    page_table: Any
    page_offset: Any  # i32[1]
    q: Any  # [tokens * q_heads, k_dim]
    k: Any  # [pages, page_size, kv_heads, k_dim]
    v: Any
    bits: Any  # u32[tiles, words, rows]
    low: Any  # i32[tiles, rows]
    sinks: Any  # f32[q_heads]
    k_scale: Any  # f32[1]
    v_scale: Any  # f32[1]
    out: Any  # [tokens * q_heads, v_dim]
    lse: Any  # f32[tokens * q_heads]
    parts: Any  # f32[items * kv_heads * block_q * group, v_dim], of tiles in several parts
    part_lse: Any  # f32[items * kv_heads * block_q * group]


class Item(NamedTuple):
    """One program's part of the schedule, as scalars; see `mosaic_gpu_sm90_schedule`."""

    seq: Any
    row: Any
    tokens: Any
    first: Any
    begin: Any
    end: Any
    kv_len: Any
    low: Any
    high: Any
    tile: Any
    parts: Any


def scratch(static: Static) -> dict:
    """Shared memory and barriers of a program."""
    config, dtype = static.config, static.operand
    full = copies.barriers(2 * config.stages)  # of keys, then of values: each array takes a KiB at least
    if static.interpret:
        arrivals = copies.arrivals(config.block_kv, static.page_size)
        full = plgpu.Barrier(num_arrivals=arrivals, num_barriers=2 * config.stages)
    refs: dict[str, Any] = dict(full=full)
    for name, dim in (("k", static.k_dim), ("v", static.v_dim)):
        ring = (config.stages, config.block_kv, dim)
        refs[f"{name}_ring"] = copies.tiled(ring, dtype) if static.narrow is None else plgpu.SMEM(ring, jnp.uint8)
        if static.narrow is not None:
            refs[f"{name}_wide"] = copies.tiled(ring[1:], dtype)
    if config.copies_apart:
        free: Any = plgpu.Barrier(num_arrivals=config.groups, num_barriers=config.stages)
        if config.sharers > 1:  # each program's copies go to all
            axes = ("sharers",)
            free = plgpu.ClusterBarrier(collective_axes=axes, num_arrivals=config.groups, num_barriers=config.stages)
        refs |= dict(k_free=free, v_free=free)
    if static.words:
        refs["bits"] = plgpu.SMEM((static.words, config.own_rows), jnp.uint32)
        refs["tree_full"] = plgpu.Barrier(num_arrivals=1 if static.rules.sliding_window is None else 2)
        if static.rules.sliding_window is not None:
            refs["low"] = plgpu.SMEM((config.own_rows,), jnp.int32)
    if static.q_in_smem:
        refs["q_tile"] = copies.tiled((config.groups, 64, static.k_dim), dtype)
        if dtype != static.dtype:
            refs["scale"] = plgpu.SMEM((64,), jnp.float32)  # 8-bit pages have one warpgroup
    if config.cluster > 1:
        rows = min(static.block_q * static.group, config.rows)
        refs["part"] = plgpu.SMEM((rows, static.v_dim + PART_PAD), jnp.float32)
        refs["part_lse"] = plgpu.SMEM((rows,), jnp.float32)
    if static.interpret:
        refs["weights"] = copies.tiled((config.groups, 64, config.block_kv), dtype)
    return refs
