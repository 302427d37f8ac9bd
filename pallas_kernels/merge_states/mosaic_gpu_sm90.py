"""Merge split-KV partials by log-sum-exp weight, on Hopper: parts stream through shared memory, sums stay in registers.

Source: https://pytorch.org/blog/flash-decoding/ (reduction); arXiv:2205.14135, section 3.1.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common import partial_states
from pallas_kernels.merge_states.config import Config, heuristic

_TILE = plgpu.Layout.WGMMA  # 64 rows: a warpgroup's natural tile, and its row vectors need no transposition
_ROW = plgpu.Layout.WGMMA.reduce(1)


def _kernel(out_gmem, lse_gmem, merged_gmem, merged_lse_gmem, *, config: Config):
    # out [splits, rows, v_dim], lse [splits, rows] -> merged [rows, v_dim], merged_lse [rows]
    pl.run_scoped(
        functools.partial(_program, out_gmem, lse_gmem, merged_gmem, merged_lse_gmem, config=config),
        parts_smem=plgpu.SMEM((config.stages, config.block_rows, config.block_v), out_gmem.dtype),
        lse_smem=plgpu.SMEM((lse_gmem.shape[0], config.block_rows), jnp.float32),
        merged_smem=plgpu.SMEM((config.block_rows, config.block_v), out_gmem.dtype),
        merged_lse_smem=plgpu.SMEM((config.block_rows,), jnp.float32),
        lse_barrier=plgpu.Barrier(),
        barriers=plgpu.Barrier(num_barriers=config.stages),
    )


def _program(
    out_gmem, lse_gmem, merged_gmem, merged_lse_gmem, *, parts_smem, lse_smem, merged_smem, merged_lse_smem,
    lse_barrier, barriers, config: Config
):  # fmt: skip
    splits, tile = out_gmem.shape[0], (config.block_rows, config.block_v)
    rows = pl.ds(lax.axis_index("rows") * config.block_rows, config.block_rows)
    cols = pl.ds(lax.axis_index("cols") * config.block_v, config.block_v)

    def fetch(i, stage):
        plgpu.copy_gmem_to_smem(out_gmem.at[i, rows, cols], parts_smem.at[stage], barriers.at[stage])

    plgpu.copy_gmem_to_smem(lse_gmem.at[:, rows], lse_smem, lse_barrier)
    for i in range(min(config.stages, splits)):
        fetch(i, i)
    plgpu.barrier_wait(lse_barrier)

    def lse(i):  # +inf marks an empty part, as -inf does
        row = plgpu.layout_cast(lse_smem[i], _ROW)  # left alone, layout inference gives up after a minute
        return jnp.where(row == jnp.inf, -jnp.inf, row)

    def highest(i, top):
        return jnp.maximum(top, lse(i))

    top = lax.fori_loop(0, splits, highest, plgpu.layout_cast(jnp.full(tile[:1], -jnp.inf, jnp.float32), _ROW))
    top = jnp.where(top == -jnp.inf, 0.0, top)  # an empty row weighs 0, not exp(-inf + inf)

    def add(i, carry):
        total, acc = carry
        stage = lax.rem(i, config.stages)
        plgpu.barrier_wait(barriers.at[stage])
        row_weight = jnp.exp(lse(i) - top)
        by_row = lax.broadcast_in_dim(row_weight, tile, (0,))
        part = plgpu.layout_cast(parts_smem[stage], _TILE).astype(jnp.float32)
        acc += by_row * jnp.where(by_row > 0, part, 0.0)  # an empty part may hold anything, NaN too

        @pl.when(i + config.stages < splits)
        def _():
            plgpu.commit_smem()  # orders the reads above before the copy that overwrites them
            fetch(i + config.stages, stage)

        return total + row_weight, acc

    nothing = (jnp.zeros(tile[:1], jnp.float32), jnp.zeros(tile, jnp.float32))
    start = tuple(plgpu.layout_cast(x, layout) for x, layout in zip(nothing, (_ROW, _TILE), strict=True))
    total, acc = lax.fori_loop(0, splits, add, start)
    some = jnp.where(total > 0, total, 1.0)
    merged_smem[...] = (acc / lax.broadcast_in_dim(some, tile, (0,))).astype(merged_smem.dtype)
    merged_lse_smem[...] = jnp.where(total > 0, top + jnp.log(some), -jnp.inf)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(merged_smem, merged_gmem.at[rows, cols])

    @pl.when(lax.axis_index("cols") == 0)
    def _():
        plgpu.copy_smem_to_gmem(merged_lse_smem, merged_lse_gmem.at[rows])

    plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def merge_states(
    out: jax.Array, lse: jax.Array, *, config: Config | None = None, interpret=False
) -> tuple[jax.Array, jax.Array]:
    """One state from partial ones. (0, -inf) is the neutral state; +inf counts as -inf.

    Args: out: [splits, ..., v_dim], float32, bfloat16 or float16. lse: f32[splits, ...], natural log.
      Rows are padded to 64 and columns to 8 or `block_v` here; aligned shapes are not copied.
    Returns: out [..., v_dim] in `out.dtype`, lse f32[...].
    Raises: ValueError if the shapes disagree.
    """
    lead = out.shape[1:-1]
    out, lse = partial_states.flat(out, lse)
    splits, rows, v_dim = out.shape
    if out.size == 0:
        return partial_states.nothing(lead, v_dim, out.dtype)
    config = config or heuristic(v_dim=v_dim)
    more_rows, more_cols = -rows % config.block_rows, -v_dim % config.block_v
    if more_rows or more_cols:
        out = jnp.pad(out, ((0, 0), (0, more_rows), (0, more_cols)))
        lse = jnp.pad(lse, ((0, 0), (0, more_rows)), constant_values=-jnp.inf)
    merged, merged_lse = _launch(out, lse, config, interpret)
    return merged[:rows, :v_dim].reshape(*lead, v_dim), merged_lse[:rows].reshape(lead)


def _launch(out, lse, config: Config, interpret):
    splits, rows, v_dim = out.shape
    launch = pl.kernel(
        functools.partial(_kernel, config=config),
        out_type=(jax.ShapeDtypeStruct((rows, v_dim), out.dtype), jax.ShapeDtypeStruct((rows,), jnp.float32)),
        mesh=plgpu.Mesh(grid=(rows // config.block_rows, v_dim // config.block_v), grid_names=("rows", "cols")),
        cost_estimate=_cost(splits, rows, v_dim, out.dtype.itemsize),
        interpret=interpret,
    )
    return launch(out, lse)  # pyright: ignore[reportCallIssue]  # typed as the decorator form of pl.kernel


def _cost(splits: int, rows: int, v_dim: int, itemsize: int) -> pl.CostEstimate:
    return pl.CostEstimate(
        flops=2 * splits * rows * v_dim + rows * v_dim,  # one fused multiply-add a part and value, one division
        bytes_accessed=(splits + 1) * rows * (v_dim * itemsize + 4),
        transcendentals=(splits + 1) * rows,
    )
