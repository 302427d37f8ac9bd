"""Keys and values as rows: where a request's keys lie, and fetching them."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._common import float8, ints

MAX_ROWS = 2**31 - 1  # row ids are int32


class Stored(NamedTuple):
    """Stored keys and values, a row a token, and the way from sequence indices to rows."""

    k: jax.Array  # [rows, kv_heads, k_dim]
    v: jax.Array  # [rows, kv_heads, v_dim]
    k_scale: jax.Array | None  # None, f32 scalar, or f32[rows, kv_heads]
    v_scale: jax.Array | None
    kind: jnp.dtype  # of k and v, whose bits they are where they are uint8
    locate: Callable[[jax.Array, jax.Array], jax.Array]  # (seq i32[lanes], keys i32[lanes, n]) -> rows i32[lanes, n]


def check_slots(k_pages: jax.Array) -> None:
    """Raise ValueError if row ids of these pages [pages, page_size, ...] would not fit int32."""
    slots = k_pages.shape[0] * k_pages.shape[1]
    if slots > MAX_ROWS:
        raise ValueError(f"k_pages holds {slots} slots: want at most {MAX_ROWS}, the int32 limit; use fewer pages")


def paged(k_pages, v_pages, k_scale, v_scale, page_table, page_offset, kv_dtype) -> Stored:
    """Rows of a paged cache. Only table entries of the asked keys are used."""
    pages, page_size = k_pages.shape[:2]

    def flat(x):
        return x.reshape(pages * page_size, *x.shape[2:])

    def locate(seq, keys):
        ids = ints.clipped(page_table, seq[:, None], ints.div(keys, page_size))
        return (ids + page_offset) * page_size + ints.rem(keys, page_size)

    k_scale, v_scale = (x if x is None or x.ndim == 0 else flat(x) for x in (k_scale, v_scale))
    return Stored(flat(k_pages), flat(v_pages), k_scale, v_scale, float8.kind_of(k_pages, kv_dtype), locate)


def packed(k, v, k_scale, v_scale, cu_kv_lens) -> Stored:
    """Rows of keys that lie request after request."""
    return Stored(k, v, k_scale, v_scale, k.dtype, lambda seq, keys: ints.pick(cu_kv_lens, seq)[:, None] + keys)


def take(x: jax.Array, rows: jax.Array) -> jax.Array:
    """x[rows]: [n, heads, ...] and i32[lanes, keys] -> [lanes, keys, heads, ...]; rows must be in range."""
    if x.ndim < 3:
        return ints.pick(x, rows)
    # XLA:CPU copies rows of heads * dim floats 2.3x faster than [heads, dim] (13 against 30 us for 512 keys of 3 x 64
    # float32: the inner loop of 64 is not vectorised). Elsewhere merging the two would cost a copy of the pool.
    return lax.platform_dependent(x, rows, cpu=_take_merged, default=_take_split)


def _take_merged(x, rows):
    merged = ints.pick(x.reshape(x.shape[0], -1), rows)
    return lax.optimization_barrier(merged).reshape(*rows.shape, *x.shape[1:])


def _take_split(x, rows):
    return ints.pick(x, rows)
