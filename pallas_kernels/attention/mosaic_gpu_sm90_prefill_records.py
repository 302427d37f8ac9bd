"""What a program of the Hopper prefill is compiled for, what it is given, and the shared memory it takes."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common.masks import Rules
from pallas_kernels.attention import mosaic_gpu_sm90_copy as copies
from pallas_kernels.attention.mosaic_gpu_sm90_prefill_config import WIDE_STAGES, Config


class Static(NamedTuple):
    """What a program is compiled for."""

    config: Config
    rules: Rules
    group: int
    kv_heads: int
    k_dim: int
    v_dim: int
    page_size: int | None  # None: keys are packed, without pages
    programs: int
    sinks: bool
    dtype: Any  # of queries, and of both products' operands
    narrow: Any  # 8-bit float of the keys and values, which hold its bits; None: they are of `dtype`

    @property
    def gathers(self) -> bool:
        """Whether threads copy keys and values, and not the engine: pages smaller than a swizzle's 8 rows."""
        return self.page_size is not None and self.page_size < 8

    @property
    def gathers_some(self) -> bool:
        """Whether threads copy where a request's first row is no multiple of 8: the engine fills whole swizzles."""
        return self.page_size is None and self.narrow is None


class Arrays(NamedTuple):
    """References in device memory; None where a call has none."""

    tiles: Any
    counts: Any
    page_table: Any  # i32[seqs, max_pages]
    page_offset: Any  # i32[1]
    q: Any  # [tokens * q_heads, k_dim]
    k: Any  # [pages, page_size, kv_heads, k_dim], or packed [kv_tokens, kv_heads, k_dim]
    v: Any
    sinks: Any  # f32[q_heads]
    k_scale: Any  # f32[1]
    v_scale: Any  # f32[1]
    out: Any  # [tokens * q_heads, v_dim]
    lse: Any  # f32[tokens * q_heads]


class Tile(NamedTuple):
    """One tile of the schedule, as scalars; see `mosaic_gpu_sm90_prefill_schedule`. `head` is a KV head."""

    seq: Any
    row: Any
    tokens: Any
    first: Any
    begin: Any
    blocks: Any
    kv_len: Any
    low: Any
    high: Any
    kv_row: Any
    head: Any


FIELDS = len(Tile._fields)
THREADS = 128
"""Threads a warpgroup."""


TILE_WORDS = 16
"""Room for a tile's record in shared memory."""


class Barrier(NamedTuple):
    """Barriers of one kind, a place of 8 bytes each in the shared words of a program."""

    words: Any
    first: int
    places: int
    arrivals: int  # that complete a phase


def _barrier_counts(static: Static) -> dict[str, tuple[int, int]]:
    # name -> barriers, and arrivals that complete a phase of each
    groups, gathered = static.config.groups, THREADS if static.gathers else 1
    gathered = THREADS + 1 if static.gathers_some else gathered
    counts = dict(q_full=(static.config.q_stages, THREADS + 1), q_free=(static.config.q_stages, groups))
    for name in ("k", "v"):
        stages = static.config.stages
        if static.narrow is not None:
            counts[f"{name}_bits_full"] = (stages, gathered)
            gathered_, stages = 1, WIDE_STAGES
        else:
            gathered_ = gathered
        counts |= {f"{name}_full": (stages, gathered_), f"{name}_free": (stages, groups)}
    return counts


def scratch(static: Static) -> dict:
    """Shared memory of a program. Each array starts a kilobyte, so a tile's record and all barriers share one."""
    config, dtype = static.config, static.dtype
    refs: dict[str, Any] = dict(q=copies.tiled((config.q_stages * config.groups, 64, static.k_dim), dtype))
    for name, dim in (("k", static.k_dim), ("v", static.v_dim)):
        ring = (config.stages, config.block_kv, dim)
        if static.narrow is None:
            refs[name] = copies.tiled(ring, dtype)
        else:
            refs[f"{name}_bits"] = plgpu.SMEM(ring, jnp.uint8)
            refs[name] = copies.tiled((WIDE_STAGES, *ring[1:]), dtype)
    barriers = sum(count for count, _ in _barrier_counts(static).values())
    return refs | dict(words=plgpu.SMEM((config.q_stages * TILE_WORDS + 2 * barriers,), jnp.int32))


def with_barriers(static: Static, smem: dict) -> dict:
    """Shared memory of a program with its barriers by name."""
    place, named = static.config.q_stages * TILE_WORDS // 2, {}
    for name, (count, arrivals) in _barrier_counts(static).items():
        named[name] = Barrier(smem["words"], place, count, arrivals)
        place += count
    return smem | named
