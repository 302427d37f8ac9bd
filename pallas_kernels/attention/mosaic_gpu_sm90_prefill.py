"""Prefill attention on Hopper, over pages or packed keys: the arrays of the plain JAX forms; one kernel.

Source: arXiv:2205.14135, algorithm 1; arXiv:2407.08608 (overlap of products and softmax); arXiv:2309.06180 (paging).
"""
# Settings are passed on as mappings, which the checker cannot follow, and `pl.kernel` is typed as a decorator.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common import float8, partial_states, rows
from pallas_kernels._common.masks import Rules
from pallas_kernels.attention import mosaic_gpu_sm90_prefill_schedule as schedules
from pallas_kernels.attention.mosaic_gpu_sm90_config import PAGE_SIZES
from pallas_kernels.attention.mosaic_gpu_sm90_prefill_config import SHARED_BYTES, WIDTHS, Config, heuristic
from pallas_kernels.attention.mosaic_gpu_sm90_prefill_kernel import program
from pallas_kernels.attention.mosaic_gpu_sm90_prefill_records import Arrays, Static, scratch
from pallas_kernels.attention.mosaic_gpu_sm90_prefill_schedule import Schedule

_NUM_SMS = 132


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
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    kv_dtype: jax.typing.DTypeLike | None = None,
    num_splits: int = 1,
    config: Config | None = None,
    schedule: Schedule | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of many packed queries a request over pages that hold their keys; see `pallas_kernels.attention.xla`.

    Args: as there, with mask "causal" or "full", q in bfloat16 or float16, and pages in the same, or with float16 in
      8-bit floats (as their bits or themselves) with scalar scales above 0 or none.
      config: sizes; None takes `heuristic`.
      schedule: made with the same lengths and config; None makes it here (it is alike for all layers: XLA moves it out
      of a loop over them).
    Returns, raises: as there; also ValueError for a dtype, head dim, page size or group this kernel was not built for.
    """
    rows.check_paged(k_pages, page_table, seq_lens)
    if k_pages.shape[1] not in PAGE_SIZES:
        raise ValueError(
            f"page_size={k_pages.shape[1]}: the Hopper kernel wants pages of {', '.join(map(str, PAGE_SIZES))} tokens; "
            "resolve with prefer=('xla',)"
        )
    rules = Rules(sm_scale=sm_scale, mask=mask, logit_soft_cap=logit_soft_cap, sliding_window=sliding_window)
    paging = dict(page_table=page_table, page_offset=jnp.asarray(page_offset, jnp.int32).reshape(1))
    kind = float8.kind_of(k_pages, kv_dtype)
    lens = dict(seq_lens=seq_lens, cu_q_lens=cu_q_lens, max_q_len=max_q_len)
    scales = k_scale, v_scale
    return _attend(q, k_pages, v_pages, kind, rules, sinks, scales, num_splits, config, schedule, paging, lens)


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
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    num_splits: int = 1,
    config: Config | None = None,
    schedule: Schedule | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of packed queries over keys packed request after request; see `pallas_kernels.attention.xla`.

    Args: as there and in `paged_attention` here.
    Returns, raises: as in `paged_attention`.
    """
    rules = Rules(sm_scale=sm_scale, mask=mask, logit_soft_cap=logit_soft_cap, sliding_window=sliding_window)
    seq_lens = cu_kv_lens[1:] - cu_kv_lens[:-1]
    lens = dict(seq_lens=seq_lens, cu_q_lens=cu_q_lens, max_q_len=max_q_len, cu_kv_lens=cu_kv_lens)
    return _attend(q, k, v, k.dtype, rules, sinks, (k_scale, v_scale), num_splits, config, schedule, {}, lens)


