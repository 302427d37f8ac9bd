"""What a program of the Hopper latent attention is compiled for, what it is given, and the shared memory it takes."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common.masks import Rules
from pallas_kernels.attention import mosaic_gpu_sm90_copy as copies
from pallas_kernels.attention.mosaic_gpu_sm90_prefill_records import THREADS, Barrier
from pallas_kernels.mla.mosaic_gpu_sm90_config import Config

HALVES = ("left", "right")
"""A row's columns in two: the left half of the values, and the right half with the rotated key behind it."""


class Static(NamedTuple):
    """What a program is compiled for."""

    config: Config
    rules: Rules
    group: int  # query heads
    k_dim: int
    v_dim: int
    page_size: int
    block_q: int
    num_tokens: int
    max_q_len: int
    words: int  # of a tree's bits a row; 0 without a tree
    dtype: Any
    packed: bool  # whether rows are 8-bit with scales, as bytes
    interpret: bool

    @property
    def widths(self) -> tuple[int, int]:
        """Columns of the two halves."""
        return self.v_dim // 2, self.k_dim - self.v_dim // 2

    @property
    def most_rows(self) -> int:
        """Rows of a program's 64 that any request has."""
        return min(self.block_q * self.group, 64)

    @property
    def swizzle(self) -> int:
        """Swizzle in bytes of all that products read: they want operands alike."""
        return min(copies.swizzle_bytes(width, 2) for width in self.widths)

    @property
    def gathers(self) -> bool:
        """Whether threads copy keys, and not the engine: pages smaller than a swizzle's 8 rows."""
        return self.page_size < 8 and not self.packed

    @property
    def together(self) -> bool:
        """Whether the sharers of a tile are a cluster, whose copies go to all of them."""
        whole = self.page_size >= 16 and not self.packed  # two swizzles' rows: a copy is cut by rows, a half to each
        return self.config.sharers > 1 and whole and not self.interpret

    @property
    def pages(self) -> int:
        """Page ids that the copy of a block wants."""
        return 0 if self.gathers or self.packed else max(self.config.block_kv // self.page_size, 1)

    @property
    def ahead(self) -> int:
        """Blocks that are asked for before there is room: of one page each, as registers of the copying are short."""
        return self.config.ahead if self.together and self.pages == 1 else 0

    @property
    def weight_places(self) -> int:
        """Blocks of weights in shared memory. The interpreter reads a warpgroup's own from there, too."""
        return 2 if self.interpret else 1


class Arrays(NamedTuple):
    """References in device memory; None where a call has none."""

    items: Any
    unserved: Any
    cu_q_lens: Any
    page_table: Any  # i32[seqs, max_pages]
    page_offset: Any  # i32[1]
    q: Any  # [tokens * heads, k_dim]
    pages: Any  # [pages, page_size, k_dim], or u8 of packed rows
    bits: Any  # u32[tiles * words * rows]
    out: Any  # [tokens * heads, v_dim]
    lse: Any  # f32[tokens * heads]
    parts: Any  # f32[items * block_q * heads, v_dim], of tiles in several parts
    part_lse: Any  # f32[items * block_q * heads]


def barrier_counts(static: Static) -> dict[str, tuple[int, int]]:
    """Name -> barriers, and arrivals that complete a phase of each.

    left_full, right_full: a half of a block is there. left_free, right_free: all programs that read it are done.
    given: a warpgroup's weights and reference are there for the other. queries, totals: of both warpgroups.
    """
    stages = static.config.stages
    copied = THREADS if static.gathers or static.packed else 1
    if static.interpret:
        copied = 1 if static.packed else copies.arrivals(static.config.block_kv, static.page_size)
    counts = {f"{half}_full": (stages, copied) for half in HALVES}
    counts |= {f"{half}_free": (stages, static.config.sharers if static.together else 1) for half in HALVES}
    return counts | dict(given=(2, 1), queries=(1, 2), totals=(1, 2))


def scratch(static: Static) -> dict:
    """Shared memory of a program."""
    config, kind = static.config, (static.dtype, static.swizzle)
    refs: dict[str, Any] = dict(weights=copies.tiled((static.weight_places, 64, config.block_kv), *kind))
    for half, width in zip(HALVES, static.widths, strict=True):
        refs[f"{half}_q"] = copies.tiled((1, 64, width), *kind)
        refs[half] = copies.tiled((config.stages, config.block_kv, width), *kind)
    refs["rows"] = plgpu.SMEM((4, 64), jnp.float32)  # references, then totals, of each warpgroup
    counts = barrier_counts(static)
    if static.interpret:
        refs["sums"] = plgpu.SMEM((2, 64, static.widths[0]), jnp.float32)
        return refs | {
            name: plgpu.Barrier(num_arrivals=arrivals, num_barriers=count) for name, (count, arrivals) in counts.items()
        }
    return refs | dict(words=plgpu.SMEM((2 * sum(count for count, _ in counts.values()),), jnp.int32))


def with_barriers(static: Static, smem: dict) -> dict:
    """Shared memory of a program with its barriers by name; each array starts a KiB, so they share one."""
    if static.interpret:
        return smem
    first, named = 0, {}
    for name, (count, arrivals) in barrier_counts(static).items():
        named[name] = Barrier(smem["words"], first, count, arrivals)
        first += count
    return smem | named
