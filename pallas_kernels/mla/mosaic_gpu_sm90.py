"""Latent (MLA) decode and tree-verify attention on Hopper: the arrays of the plain JAX form.

Source: arXiv:2405.04434, section 2.1 (DeepSeek-V2); arXiv:2309.06180 (paging); the merge of parts is that of
`pallas_kernels.attention`.
"""
# Settings are passed on as mappings, which the checker cannot follow, and `pl.kernel` is typed as a decorator.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common import latent_rows, masks, partial_states, rows
from pallas_kernels._common.masks import Rules
from pallas_kernels.attention import mosaic_gpu_sm90_schedule as schedules
from pallas_kernels.attention.mosaic_gpu_sm90_merge import Shape, merge, merge_plain
from pallas_kernels.attention.mosaic_gpu_sm90_schedule import Schedule
from pallas_kernels.mla.mosaic_gpu_sm90_config import MAX_HEADS, MAX_WIDTH, PAGE_SIZES, Config, heuristic, stages_of
from pallas_kernels.mla.mosaic_gpu_sm90_kernel import program
from pallas_kernels.mla.mosaic_gpu_sm90_records import Arrays, Static, scratch


def attend_latent(
    q: jax.Array,
    pages: jax.Array,
    *,
    latent_dim: int,
    page_table: jax.Array,
    page_offset: jax.Array | int = 0,
    seq_lens: jax.Array,
    cu_q_lens: jax.Array,
    max_q_len: int,
    sm_scale: float,
    mask: str = "causal",
    tree_bits: jax.Array | None = None,
    tree_starts: jax.Array | None = None,
    tree_kv_positions: jax.Array | None = None,
    q_positions: jax.Array | None = None,
    num_splits: int = 1,
    config: Config | None = None,
    schedule: Schedule | None = None,
    interpret=False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of absorbed queries over latent rows; see `pallas_kernels.mla.xla`.

    Args: as there, with q in bfloat16 or float16 and pages in the same, or q in bfloat16 and packed 8-bit rows of a
        latent of 512 and any key.
      config: sizes; None takes `heuristic`'s.
      schedule: made with the same lengths and config (`pallas_kernels.attention.mosaic_gpu_sm90_schedule.make`, with
        the heads as group); None makes it here (it is alike for all layers: XLA moves it out of a loop over them).
    Returns, raises: as there; also ValueError for a dtype, widths, a page size or heads that this kernel was not built
      for.
    """
    tokens, heads, k_dim = q.shape
    rows.check_paged(pages, page_table, seq_lens)
    _check(q, pages, latent_dim)
    if not sm_scale > 0:
        raise ValueError(
            f"sm_scale={sm_scale}: the Hopper kernel takes maxima before it scales, so want a positive one"
        )
    if tokens == 0 or seq_lens.shape[0] == 0:  # no request: no program
        return partial_states.nothing((tokens, heads), latent_dim, q.dtype, num_splits)
    page_size = pages.shape[1]
    rules = Rules(sm_scale=sm_scale, mask=mask)
    tree = masks.make_tree(rules, tokens, tree_bits, tree_starts, tree_kv_positions, q_positions)
    config = config or heuristic(
        max_q_len=max_q_len,
        num_heads=heads,
        num_seqs=seq_lens.shape[0],
        k_dim=k_dim,
        kv_room=page_table.shape[1] * page_size,
    )
    _check_config(config, heads, k_dim)
    if schedule is None:
        schedule = schedules.make(
            config,
            rules,
            tree,
            seq_lens=seq_lens,
            cu_q_lens=cu_q_lens,
            num_tokens=tokens,
            max_q_len=max_q_len,
            group=heads,
            page_table=page_table,
            page_size=page_size,
        )
    static = Static(
        config=config,
        rules=rules,
        group=heads,
        k_dim=k_dim,
        v_dim=latent_dim,
        page_size=page_size,
        block_q=schedules.tokens_a_tile(config, group=heads, max_q_len=max_q_len),
        num_tokens=tokens,
        max_q_len=max_q_len,
        words=0 if schedule.bits is None else schedule.bits.shape[1],
        dtype=q.dtype,
        packed=pages.dtype == jnp.uint8,
        interpret=bool(interpret),
    )
    arrays = Arrays(
        items=schedule.items,
        unserved=schedule.unserved,
        cu_q_lens=cu_q_lens,
        page_table=page_table,
        page_offset=jnp.asarray(page_offset, jnp.int32).reshape(1),
        q=q.reshape(tokens * heads, k_dim),
        pages=pages,
        bits=None if schedule.bits is None else schedule.bits.reshape(-1),
        out=None,
        lse=None,
        parts=None,
        part_lse=None,
    )
    out_dtype = q.dtype if num_splits == 1 else jnp.float32
    out, lse, *parts = _launch(static, arrays, out_dtype, interpret)
    if config.splits:
        shape = Shape(kv_heads=1, group=heads, rows=static.block_q * heads, v_dim=latent_dim, sinks=False)
        out, lse = (merge_plain if interpret else merge)(out, lse, *parts, schedule.merges, None, shape)
    out, lse = out.reshape(tokens, heads, latent_dim), lse.reshape(tokens, heads)
    return partial_states.in_parts(out, lse, num_splits)


def _launch(static: Static, arrays: Arrays, out_dtype, interpret) -> tuple[jax.Array, ...]:
    # -> out, lse, and with splits the parts and their lse
    config = static.config
    given = {name: x for name, x in arrays._asdict().items() if x is not None}
    rows = arrays.q.shape[0]
    results = dict(out=((rows, static.v_dim), out_dtype), lse=((rows,), jnp.float32))
    if config.splits:
        rows = arrays.items.shape[0] * static.block_q * static.group
        results |= dict(parts=((rows, static.v_dim), jnp.float32), part_lse=((rows,), jnp.float32))

    def body(*refs):
        named = dict(zip((*given, *results), refs, strict=True))
        held = Arrays(**(dict.fromkeys(Arrays._fields) | named))
        pl.run_scoped(lambda smem: program(static, held, smem), scratch(static), collective_axes="warpgroups")

    grid: dict = dict(grid=(arrays.items.shape[0],), grid_names=("items",))
    if static.together:
        grid |= dict(cluster=(config.sharers,), cluster_names=("sharers",))
    elif config.sharers > 1:  # each copies for itself
        grid = dict(grid=(arrays.items.shape[0], config.sharers), grid_names=("items", "sharers"))
    launch = pl.kernel(
        body,
        out_type=tuple(jax.ShapeDtypeStruct(*shape) for shape in results.values()),
        mesh=plgpu.Mesh(**grid, num_threads=3, thread_name="warpgroups"),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
        cost_estimate=_cost(static, arrays),
        interpret=interpret,
        name="jattn_attend_latent",
    )
    return launch(*given.values())


def _cost(static: Static, arrays: Arrays) -> pl.CostEstimate:
    # the table's room stands for the lengths, which are not known while tracing
    keys = arrays.page_table.size * static.page_size
    rows = arrays.q.shape[0] // max(arrays.page_table.shape[0], 1)
    return pl.CostEstimate(
        flops=2 * keys * rows * (static.k_dim + static.v_dim),
        bytes_accessed=keys * arrays.pages.shape[2] * arrays.pages.dtype.itemsize,
        transcendentals=keys * rows,
    )


def unsupported(*, dtype, kv_dtype, num_heads: int, latent_dim: int, rope_dim: int, page_size: int) -> str | None:
    """Why this kernel does not serve such a layer, in one clause; None if it does."""
    packed = kv_dtype == jnp.uint8
    if dtype not in (jnp.bfloat16, jnp.float16) or (kv_dtype != dtype and not (packed and dtype == jnp.bfloat16)):
        return f"queries of {dtype} over rows of {kv_dtype}, want bfloat16 or float16 for both, or bfloat16 over uint8"
    if packed and (latent_dim != 512 or rope_dim not in (16, 32, 64)):
        return f"packed rows with a latent of {latent_dim} and a key of {rope_dim}, want 512 and 16, 32 or 64"
    if num_heads > MAX_HEADS:
        return f"{num_heads} query heads, want at most {MAX_HEADS}"
    if page_size not in PAGE_SIZES:
        return f"page_size={page_size}, want one of {', '.join(map(str, PAGE_SIZES))}"
    odd = latent_dim % 32 or rope_dim % 16 or not 32 <= latent_dim <= 512 or rope_dim < 0
    if odd or stages_of(latent_dim + rope_dim) < 2:
        return (
            f"a latent of {latent_dim} and a key of {rope_dim}, want multiples of 32 (up to 512) and 16, "
            f"{MAX_WIDTH} together at most"
        )
    return None


def _check(q, pages, latent_dim: int) -> None:
    width = q.shape[2]
    if pages.dtype == jnp.uint8:
        width = latent_rows.num_bytes(latent_dim, width - latent_dim)
    if pages.ndim != 3 or pages.shape[2] != width:
        raise ValueError(
            f"pages {pages.dtype}{list(pages.shape)} for q{list(q.shape)}: want [pages, page_size, {width}], rows as "
            "wide as queries"
        )
    reason = unsupported(
        dtype=q.dtype,
        kv_dtype=pages.dtype,
        num_heads=q.shape[1],
        latent_dim=latent_dim,
        rope_dim=q.shape[2] - latent_dim,
        page_size=pages.shape[1],
    )
    if reason:
        raise ValueError(f"the Hopper latent kernel does not serve this: {reason}; resolve with prefer=('xla',)")


def _check_config(config: Config, heads: int, k_dim: int) -> None:
    if config.stages > stages_of(k_dim):
        raise ValueError(
            f"stages={config.stages} blocks of {k_dim} numbers: shared memory holds {stages_of(k_dim)} and the queries"
        )
    if heads > config.rows:
        raise ValueError(f"{heads} query heads for tiles of {config.rows} rows: want sharers=2")
