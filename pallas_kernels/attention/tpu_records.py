"""What the programs of the TPU attention share: what is static, what memory they have, and what a work item is."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels._common.masks import Rules
from pallas_kernels._common.tpu_rows import LatentBytes, LatentRow, Row
from pallas_kernels.attention.tpu_config import Config

LOG2E = math.log2(math.e)
FIELDS = ("seq", "rows", "first", "low", "high", "begin", "end", "tree_start", "row")
"""What a work item is, as int32 in scalar memory: request, query tokens, sequence index of the first, keys that any of
them may see, blocks to go through, where tree nodes begin, and the packed row of the first."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Static:
    """What is static about a call."""

    config: Config
    rules: Rules
    row: Row
    group: int
    rows: int  # of a product
    page_size: int
    block_kv: int  # keys of a block in whole registers of lanes
    blocks: int  # of a request's table
    table_chunk: int  # page ids fetched at once
    table_chunks: int  # of a request
    tree_words: int  # of tree bits a query, 0 without a tree
    sinks: bool
    compute: Any  # dtype of the products
    kind: Any  # dtype of keys and values in `Refs.kv`
    words: bool  # whether pages hold 32-bit words, a token a tile row
    writes: bool  # whether the call's own keys are put into the pages, too

    @property
    def tiles(self) -> int:
        """Groups of KV heads that share products."""
        return self.row.kv_heads // self.config.heads

    @property
    def held(self) -> Any:
        """Dtype of `Refs.kv`: bytes where a row holds more than one kind of number."""
        return jnp.dtype(jnp.int8) if self.row.scales else self.kind

    @property
    def arriving(self) -> Any:
        """Dtype of the rows of a page."""
        return self.row.held_dtype(self.kind)

    @property
    def latent(self) -> LatentBytes | None:
        """How pages hold latents in 8 bits, where they do."""
        return self.row.packed if isinstance(self.row, LatentRow) else None

    @property
    def step(self) -> int:
        """Rows of a page that fill registers: 8 words of entries."""
        return 32 // self.arriving.itemsize

    @property
    def keys(self) -> int:
        """Keys of a block."""
        return self.config.block_pages * self.page_size

    @property
    def precision(self):
        """float32 is multiplied as such."""
        return lax.Precision.HIGHEST if self.compute == jnp.float32 else None


class Refs(NamedTuple):
    """All memory of a program, in the order of the call's operands, results and scratch."""

    items: Any  # smem i32[fields * items]
    counts: Any  # smem i32[2]: busy items, page offset
    scales: Any  # smem f32[2]: of keys and values
    slots: Any  # smem i32[tokens]: the row of the pool that each new key goes to, -1 for none; None: nothing is written
    table: Any  # hbm i32[seqs * chunks, 1, table_chunk]
    q: Any  # hbm [items, tiles, rows, wide_k]
    pool: Any  # hbm [pages, page_size, lanes], or i32[pages, page_size, tiles, 1, 128]; the result, where it is one
    fresh: Any  # hbm [tokens, 1, lanes] or i32[tokens, tiles, 1, 128]: new rows as pages hold them; None without
    bits: Any  # hbm i32[items, block_q, lanes]: tree bits, then the query's position; None without a tree
    sinks: Any  # vmem f32[tiles, rows, 128], None without
    places: Any  # hbm i32[items, 1, node_keys]: positions of keys from the first block with nodes on; None: no window
    out: Any  # hbm [items, tiles, rows, wide_v]
    lse: Any  # hbm f32[items, tiles, rows, 128]
    written: Any  # hbm: the pool again, None where nothing is written
    table_smem: Any
    token_scales: Any  # vmem f32[heads, block_kv]: of keys, then of values; None for one for all
    kv: Any  # vmem [3, block_kv, lanes]; [1, ...] where blocks arrive in another form
    kv_bytes: Any  # vmem int8[3, block_kv, lanes]: latents in 8 bits; None without
    kv_words: Any  # vmem i32[3, block_kv, tiles, 1, 128], None without words
    fresh_vmem: Any  # vmem [2, block_q, ...]: rows of `fresh`
    stage: Any  # vmem [2, groups, ...]: rows on their way to the pool
    staged: Any  # smem i32[2, 2]: copies of those that were not waited for, and groups that were filled
    q_vmem: Any  # vmem [2, tiles, rows, wide_k]
    bits_vmem: Any  # vmem i32[2, block_q, lanes]
    places_vmem: Any  # vmem i32[2, 1, node_keys]
    raw: Any  # vmem f32[rows, keys of a part]: scores made ahead; None where none are
    top: Any  # vmem f32[tiles, rows, 128], every lane alike
    total: Any  # vmem f32[tiles, rows, 128], sums of each lane
    acc: Any  # vmem f32[tiles, rows, wide_v]
    out_vmem: Any  # vmem [2, tiles, rows, wide_v]
    lse_vmem: Any
    table_sem: Any
    kv_sem: Any
    q_sem: Any
    stage_sem: Any
    bits_sem: Any
    out_sem: Any
    core: Any  # this program's number


class Item(NamedTuple):
    """One work item's scalars."""

    seq: Any
    rows: Any
    first: Any
    low: Any
    high: Any
    begin: Any
    end: Any
    tree_start: Any
    row: Any
