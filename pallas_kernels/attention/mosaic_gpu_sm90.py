"""Paged decode and tree-verify attention on Hopper: the arrays of the plain JAX form; one kernel, or two with splits.

Source: arXiv:2205.14135, algorithm 1; arXiv:2309.06180 (paging); https://pytorch.org/blog/flash-decoding/ (splits).
"""
# Settings are passed on as mappings, which the checker cannot follow, and `pl.kernel` is typed as a decorator.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common import float8, masks, partial_states, rows
from pallas_kernels._common.masks import Rules
from pallas_kernels.attention import mosaic_gpu_sm90_schedule as schedules
from pallas_kernels.attention.mosaic_gpu_sm90_config import HEAD_DIMS, PAGE_SIZES, Config, heuristic
from pallas_kernels.attention.mosaic_gpu_sm90_kernel import program
from pallas_kernels.attention.mosaic_gpu_sm90_merge import Shape, merge, merge_plain
from pallas_kernels.attention.mosaic_gpu_sm90_records import Arrays, Static, scratch
from pallas_kernels.attention.mosaic_gpu_sm90_schedule import Schedule
from pallas_kernels.attention.mosaic_gpu_sm90_tuned import tuned


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
    schedule: Schedule | None = None,
    interpret=False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of packed queries over pages that already hold their keys; see `pallas_kernels.attention.xla`.

    Args: as there, with q in bfloat16 or float16, and pages in the same or in 8-bit floats (as their bits or
      themselves) with scalar scales above 0 or none.
      config: sizes; None takes what was measured for exactly this call's sizes, else `heuristic`.
      schedule: made with the same lengths and config; None makes it here (it is alike for all layers: XLA moves it out
      of a loop over them).
    Returns, raises: as there; also ValueError for a dtype, head dim, page size or group this kernel was not built for.
    """
    tokens, q_heads, k_dim = q.shape
    pages, page_size, kv_heads, v_dim = v_pages.shape
    kind = float8.kind_of(k_pages, kv_dtype)
    _check(q, k_pages, v_pages, k_scale, v_scale, kind)
    narrow = kind in float8.KINDS
    if narrow:
        k_pages, v_pages = (float8.to_stored(x, jnp.uint8) for x in (k_pages, v_pages))
    if not sm_scale > 0:
        raise ValueError(
            f"sm_scale={sm_scale}: the Hopper kernel takes maxima before it scales, so want a positive one"
        )
    if tokens == 0 or seq_lens.shape[0] == 0:  # no request: no program
        return partial_states.nothing((tokens, q_heads), v_dim, q.dtype, num_splits)
    group = q_heads // kv_heads
    rules = Rules(sm_scale=sm_scale, mask=mask, logit_soft_cap=logit_soft_cap, sliding_window=sliding_window)
    tree = masks.make_tree(rules, tokens, tree_bits, tree_starts, tree_kv_positions, q_positions)
    facts = dict(
        max_q_len=max_q_len,
        group=group,
        kv_heads=kv_heads,
        num_seqs=seq_lens.shape[0],
        head_dim=max(k_dim, v_dim),
        kv_room=page_table.shape[1] * page_size,
        page_size=page_size,
        plain_tree=(tree is not None and sliding_window is None and logit_soft_cap is None and tree.bits.shape[1] <= 2),
        narrow_kv=narrow,
    )
    config = config or tuned(**facts) or heuristic(**facts)
    if (narrow and config.groups > 1) or (page_size < 8 and config.copies_apart):
        raise ValueError(
            f"{config} for pages of {page_size} tokens of {kind}: 8-bit values are widened, and small pages gathered, "
            "by the one warpgroup of groups=1, copier=False"
        )
    if interpret and config.cluster > 1:  # the interpreter reads no other program's memory
        parts = config.cluster * seq_lens.shape[0]
        config = dataclasses.replace(config, cluster=1, splits=True, parts=parts)
    if interpret:
        config = dataclasses.replace(config, sharers=1)
    if schedule is None:
        schedule = schedules.make(
            config,
            rules,
            tree,
            seq_lens=seq_lens,
            cu_q_lens=cu_q_lens,
            num_tokens=tokens,
            max_q_len=max_q_len,
            group=group,
            page_table=page_table,
            page_size=page_size,
        )
    static = Static(
        config=config,
        rules=rules,
        group=group,
        kv_heads=kv_heads,
        k_dim=k_dim,
        v_dim=v_dim,
        page_size=page_size,
        num_tokens=tokens,
        max_q_len=max_q_len,
        block_q=schedules.tokens_a_tile(config, group=group, max_q_len=max_q_len),
        words=0 if schedule.bits is None else schedule.bits.shape[1],
        sinks=sinks is not None,
        dtype=q.dtype,
        narrow=kind if narrow else None,
        interpret=bool(interpret),
    )
    arrays = Arrays(
        items=schedule.items,
        unserved=schedule.unserved,
        cu_q_lens=cu_q_lens,
        page_table=page_table,
        page_offset=jnp.asarray(page_offset, jnp.int32).reshape(1),
        q=q.reshape(tokens * q_heads, k_dim),
        k=k_pages,
        v=v_pages,
        bits=schedule.bits,
        low=schedule.low,
        sinks=sinks,
        k_scale=None if k_scale is None else k_scale.reshape(1),
        v_scale=None if v_scale is None else v_scale.reshape(1),
        out=None,
        lse=None,
        parts=None,
        part_lse=None,
    )
    out_dtype = q.dtype if num_splits == 1 else jnp.float32
    out, lse, *parts = _launch(static, arrays, out_dtype, interpret)
    if config.splits:
        shape = Shape(kv_heads, group, static.block_q * group, v_dim, sinks is not None)
        out, lse = (merge_plain if interpret else merge)(out, lse, *parts, schedule.merges, sinks, shape)
    out, lse = out.reshape(tokens, q_heads, v_dim), lse.reshape(tokens, q_heads)
    return partial_states.in_parts(out, lse, num_splits)


def _launch(static: Static, arrays: Arrays, out_dtype, interpret) -> tuple[jax.Array, ...]:
    # -> out, lse, and with splits the parts and their lse
    config = static.config
    given = {name: x for name, x in arrays._asdict().items() if x is not None}
    rows = arrays.q.shape[0]
    results = dict(out=((rows, static.v_dim), out_dtype), lse=((rows,), jnp.float32))
    if config.splits:
        rows = arrays.items.shape[0] * static.kv_heads * static.block_q * static.group
        results |= dict(parts=((rows, static.v_dim), jnp.float32), part_lse=((rows,), jnp.float32))

    def body(*refs):
        named = dict(zip((*given, *results), refs, strict=True))
        held = Arrays(**(dict.fromkeys(Arrays._fields) | named))
        run = lambda smem: program(static, held, smem)  # noqa: E731
        pl.run_scoped(run, scratch(static), collective_axes="warpgroups" if config.copies_apart else ())

    threads = dict(num_threads=config.groups + 1, thread_name="warpgroups") if config.copies_apart else {}
    names, cluster = ("items", "kv_heads"), {}
    if config.cluster > 1:
        cluster = dict(cluster=(config.cluster,), cluster_names=("parts",))
    if config.sharers > 1:
        cluster = dict(cluster=(config.sharers,), cluster_names=("sharers",))
    launch = pl.kernel(
        body,
        out_type=tuple(jax.ShapeDtypeStruct(*shape) for shape in results.values()),
        mesh=plgpu.Mesh(
            grid=(arrays.items.shape[0] // config.cluster, static.kv_heads), grid_names=names, **cluster, **threads
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
        cost_estimate=_cost(static, arrays),
        interpret=interpret,
        name="jattn_attention",
    )
    return launch(*given.values())


def _cost(static: Static, arrays: Arrays) -> pl.CostEstimate:
    # the table's room stands for the lengths, which are not known while tracing
    keys = arrays.page_table.size * static.page_size
    rows = arrays.q.shape[0] // max(arrays.page_table.shape[0], 1)
    width = static.k_dim + static.v_dim
    return pl.CostEstimate(
        flops=2 * keys * rows * width,
        bytes_accessed=keys * static.kv_heads * width * arrays.k.dtype.itemsize,
        transcendentals=keys * rows,
    )


def _check(q, k_pages, v_pages, k_scale, v_scale, kind) -> None:
    kinds = (jnp.bfloat16, jnp.float16)
    if q.dtype not in kinds or kind not in (q.dtype, *float8.KINDS) or v_pages.dtype != k_pages.dtype:
        raise ValueError(
            f"q, k_pages, v_pages are {q.dtype}, {kind}, {v_pages.dtype}: the Hopper kernel wants bfloat16 or float16 "
            "queries, and pages of the same or of 8-bit floats; resolve with prefer=('xla',)"
        )
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None and (scale.ndim or kind not in float8.KINDS):
            raise ValueError(
                f"{name} f32{list(scale.shape)} for pages of {kind}: the Hopper kernel takes one scale for all 8-bit "
                "values; resolve with prefer=('xla',)"
            )
    heads, k_dim, v_dim, size = q.shape[1], q.shape[2], v_pages.shape[3], k_pages.shape[1]
    kv_heads = k_pages.shape[2]
    if k_pages.shape[:3] != v_pages.shape[:3] or k_pages.shape[3] != k_dim or heads % kv_heads:
        raise ValueError(
            f"q{list(q.shape)}, k_pages{list(k_pages.shape)}, v_pages{list(v_pages.shape)}: want equal pages and "
            "heads, equal widths of q and keys, and a multiple of the KV heads"
        )
    rows.check_slots(k_pages)
    if heads // kv_heads > 64:
        raise ValueError(f"{heads // kv_heads} query heads a KV head: the Hopper kernel takes up to 64 a tile")
    if size not in PAGE_SIZES or k_dim not in HEAD_DIMS or v_dim not in HEAD_DIMS:
        raise ValueError(
            f"page_size={size}, head dims {k_dim} and {v_dim}: the Hopper kernel wants pages of "
            f"{', '.join(map(str, PAGE_SIZES))} and widths of {', '.join(map(str, HEAD_DIMS))}; "
            "resolve with prefer=('xla',)"
        )
