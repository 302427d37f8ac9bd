"""Attention of packed queries over paged or packed keys, in plain JAX: blocked, with memory linear in length.

Source: arXiv:2205.14135, algorithm 1 (online softmax); arXiv:2309.06180 (paging).
"""

import jax

from pallas_kernels._common import masks, rows
from pallas_kernels._common.masks import Rules, Tree
from pallas_kernels._common.rows import Stored
from pallas_kernels.attention import blocked
from pallas_kernels.attention.config import Config, heuristic


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    *,
    page_table: jax.Array,
    page_offset: jax.Array | int = 0,
    seq_lens: jax.Array,
    cu_q_lens: jax.Array,
    max_q_len: int,
    sm_scale: float,
    mask: str = "causal",
    logit_soft_cap: float | None = None,
    sliding_window: int | None = None,
    sinks: jax.Array | None = None,
    tree_bits: jax.Array | None = None,
    tree_starts: jax.Array | None = None,
    tree_kv_positions: jax.Array | None = None,
    q_positions: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    kv_dtype: jax.typing.DTypeLike | None = None,
    num_splits: int = 1,
    config: Config | tuple[Config, ...] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of packed queries over pages that already hold their keys.

    Args:
      q: [tokens, q_heads, k_dim]; rows cu_q_lens[b] to cu_q_lens[b + 1] are the last tokens of request b, the rest
        padding. Query head h reads KV head h // (q_heads // kv_heads).
      k_pages, v_pages: [pages_total, page_size, kv_heads, k_dim | v_dim], all layers; float, fp8, int8, or
        uint8 that holds the bits of fp8 (what to use on a CPU, see `_common/float8.py`).
      page_table: i32[seqs, max_pages], page ids of one layer; entries past cdiv(seq_len, page_size) are never used.
      page_offset: i32 added to every page id (layer * pages a layer); may be traced.
      seq_lens: i32[seqs], keys of each request, this step's included; 0 for a padding request.
      cu_q_lens: i32[seqs + 1], first entry 0.
      max_q_len: static bound on the query rows of a request; a request with more rows is not attended at all.
      mask: "causal" (the last query lines up with the last key), "full" (every key of the request) or "tree".
      logit_soft_cap: s -> cap * tanh(s / cap), after scaling and before the mask.
      sliding_window: keys seen, the query's own included.
      sinks: f32[q_heads], one more logit in the denominator of `out`, neither scaled nor capped.
      tree_bits: u32[tokens, words]. With mask "tree", keys before tree_starts (i32[seqs]) are visible to every query
        and key tree_starts + j iff bit j of the query's row is set; there may be more nodes than queries.
      tree_kv_positions, q_positions: i32[seqs, max_nodes], i32[tokens]; a window in a tree counts positions.
      k_scale, v_scale: stored value * scale is the value. None, f32 scalar, or f32[pages_total, page_size, kv_heads].
      kv_dtype: what uint8 pages are the bits of, float8_e4m3fn or float8_e5m2; None for other pages.
      num_splits: parts of the keys attended apart.
      config: sizes; None takes `heuristic`. With several, a request uses the first whose block_q holds its rows.

    Returns:
      out: q.dtype [tokens, q_heads, v_dim], 0 where no key is visible and for padding rows.
      lse: f32[tokens, q_heads], natural log, without sinks; -inf where no key is visible.
      With num_splits > 1: f32 [num_splits, ...] of each, for `merge_states` and then `apply_sinks`.
    Raises: ValueError if shapes disagree, or an option is out of range or does not go with another.

    Scores, softmax and sums are float32; float32 inputs are multiplied as float32, never as TF32 or bfloat16.
    """
    if k_pages.shape[:3] != v_pages.shape[:3]:
        raise ValueError(f"k_pages.shape={k_pages.shape} but v_pages.shape={v_pages.shape}: want equal pages and heads")
    rows.check_paged(k_pages, page_table, seq_lens)
    stored = rows.paged(k_pages, v_pages, k_scale, v_scale, page_table, page_offset, kv_dtype)
    rules = Rules(sm_scale=sm_scale, mask=mask, logit_soft_cap=logit_soft_cap, sliding_window=sliding_window)
    tree = masks.make_tree(rules, q.shape[0], tree_bits, tree_starts, tree_kv_positions, q_positions)
    return attend_stored(q, stored, seq_lens, cu_q_lens, sinks, tree, rules, max_q_len, num_splits, config)


def ragged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    cu_kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    max_q_len: int,
    sm_scale: float,
    mask: str = "causal",
    logit_soft_cap: float | None = None,
    sliding_window: int | None = None,
    sinks: jax.Array | None = None,
    tree_bits: jax.Array | None = None,
    tree_starts: jax.Array | None = None,
    tree_kv_positions: jax.Array | None = None,
    q_positions: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    num_splits: int = 1,
    config: Config | tuple[Config, ...] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of packed queries over keys packed request after request.

    Args:
      k, v: [kv_tokens, kv_heads, k_dim | v_dim]; rows cu_kv_lens[b] to cu_kv_lens[b + 1] are the keys of request b.
      cu_kv_lens: i32[seqs + 1], first entry 0.
      k_scale, v_scale: None, f32 scalar, or f32[kv_tokens, kv_heads].
      The rest as in `paged_attention`, which also says what is returned and raised.
    """
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(f"k.shape={k.shape} but v.shape={v.shape}: want the same tokens and heads")
    stored = rows.packed(k, v, k_scale, v_scale, cu_kv_lens)
    rules = Rules(sm_scale=sm_scale, mask=mask, logit_soft_cap=logit_soft_cap, sliding_window=sliding_window)
    tree = masks.make_tree(rules, q.shape[0], tree_bits, tree_starts, tree_kv_positions, q_positions)
    seq_lens = cu_kv_lens[1:] - cu_kv_lens[:-1]
    return attend_stored(q, stored, seq_lens, cu_q_lens, sinks, tree, rules, max_q_len, num_splits, config)


def attend_stored(
    q: jax.Array,
    stored: Stored,
    seq_lens: jax.Array,
    cu_q_lens: jax.Array,
    sinks: jax.Array | None,
    tree: Tree | None,
    rules: Rules,
    max_q_len: int,
    num_splits: int,
    config: Config | tuple[Config, ...] | None,
) -> tuple[jax.Array, jax.Array]:
    """Attention over rows however they are stored; arguments, results and errors as in `paged_attention`."""
    rows.check_heads(q, stored.kv_heads, stored.k_dim)
    rows.check_lens(seq_lens, cu_q_lens)
    rows.check_splits(num_splits, sinks)
    if config is None:
        config = heuristic(max_q_len=max_q_len, group=q.shape[1] // stored.kv_heads)
    problem = blocked.Problem(q, stored, seq_lens, cu_q_lens, sinks, tree, rules, max_q_len, num_splits)
    return blocked.attend(problem, config if isinstance(config, tuple) else (config,))