def _attend(q, k, v, kind, rules: Rules, sinks, scales, num_splits, config, schedule, paging, lens):
    k_scale, v_scale = scales
    _check(q, k, v, k_scale, v_scale, kind, rules, lens)
    tokens, q_heads, k_dim = q.shape
    kv_heads, v_dim = v.shape[-2:]
    narrow = kind in float8.KINDS
    if narrow:
        k, v = (float8.to_stored(x, jnp.uint8) for x in (k, v))
    out_dtype = q.dtype if num_splits == 1 else jnp.float32
    if tokens == 0 or lens["seq_lens"].shape[0] == 0 or k.shape[0] == 0:  # no request, or no keys at all
        return partial_states.nothing((tokens, q_heads), v_dim, q.dtype, num_splits)
    plain = sinks is None and rules.logit_soft_cap is None and rules.sliding_window is None
    gathers = bool(paging) and k.shape[1] < 8
    config = config or heuristic(k_dim=k_dim, v_dim=v_dim, narrow_kv=narrow, gathers=gathers, plain=plain)
    _check_config(config, k_dim, v_dim, q_heads // kv_heads, narrow)
    if schedule is None:
        schedule = schedules.make(config, rules, **lens, num_tokens=tokens, group=q_heads // kv_heads)
    if not paging:  # the copy engine takes whole blocks, and tiles of 8 rows
        short = max(config.block_kv - k.shape[0], -k.shape[0] % 8)
        k, v = (jnp.pad(x, ((0, short), (0, 0), (0, 0))) for x in (k, v)) if short > 0 else (k, v)
    static = Static(
        config=config,
        rules=rules,
        group=q_heads // kv_heads,
        kv_heads=kv_heads,
        k_dim=k_dim,
        v_dim=v_dim,
        page_size=k.shape[1] if paging else None,
        programs=_NUM_SMS,
        sinks=sinks is not None,
        dtype=q.dtype,
        narrow=kind if narrow else None,
    )
    arrays = Arrays(
        tiles=schedule.tiles,
        counts=schedule.counts,
        page_table=paging.get("page_table"),
        page_offset=paging.get("page_offset"),
        q=q.reshape(tokens * q_heads, k_dim),
        k=k,
        v=v,
        sinks=sinks,
        k_scale=None if k_scale is None else k_scale.reshape(1),
        v_scale=None if v_scale is None else v_scale.reshape(1),
        out=None,
        lse=None,
    )
    out, lse = _launch(static, arrays, out_dtype, lens["max_q_len"])
    out, lse = out.reshape(tokens, q_heads, v_dim), lse.reshape(tokens, q_heads)
    return partial_states.in_parts(out, lse, num_splits)  # queries fill the card: nothing is cut


def _launch(static: Static, arrays: Arrays, out_dtype, max_q_len: int) -> tuple[jax.Array, jax.Array]:
    given = {name: x for name, x in arrays._asdict().items() if x is not None}
    rows_ = arrays.q.shape[0]

    def body(*refs):
        held = Arrays(**(dict.fromkeys(Arrays._fields) | dict(zip((*given, "out", "lse"), refs, strict=True))))
        pl.run_scoped(lambda smem: program(static, held, smem), scratch(static), collective_axes="warpgroups")

    launch = pl.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((rows_, static.v_dim), out_dtype),
            jax.ShapeDtypeStruct((rows_,), jnp.float32),
        ),
        mesh=plgpu.Mesh(
            grid=(static.programs,),
            grid_names=("programs",),
            num_threads=static.config.groups + 1,
            thread_name="warpgroups",
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        cost_estimate=_cost(static, arrays, max_q_len),
        name="jattn_prefill",
    )
    return launch(*given.values())


def _cost(static: Static, arrays: Arrays, max_q_len: int) -> pl.CostEstimate:
    # lengths are not known while tracing: as if each request had max_q_len queries and no keys before them
    rows_, width = arrays.q.shape[0], static.k_dim + static.v_dim
    keys = max_q_len if static.rules.mask == "full" else max_q_len // 2
    return pl.CostEstimate(
        flops=2 * rows_ * keys * width,
        bytes_accessed=2 * rows_ * width + 2 * rows_ // static.group * width,
        transcendentals=rows_ * keys,
    )


def _check(q, k, v, k_scale, v_scale, kind, rules: Rules, lens) -> None:
    kinds = (jnp.bfloat16, jnp.float16)
    if q.dtype not in kinds or kind not in (q.dtype, *float8.KINDS) or v.dtype != k.dtype:
        raise ValueError(
            f"q, keys, values are {q.dtype}, {kind}, {v.dtype}: the Hopper kernel wants bfloat16 or float16 queries, "
            "and keys and values of the same or of 8-bit floats; resolve with prefer=('xla',)"
        )
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None and (scale.ndim or kind not in float8.KINDS):
            raise ValueError(
                f"{name} f32{list(scale.shape)} for keys of {kind}: the Hopper kernel takes one scale for all 8-bit "
                "values; resolve with prefer=('xla',)"
            )
    heads, k_dim, kv_heads, v_dim = q.shape[1], q.shape[2], k.shape[-2], v.shape[-1]
    if k.shape[:-1] != v.shape[:-1] or k.shape[-1] != k_dim or heads % kv_heads:
        raise ValueError(
            f"q{list(q.shape)}, keys{list(k.shape)}, values{list(v.shape)}: want equal rows and heads, equal widths of "
            "q and keys, and a multiple of the KV heads"
        )
    if heads // kv_heads > 64:
        raise ValueError(f"{heads // kv_heads} query heads a KV head: the Hopper kernel takes up to 64 a tile")
    if k_dim not in WIDTHS or v_dim not in WIDTHS:
        raise ValueError(
            f"head dims {k_dim} and {v_dim}: the Hopper kernel wants widths of {', '.join(map(str, WIDTHS))}; "
            "resolve with prefer=('xla',)"
        )
    if kind in float8.KINDS and q.dtype != jnp.float16:
        raise ValueError(
            f"keys of {kind} with queries of {q.dtype}: the Hopper prefill widens 8-bit values to float16 and wants "
            "float16 queries with them; use the decode kernel, or prefer=('xla',)"
        )
    if kind in float8.KINDS and (k_dim > 192 or v_dim > 128):
        raise ValueError(
            f"keys of {kind} with head dims {k_dim} and {v_dim}: widening them takes registers that the Hopper prefill "
            "has for up to 192 and 128; resolve with prefer=('xla',)"
        )
    if rules.mask == "tree":
        raise ValueError("mask='tree': the Hopper prefill takes 'causal' and 'full'; trees are the decode kernel's")
    if not rules.sm_scale > 0:
        raise ValueError(
            f"sm_scale={rules.sm_scale}: the Hopper kernel takes maxima before it scales, so want a positive one"
        )
    rows.check_lens(lens["seq_lens"], lens["cu_q_lens"])


def _check_config(config: Config, k_dim: int, v_dim: int, group: int, narrow: bool) -> None:
    taken = config.shared_bytes(k_dim=k_dim, v_dim=v_dim, narrow_kv=narrow)
    if taken > SHARED_BYTES:
        raise ValueError(
            f"{config} takes {taken} bytes of shared memory with heads of {k_dim} and {v_dim}: want at most "
            f"{SHARED_BYTES}; use fewer stages or a smaller block_kv"
        )
