"""Rows of 32-bit words put into a TPU pool, a copy each, in place when the pool is donated.

XLA's scatter would lay out anew a pool whose tokens are one tile row each, and so copy it twice.
"""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._common.put import put_rows

_TOKENS = 8192  # of a call: their rows are numbers in scalar memory


def put_words(pool: jax.Array, words: jax.Array, rows: jax.Array, held: jax.Array) -> jax.Array:
    """Store words[i] at rows[i] of the pool, where held[i].

    Args: pool: i32[pages, page_size, tiles, 1, 128]; donate it. words: i32[tokens, tiles, 1, 128]. rows: i32[tokens],
      page * page_size + offset. held: bool[tokens]; no row is held twice.
    """
    return lax.platform_dependent(pool, words, rows, held, tpu=copy_words, default=_scatter)


def _scatter(pool, words, rows, held):
    return put_rows((pool,), (words,), rows, held)[0]


def copy_words(pool: jax.Array, words: jax.Array, rows: jax.Array, held: jax.Array, *, interpret: Any = False):
    """The same, by a Pallas kernel."""
    at = jnp.where(held, rows, -1)
    for first in range(0, words.shape[0], _TOKENS):
        pool = _call(pool, words[first : first + _TOKENS], at[first : first + _TOKENS], interpret)
    return pool


def _call(pool, words, at, interpret):
    smem, hbm = (pl.BlockSpec(memory_space=space) for space in (pltpu.SMEM, pl.ANY))
    return pl.pallas_call(
        functools.partial(_kernel, page_size=pool.shape[1]),
        in_specs=[smem, hbm, hbm],
        out_specs=hbm,
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        scratch_shapes=[pltpu.SemaphoreType.DMA(())],
        input_output_aliases={2: 0},
        cost_estimate=pl.CostEstimate(flops=0, bytes_accessed=2 * words.size * 4, transcendentals=0),
        interpret=interpret,
        name="jattn_write_words",
    )(at, words, pool)


def _kernel(at, words, _, pool, arrived, *, page_size: int):
    tokens = words.shape[0]

    def start(i, copies):
        row = at[i]

        @pl.when(row >= 0)
        def _():
            target = pool.at[lax.div(row, page_size), lax.rem(row, page_size)]
            pltpu.make_async_copy(words.at[i], target, arrived).start()

        return copies + (row >= 0).astype(jnp.int32)

    def wait(_, x):
        pltpu.make_async_copy(words.at[0], words.at[0], arrived).wait()
        return x

    lax.fori_loop(0, lax.fori_loop(0, tokens, start, jnp.int32(0)), wait, 0)
