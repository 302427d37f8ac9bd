"""Merge split-KV partials by log-sum-exp weight, on TPU: parts stream through vector memory, sums stay there.

Source: https://pytorch.org/blog/flash-decoding/ (reduction); arXiv:2205.14135, section 3.1.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._common import partial_states

_LANES = 128
_STEP = 8  # parts a step: the rows of a register of their weights


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One program merges `block_rows` rows by `block_v` value columns over all parts."""

    block_rows: int = 256  # (token, head) rows; their weights lie along lanes
    block_v: int = 512  # value columns

    def __post_init__(self):
        if self.block_rows % _LANES or self.block_v % _LANES or min(self.block_rows, self.block_v) < 1:
            raise ValueError(f"want block_rows and block_v multiples of {_LANES}, got {self}")


def vmem_bytes(config: Config, *, splits: int, v_dim: int, itemsize: int) -> int:
    """Vector memory of a program: two steps of parts, two results, the sum, and the log-sum-exps."""
    columns = min(config.block_v, -(-v_dim // _LANES) * _LANES)
    tile = config.block_rows * columns
    parts = 2 * min(splits, _STEP) * tile * itemsize
    lses = 2 * (-(-splits // _STEP) + 1) * _STEP * config.block_rows * 4
    return parts + 2 * tile * itemsize + tile * 4 + lses + 2 * config.block_rows * _LANES * 4


def heuristic(*, splits: int, v_dim: int, itemsize: int, vmem: int = 12 << 20) -> Config:
    """The largest program that fits in `vmem` bytes: 12 MiB leaves room on a v4, the smallest.

    Raises: ValueError if not even 128 rows by 128 columns do, which takes tens of thousands of parts.
    """
    sizes = [Config(block_rows=rows, block_v=cols) for cols in (512, 256, 128) for rows in (256, 128)]
    for config in sizes:
        if vmem_bytes(config, splits=splits, v_dim=v_dim, itemsize=itemsize) <= vmem:
            return config
    raise ValueError(f"{splits} parts of {v_dim} columns do not fit in {vmem} bytes of vector memory: merge fewer")


def _kernel(lse_ref, out_ref, merged_ref, merged_lse_ref, acc_ref, *, step: int):
    # lse [splits, rows], out [step, rows, v_dim] -> merged [rows, v_dim], merged_lse [1, rows]
    i, steps = pl.program_id(2), pl.num_programs(2)
    lse = lse_ref[...]
    top = jnp.max(lse, axis=0, keepdims=True)
    top = jnp.where(top == -jnp.inf, 0.0, top)  # an empty row weighs 0, not exp(-inf + inf)
    total = jnp.sum(jnp.exp(lse - top), axis=0, keepdims=True)
    seen = total > 0
    some = jnp.where(seen, total, 1.0)

    @pl.when(i == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)
        merged_lse_ref[...] = jnp.where(seen, top + jnp.log(some), -jnp.inf)

    weights = jnp.exp(lse_ref[pl.ds(pl.multiple_of(i * step, step), step), :] - top) / some
    columns = weights.T  # [rows, step]: a part's weights down the rows of its tile
    acc = acc_ref[...]
    for part in range(step):
        weight = columns[:, part : part + 1]
        # an empty part may hold anything, NaN too, and so may what lies past the last part
        acc += weight * jnp.where(weight > 0, out_ref[part].astype(jnp.float32), 0.0)
    acc_ref[...] = acc

    @pl.when(i == steps - 1)
    def _():
        merged_ref[...] = acc.astype(merged_ref.dtype)


@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def merge_states(
    out: jax.Array, lse: jax.Array, *, config: Config | None = None, interpret=False
) -> tuple[jax.Array, jax.Array]:
    """One state from partial ones. (0, -inf) is the neutral state; +inf counts as -inf.

    Args: out: [splits, ..., v_dim], float32 or bfloat16. lse: f32[splits, ...], natural log.
    Returns: out [..., v_dim] in `out.dtype`, lse f32[...].
    Raises: ValueError if the shapes disagree.
    """
    lead = out.shape[1:-1]
    out, lse = partial_states.flat(out, lse)
    splits, rows, v_dim = out.shape
    if out.size == 0:
        return partial_states.nothing(lead, v_dim, out.dtype)
    config = config or heuristic(splits=splits, v_dim=v_dim, itemsize=out.dtype.itemsize)
    lse = jnp.where(lse == jnp.inf, -jnp.inf, lse)
    step = min(splits, _STEP)
    lse = jnp.pad(lse, ((0, -splits % step), (0, 0)), constant_values=-jnp.inf)
    merged, merged_lse = _launch(out, lse, config, step, interpret)
    return merged.reshape(*lead, v_dim), merged_lse.reshape(lead)


def _launch(out, lse, config: Config, step: int, interpret):
    splits, rows, v_dim = out.shape
    tall, wide = min(config.block_rows, rows), min(config.block_v, v_dim)
    grid = (pl.cdiv(rows, tall), pl.cdiv(v_dim, wide), lse.shape[0] // step)
    return pl.pallas_call(
        functools.partial(_kernel, step=step),
        grid=grid,
        in_specs=[
            pl.BlockSpec((lse.shape[0], tall), lambda row, col, i: (0, row)),
            pl.BlockSpec((step, tall, wide), lambda row, col, i: (i, row, col)),
        ],
        out_specs=[
            pl.BlockSpec((tall, wide), lambda row, col, i: (row, col)),
            pl.BlockSpec((1, tall), lambda row, col, i: (0, row)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((rows, v_dim), out.dtype),
            jax.ShapeDtypeStruct((1, rows), jnp.float32),
        ],
        scratch_shapes=[pltpu.VMEM((tall, wide), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        cost_estimate=_cost(splits, rows, v_dim, out.dtype.itemsize),
        interpret=interpret,
        name="jattn_merge_states",
    )(lse, out)


def _cost(splits: int, rows: int, v_dim: int, itemsize: int) -> pl.CostEstimate:
    return pl.CostEstimate(
        flops=2 * splits * rows * v_dim + 2 * splits * rows,
        bytes_accessed=(splits + 1) * rows * (v_dim * itemsize + 4),
        transcendentals=(splits + 1) * rows,
    )
