"""Attention for GPUs without a kernel set of their own (Ampere, Blackwell, ROCm), through Pallas's Triton lowering.

The lowering is deprecated upstream; this module and `gpu_kernel` are all of attention that uses it.
"""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels._common import float8, masks, partial_states, rows, tiles
from pallas_kernels._common.masks import Rules, Tree
from pallas_kernels.attention.gpu_config import Config, heuristic
from pallas_kernels.attention.gpu_kernel import Arrays, Static, program
from pallas_kernels.merge_states import gpu as merge_gpu
from pallas_kernels.merge_states.xla import apply_sinks

_FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32)


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
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of packed queries over pages that already hold their keys; see `pallas_kernels.attention.xla`.

    Args: as there. config: sizes; None takes `heuristic`. interpret: run on a CPU, step by step.
    Returns, raises: as there; also ValueError for dtypes that do not multiply.
    """
    if k_pages.shape[:3] != v_pages.shape[:3]:
        raise ValueError(f"k_pages.shape={k_pages.shape} but v_pages.shape={v_pages.shape}: want equal pages and heads")
    rows.check_paged(k_pages, page_table, seq_lens)
    kind = float8.kind_of(k_pages, kv_dtype)
    scales = (x if x is None or x.ndim == 0 else rows.flat(x) for x in (k_scale, v_scale))
    rules = Rules(sm_scale=sm_scale, mask=mask, logit_soft_cap=logit_soft_cap, sliding_window=sliding_window)
    return attend(
        q,
        rows.flat(k_pages),
        rows.flat(v_pages),
        *scales,
        where=page_table,
        offset=page_offset,
        page_size=k_pages.shape[1],
        kind=kind,
        seq_lens=seq_lens,
        cu_q_lens=cu_q_lens,
        sinks=sinks,
        tree=masks.make_tree(rules, q.shape[0], tree_bits, tree_starts, tree_kv_positions, q_positions),
        rules=rules,
        max_q_len=max_q_len,
        num_splits=num_splits,
        config=config,
        interpret=interpret,
    )


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
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of packed queries over keys packed request after request; see `pallas_kernels.attention.xla`.

    Args, returns, raises: as there and in `paged_attention`.
    """
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(f"k.shape={k.shape} but v.shape={v.shape}: want the same tokens and heads")
    rules = Rules(sm_scale=sm_scale, mask=mask, logit_soft_cap=logit_soft_cap, sliding_window=sliding_window)
    return attend(
        q,
        k,
        v,
        k_scale,
        v_scale,
        where=cu_kv_lens,
        offset=0,
        page_size=None,
        kind=k.dtype,
        seq_lens=cu_kv_lens[1:] - cu_kv_lens[:-1],
        cu_q_lens=cu_q_lens,
        sinks=sinks,
        tree=masks.make_tree(rules, q.shape[0], tree_bits, tree_starts, tree_kv_positions, q_positions),
        rules=rules,
        max_q_len=max_q_len,
        num_splits=num_splits,
        config=config,
        interpret=interpret,
    )


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    *,
    where: jax.Array,
    offset: jax.Array | int,
    page_size: int | None,
    kind,
    seq_lens: jax.Array,
    cu_q_lens: jax.Array,
    sinks: jax.Array | None,
    tree: Tree | None,
    rules: Rules,
    max_q_len: int,
    num_splits: int,
    config: Config | None,
    interpret: bool,
    latent_dim: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Attention over rows of keys [rows, kv_heads, k_dim] and values, or over latent rows whose front is the value.

    Args: where: page table and its `offset`, or with page_size None the first row of each request's keys. kind: dtype
      of what `k` holds. latent_dim: with v None, how many values a latent row has; uint8 rows are packed.
    Returns, raises: as `paged_attention`.
    """
    tokens, q_heads, k_dim = q.shape
    kv_heads, v_dim = k.shape[1], latent_dim if v is None else v.shape[2]
    rows.check_heads(q, kv_heads, k_dim if v is None else k.shape[2])
    rows.check_lens(seq_lens, cu_q_lens)
    rows.check_splits(num_splits, sinks)
    narrow = kind in float8.KINDS
    if q.dtype not in _FLOATS or (not narrow and kind not in (q.dtype, jnp.int8)):
        raise ValueError(
            f"q is {q.dtype}, the keys are {kind}: the portable GPU kernel multiplies float32, bfloat16 or float16 "
            "with keys of the same, or 8-bit ones; resolve with prefer=('xla',)"
        )
    if k.dtype.itemsize == 1 and 2**31 < k.size <= 2**32:
        raise ValueError(
            f"{k.size} 8-bit keys: from 2**31 to 2**32 the lowering counts with a sign in 32 bits; use fewer or more"
        )
    if tokens == 0 or seq_lens.shape[0] == 0 or k.shape[0] == 0:
        return partial_states.nothing((tokens, q_heads), v_dim, q.dtype, num_splits)
    group = q_heads // kv_heads
    room = k.shape[0] if page_size is None else where.shape[1] * page_size
    config = config or heuristic(
        max_q_len=max_q_len,
        group=group,
        kv_heads=kv_heads,
        num_tokens=tokens,
        num_seqs=seq_lens.shape[0],
        k_dim=k_dim,
        v_dim=v_dim,
        kv_room=room,
        itemsize=q.dtype.itemsize,
    )
    static = Static(
        config=config,
        rules=rules,
        group=group,
        chunks=-(-group // config.block_rows),
        k_dim=k_dim,
        v_dim=v_dim,
        page_size=page_size,
        latent=v is None,
        kind=kind if narrow else None,
        words=0 if tree is None else tree.bits.shape[1],
    )
    cut = _tiles(static, seq_lens, cu_q_lens, tree, max_q_len, tokens)
    placed = tree if rules.sliding_window is not None else None  # positions count in a window alone
    arrays = Arrays(
        tiles=cut,
        where=where,
        offset=jnp.asarray(offset, jnp.int32).reshape(1),
        q=q,
        k=k if k.dtype not in float8.KINDS else float8.to_stored(k, jnp.uint8),
        v=None if v is None else v if v.dtype not in float8.KINDS else float8.to_stored(v, jnp.uint8),
        k_scale=None if k_scale is None else k_scale if k_scale.ndim else k_scale.reshape(1),
        v_scale=None if v_scale is None else v_scale if v_scale.ndim else v_scale.reshape(1),
        sinks=sinks if config.splits == 1 else None,
        bits=None if tree is None else jax.lax.bitcast_convert_type(tree.bits, jnp.int32),
        starts=None if tree is None else tree.starts,
        kv_positions=None if placed is None else placed.kv_positions,
        q_positions=None if placed is None else placed.q_positions,
        out=None,
        lse=None,
    )
    out, lse = _launch(static, arrays, q.dtype if config.splits == num_splits == 1 else jnp.float32, interpret)
    if config.splits == 1:
        out, lse = out[0], lse[0]
    else:
        out, lse = merge_gpu.merge_states(out, lse, interpret=interpret)
        out = out if sinks is None else apply_sinks(out, lse, sinks)
    return partial_states.in_parts(out if num_splits > 1 else out.astype(q.dtype), lse, num_splits)


def _tiles(static: Static, seq_lens, cu_q_lens, tree: Tree | None, max_q_len: int, tokens: int) -> jax.Array:
    # i32[tiles, 6]
    block_q = max(static.config.block_rows // static.heads, 1)
    num = max(tiles.count(tokens, seq_lens.shape[0], max_q_len, block_q, 1), 1)
    chosen = cu_q_lens[1:] - cu_q_lens[:-1] <= max_q_len
    cut, _ = tiles.make(seq_lens, cu_q_lens, chosen, num_tiles=num, block_q=block_q)
    cut = masks.narrow(cut, static.rules, tree, block_q)
    return jnp.stack([x.astype(jnp.int32) for x in cut], axis=1)


def _launch(static: Static, arrays: Arrays, out_dtype, interpret: bool) -> tuple[jax.Array, jax.Array]:
    # -> out [splits, tokens, q_heads, v_dim], lse f32[splits, tokens, q_heads]
    config, (tokens, q_heads, _) = static.config, arrays.q.shape
    given = {name: x for name, x in arrays._asdict().items() if x is not None}
    out_shape = (
        jax.ShapeDtypeStruct((config.splits, tokens, q_heads, static.v_dim), out_dtype),
        jax.ShapeDtypeStruct((config.splits, tokens, q_heads), jnp.float32),
    )

    def body(*refs):
        named = dict(zip(given, refs, strict=False))
        out, lse = refs[-2:]
        program(static, Arrays(**(dict.fromkeys(Arrays._fields) | named | dict(out=out, lse=lse))))

    # Rows that no tile answers for keep what the outputs start with.
    start = (jnp.zeros(out_shape[0].shape, out_dtype), jnp.full(out_shape[1].shape, -jnp.inf, jnp.float32))
    launch = pl.pallas_call(
        body,
        out_shape=out_shape,
        grid=(arrays.tiles.shape[0], arrays.k.shape[1] * static.chunks, config.splits),
        input_output_aliases={len(given): 0, len(given) + 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        cost_estimate=_cost(static, arrays),
        interpret=interpret,
        name="jattn_gpu_attention",
    )
    return launch(*given.values(), *start)


def _cost(static: Static, arrays: Arrays) -> pl.CostEstimate:
    # the room for keys stands for the lengths, which are not known while tracing
    tokens, q_heads, _ = arrays.q.shape
    keys = arrays.k.shape[0] if static.page_size is None else arrays.where.size * static.page_size
    seqs = arrays.where.shape[0]
    each = keys // max(seqs, 1)
    width = static.k_dim + static.v_dim
    return pl.CostEstimate(
        flops=2 * tokens * q_heads * each * width,
        bytes_accessed=keys * arrays.k.shape[1] * width * arrays.k.dtype.itemsize,
        transcendentals=tokens * q_heads * each,
    )
