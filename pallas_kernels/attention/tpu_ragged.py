"""Attention over packed keys on TPU: requests are laid out on whole pages, and the paged kernel attends to those.

A copy of keys and values by XLA, where each request begins on a page of its own: blocks are then aligned as the chip's
tiles want them, and one copy brings keys and values of all heads of a group. It moves twice the bytes of the keys,
little beside the products of a prefill.
"""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._common import ints, tiles, tpu_rows
from pallas_kernels.attention import tpu

PAGE = 128  # keys
_LANES = 2560  # of a row at most: of 512 keys of 8 heads of 192 + 128, two blocks take 5 MiB


def ragged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    cu_kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    **more: Any,
) -> tuple[jax.Array, ...]:
    """Attention of packed queries over keys packed request after request; see `pallas_kernels.attention.xla`.

    Args: as there; k_scale, v_scale: None or f32 scalars. more: the rest of there, and config, device and interpret of
      `attention.tpu.paged_attention`.
    Returns, raises: as there; also ValueError for scales a token.
    """
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None and scale.ndim:
            raise ValueError(f"{name}.shape={scale.shape}: the TPU kernel takes a scalar; resolve with prefer=('xla',)")
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(f"k.shape={k.shape} but v.shape={v.shape}: want the same tokens and heads")
    q_heads, kv_heads = q.shape[1], k.shape[1]
    heads = _heads_of_a_group(kv_heads, k.shape[2] + v.shape[2])
    groups = kv_heads // heads
    mine = q_heads // kv_heads * heads
    pool, table = _pages(k, v, cu_kv_lens, groups)
    queries = jnp.moveaxis(q.reshape(q.shape[0], groups, mine, q.shape[2]), 1, 0)
    logits = None if sinks is None else sinks.reshape(groups, mine)

    def attend(group):
        # one kernel for all groups, each over its own pages of one pool
        return tpu.paged_attention(
            ints.pick(queries, group),
            pool,
            page_table=table,
            page_offset=group * (pool.shape[0] // groups),
            seq_lens=cu_kv_lens[1:] - cu_kv_lens[:-1],
            cu_q_lens=cu_q_lens,
            sinks=None if logits is None else ints.pick(logits, group),
            k_scale=k_scale,
            v_scale=v_scale,
            kv_heads=heads,
            v_dim=v.shape[2],
            **more,
        )

    if groups == 1:
        return attend(jnp.zeros((), jnp.int32))
    out, lse = lax.map(attend, jnp.arange(groups, dtype=jnp.int32))
    out, lse = jnp.moveaxis(out, 0, -3), jnp.moveaxis(lse, 0, -2)  # [..., tokens, groups, heads of a group, (v_dim)]
    return out.reshape(*out.shape[:-3], q_heads, out.shape[-1]), lse.reshape(*lse.shape[:-2], q_heads)


def _heads_of_a_group(kv_heads: int, dims: int) -> int:
    # as many as keep a row within _LANES, a divisor of all
    return max((h for h in range(1, kv_heads + 1) if kv_heads % h == 0 and h * dims <= _LANES), default=1)


def _pages(k: jax.Array, v: jax.Array, cu_kv_lens: jax.Array, groups: int) -> tuple[jax.Array, jax.Array]:
    # rows of each group [groups * pages, PAGE, lanes], and i32[seqs, pages] the pages of each request in a group
    tokens, seqs = k.shape[0], cu_kv_lens.shape[0] - 1
    num_pages = tokens // PAGE + seqs  # each request leaves less than a page free
    per_seq = ints.cdiv(cu_kv_lens[1:] - cu_kv_lens[:-1], PAGE)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(per_seq, dtype=jnp.int32)])
    pages = jnp.arange(num_pages, dtype=jnp.int32)
    seq = jnp.minimum(tiles.run_of(starts, pages), seqs - 1)
    first = ints.pick(cu_kv_lens, seq) + (pages - ints.pick(starts, seq)) * PAGE
    token = jnp.clip(first[:, None] + jnp.arange(PAGE, dtype=jnp.int32)[None], 0, tokens - 1)  # past an end: never seen
    split = (x.reshape(tokens, groups, -1, x.shape[2]) for x in (k, v))
    rows = jnp.moveaxis(tpu_rows.pack(*split), 1, 0)  # [groups, tokens, lanes]
    pool = jnp.take(rows, token.reshape(-1), axis=1, mode="clip").reshape(groups * num_pages, PAGE, rows.shape[2])
    table = jnp.minimum(starts[:-1, None] + pages[None], num_pages - 1)
    return pool, table
