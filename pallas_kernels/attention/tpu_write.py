"""Write and attend on TPU: in one kernel for a decode or a verification, one after the other elsewhere."""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._common.rows import of_slots
from pallas_kernels.attention import tpu
from pallas_kernels.kv_write import tpu as kv_write

_OF_ROWS = ("k_scale", "v_scale", "kv_dtype", "token_scales")
_OF_SIZES = ("kv_heads", "v_dim", "token_scales", "kv_dtype", "max_q_len", "tree_bits", "config", "device", "vmem")


def write_attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_pages: jax.Array,
    v_pages: None = None,
    *,
    slots: jax.Array,
    num_pages: int | None = None,
    page_offset: jax.Array | int = 0,
    **more: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Store a step's keys and values, then attend over the pages.

    The kernel does both where every request has at most `tpu.MAX_WRITTEN` rows, all of them in one tile: blocks then
    have one reader, which lays the new keys over the block that it has fetched and sends those rows back to the pool.
    With more rows a block has several readers, on two cores at times, none of whom could wait for the writer: XLA
    writes first.

    Args: q, k_pages, page_offset, more: as in `attention.tpu.paged_attention`. k, v, slots, num_pages: as in
      `kv_write.tpu.write_kv`; a row of a request whose slot is not -1 must have the slot that the page table gives to
      its place in the sequence.
    Returns: out, lse, and the pool.
    """
    rows = kv_write.as_rows(k_pages, k, v, **{name: more[name] for name in _OF_ROWS if name in more})
    call = functools.partial(tpu.paged_attention, **more)
    configs = tpu.configs_of(q, k_pages, writes=True, **{name: more[name] for name in _OF_SIZES if name in more})
    where = page_offset, num_pages
    return together(call, q, k_pages, rows, slots, *where, fused=tpu.can_write(configs, more["max_q_len"]))


def together(
    attend: Callable,
    q: jax.Array,
    pool: jax.Array,
    rows: jax.Array,
    slots: jax.Array,
    page_offset: jax.Array | int,
    num_pages: int | None,
    *,
    fused: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`attend(q, pool, ...)` once `rows` are in the pool. Args: fused: whether `attend` puts them there itself."""
    at, held = of_slots(pool, slots, page_offset, num_pages)
    if fused:
        return attend(q, pool, page_offset=page_offset, fresh=tpu.Fresh(rows, jnp.where(held, at, -1)))
    pool = kv_write.put(pool, rows, at, held)
    out, lse = attend(q, pool, page_offset=page_offset)
    return out, lse, pool
