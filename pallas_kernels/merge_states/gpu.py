"""Merge partial attention states on GPUs without a kernel set of their own, through Pallas's Triton lowering.

Source: https://pytorch.org/blog/flash-decoding/ (reduction); arXiv:2205.14135, section 3.1.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels._common import partial_states

_ELEMENTS = 2048  # a program


def merge_states(out: jax.Array, lse: jax.Array, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """One state from partial ones. (0, -inf) is the neutral state; +inf counts as -inf.

    Args: out: [splits, ..., v_dim], float. lse: f32[splits, ...], natural log.
    Returns: out [..., v_dim] in `out.dtype`, lse f32[...].
    Raises: ValueError if the shapes disagree.
    """
    lead = out.shape[1:-1]
    out, lse = partial_states.flat(out, lse)
    splits, rows, v_dim = out.shape
    if out.size == 0:
        return partial_states.nothing(lead, v_dim, out.dtype)
    block_v = 1 << (v_dim - 1).bit_length()
    block_rows = max(1, _ELEMENTS // block_v)
    launch = pl.pallas_call(
        functools.partial(_kernel, block=(block_rows, block_v)),
        out_shape=(jax.ShapeDtypeStruct((rows, v_dim), out.dtype), jax.ShapeDtypeStruct((rows,), jnp.float32)),
        grid=(-(-rows // block_rows),),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        cost_estimate=pl.CostEstimate(
            flops=2 * out.size,
            bytes_accessed=(splits + 1) * rows * (v_dim * out.dtype.itemsize + 4),
            transcendentals=(splits + 1) * rows,
        ),
        interpret=interpret,
        name="jattn_gpu_merge",
    )
    merged, merged_lse = launch(out, lse)
    return merged.reshape(*lead, v_dim), merged_lse.reshape(lead)


def _kernel(out, lse, merged, merged_lse, *, block: tuple[int, int]):
    splits, rows, v_dim = out.shape
    row = pl.program_id(0) * block[0] + jnp.arange(block[0], dtype=jnp.int32)
    col = jnp.arange(block[1], dtype=jnp.int32)[None, :]
    real = row < rows
    inside = real[:, None] & (col < v_dim)
    given = jnp.minimum(row, rows - 1)

    def step(i, carry):
        top, total, acc = carry
        log = plgpu.load(lse.at[jnp.full(row.shape, i), given], mask=real, other=-jnp.inf)
        log = jnp.where(log == jnp.inf, -jnp.inf, log)
        part = plgpu.load(out.at[jnp.full((1, 1), i), given[:, None], col], mask=inside, other=jnp.zeros((), out.dtype))
        new = jnp.maximum(top, log)
        safe = jnp.where(new == -jnp.inf, 0.0, new)  # all empty: exp(-inf - 0) = 0, not NaN
        decay, weight = jnp.exp(top - safe), jnp.exp(log - safe)
        kept = jnp.where(weight[:, None] > 0, part.astype(jnp.float32), 0.0)  # an empty part may hold anything
        return new, total * decay + weight, acc * decay[:, None] + weight[:, None] * kept

    nothing = (
        jnp.full((block[0],), -jnp.inf, jnp.float32),
        jnp.zeros((block[0],), jnp.float32),
        jnp.zeros(block, jnp.float32),
    )
    top, total, acc = lax.fori_loop(0, splits, step, nothing)
    seen = total > 0
    some = jnp.where(seen, total, 1.0)
    value = acc * jnp.where(seen, 1.0 / some, 0.0)[:, None]
    plgpu.store(merged.at[row[:, None], col], value.astype(merged.dtype), mask=inside)
    plgpu.store(merged_lse.at[row], jnp.where(seen, top + jnp.log(some), -jnp.inf), mask=real)
