"""Rows of 32-bit words put into a TPU pool, or moved within it, a copy each, in place when the pool is donated.

XLA's scatter would lay out anew a pool whose tokens are one tile row each, and so copy it twice.
"""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false

import functools
from collections.abc import Callable
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
    def store(i):
        target = pool.at[lax.div(at[i], page_size), lax.rem(at[i], page_size)]
        return pltpu.make_async_copy(words.at[i], target, arrived)

    one = pltpu.make_async_copy(words.at[0], words.at[0], arrived)
    _copied(words.shape[0], lambda i: at[i] >= 0, store, one)


def _copied(count: int, wanted: Callable, copy_of: Callable, one) -> None:
    # start copy i of `count`, where it is wanted, then wait for all; one: a copy of the same bytes
    def start(i, copies):
        pl.when(wanted(i))(lambda: copy_of(i).start())
        return copies + wanted(i).astype(jnp.int32)

    def wait(_, x):
        one.wait()
        return x

    lax.fori_loop(0, lax.fori_loop(0, count, start, jnp.int32(0)), wait, 0)


def move_words(
    pool: jax.Array, sources: jax.Array, targets: jax.Array, held: jax.Array, *, num_layers: int, interpret: Any = False
) -> jax.Array:
    """Copy row sources[i] of each layer to row targets[i], where held[i], by a Pallas kernel.

    Args: pool: i32[num_layers * pages, page_size, tiles, 1, 128]; donate it. sources, targets: i32[moves], rows within
      a layer. Of any `_TOKENS` moves all rows are read before one is written.
    """
    to = jnp.where(held, targets, -1)
    for first in range(0, sources.shape[0], _TOKENS):
        some = slice(first, first + _TOKENS)
        pool = _move_call(pool, sources[some], to[some], num_layers, interpret)
    return pool


def _move_call(pool, sources, to, num_layers: int, interpret):
    smem, hbm = (pl.BlockSpec(memory_space=space) for space in (pltpu.SMEM, pl.ANY))
    taken = jax.ShapeDtypeStruct((num_layers, sources.shape[0], *pool.shape[2:]), pool.dtype)
    sizes = dict(page_size=pool.shape[1], capacity=pool.shape[0] // num_layers * pool.shape[1])
    moved, _ = pl.pallas_call(
        functools.partial(_move_kernel, **sizes),
        in_specs=[smem, smem, hbm],
        out_specs=[hbm, hbm],
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype), taken],
        scratch_shapes=[pltpu.SemaphoreType.DMA(())],
        input_output_aliases={2: 0},
        cost_estimate=pl.CostEstimate(flops=0, bytes_accessed=4 * taken.size * 4, transcendentals=0),
        interpret=interpret,
        name="jattn_move_words",
    )(sources, to, pool)
    return moved


def _move_kernel(sources, to, _, pool, taken, arrived, *, page_size: int, capacity: int):
    num_layers, moves = taken.shape[:2]

    def row(at, layer):
        at = at + layer * capacity
        return pool.at[lax.div(at, page_size), lax.rem(at, page_size)]

    def each(copy_of):
        def copy(i):
            return copy_of(lax.div(i, moves), lax.rem(i, moves))

        one = pltpu.make_async_copy(taken.at[0, 0], taken.at[0, 0], arrived)
        _copied(num_layers * moves, lambda i: to[lax.rem(i, moves)] >= 0, copy, one)

    each(lambda layer, move: pltpu.make_async_copy(row(sources[move], layer), taken.at[layer, move], arrived))
    each(lambda layer, move: pltpu.make_async_copy(taken.at[layer, move], row(to[move], layer), arrived))
