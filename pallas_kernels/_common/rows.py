"""Keys and values as rows: where a request's keys lie, and fetching them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._common import float8, ints, latent_rows

MAX_ROWS = 2**31 - 1  # row ids are int32


class Stored(NamedTuple):
    """Stored keys and values, a row a token: what they are, the way from sequence indices to rows, and fetching."""

    kv_heads: int
    k_dim: int
    v_dim: int
    arrays: tuple  # all arrays behind `locate` and `fetch`, for what must vary over a mesh as they do
    k_scale: jax.Array | None  # None, f32 scalar, or f32[rows, kv_heads]
    v_scale: jax.Array | None
    locate: Callable[[jax.Array, jax.Array], jax.Array]  # (seq i32[lanes], keys i32[lanes, n]) -> rows i32[lanes, n]
    fetch: Callable[[jax.Array, Any], tuple[jax.Array, jax.Array]]
    """(rows i32[lanes, n], a query's dtype) -> k [lanes, n, kv_heads, k_dim], v [lanes, n, kv_heads, v_dim]; 8-bit
    floats that are stored as bits come in the query's dtype, the rest as stored."""


def check_slots(k_pages: jax.Array) -> None:
    """Raise ValueError if row ids of these pages [pages, page_size, ...] would not fit int32."""
    slots = k_pages.shape[0] * k_pages.shape[1]
    if slots > MAX_ROWS:
        raise ValueError(f"k_pages holds {slots} slots: want at most {MAX_ROWS}, the int32 limit; use fewer pages")


def check_paged(pages: jax.Array, page_table: jax.Array, seq_lens: jax.Array) -> None:
    """Raise ValueError if row ids would not fit int32, or the table is not a row a request."""
    check_slots(pages)
    if page_table.shape[0] != seq_lens.shape[0]:
        raise ValueError(
            f"page_table.shape[0]={page_table.shape[0]} but seq_lens.shape[0]={seq_lens.shape[0]}: one row a request"
        )


def check_heads(q: jax.Array, kv_heads: int, k_dim: int) -> None:
    """Raise ValueError if queries [tokens, q_heads, dim] do not go with `kv_heads` keys of `k_dim`."""
    if q.shape[1] % kv_heads or q.shape[2] != k_dim:
        raise ValueError(
            f"q has {q.shape[1]} heads of {q.shape[2]}, the keys {kv_heads} of {k_dim}: want a multiple of the heads, "
            "and equal widths"
        )


def check_lens(seq_lens: jax.Array, cu_q_lens: jax.Array) -> None:
    """Raise ValueError if the first rows of the requests' queries are not one more than the requests."""
    if cu_q_lens.shape != (seq_lens.shape[0] + 1,):
        raise ValueError(f"cu_q_lens.shape={cu_q_lens.shape} for {seq_lens.shape[0]} requests: want one entry more")


def check_splits(num_splits: int, sinks: jax.Array | None) -> None:
    """Raise ValueError if keys cannot be attended in `num_splits` parts, or sinks would count in each of them."""
    if num_splits < 1 or (num_splits > 1 and sinks is not None):
        raise ValueError(
            f"num_splits={num_splits} with sinks {'given' if sinks is not None else 'None'}: want at least 1, and "
            "sinks applied once, after merge_states, when there is more than one"
        )


def of_slots(
    pages: jax.Array, slots: jax.Array, page_offset: jax.Array | int, num_pages: int | None
) -> tuple[jax.Array, jax.Array]:
    """Where slots of one layer lie among the rows of all: rows i32[tokens], and which of them are held, bool[tokens].

    Args: as in `kv_write.xla.write_kv`; a slot below 0, or past the layer's end, is not held.
    """
    check_slots(pages)
    capacity = (pages.shape[0] if num_pages is None else num_pages) * pages.shape[1]
    held = (slots >= 0) & (slots < capacity)
    return jnp.asarray(page_offset, jnp.int32) * pages.shape[1] + slots, held


def paged(k_pages, v_pages, k_scale, v_scale, page_table, page_offset, kv_dtype) -> Stored:
    """Rows of a paged cache. Only table entries of the asked keys are used."""
    kind = float8.kind_of(k_pages, kv_dtype)
    k_scale, v_scale = (x if x is None or x.ndim == 0 else flat(x) for x in (k_scale, v_scale))
    locate = in_pages(page_table, page_offset, k_pages.shape[1])
    return _separate(flat(k_pages), flat(v_pages), k_scale, v_scale, kind, locate, (page_table, page_offset))


def packed(k, v, k_scale, v_scale, cu_kv_lens) -> Stored:
    """Rows of keys that lie request after request."""

    def locate(seq, keys):
        return ints.pick(cu_kv_lens, seq)[:, None] + keys

    return _separate(k, v, k_scale, v_scale, k.dtype, locate, (cu_kv_lens,))


def latents(pages, latent_dim: int, page_table, page_offset) -> Stored:
    """Rows of a paged latent cache, as `latent_rows` has them: one KV head whose values are the front of its keys."""
    width, rows = latent_rows.width(pages, latent_dim), flat(pages)

    def fetch(at, dtype):
        # The barrier makes the row one tile that both products read: without it each would gather its own.
        row = lax.optimization_barrier(latent_rows.unpack(ints.pick(rows, at), latent_dim, dtype))[:, :, None, :]
        return row, row[..., :latent_dim]

    locate = in_pages(page_table, page_offset, pages.shape[1])
    return Stored(1, width, latent_dim, (pages, page_table, page_offset), None, None, locate, fetch)


def flat(pages: jax.Array) -> jax.Array:
    """[pages, page_size, ...] as [rows, ...]."""
    return pages.reshape(pages.shape[0] * pages.shape[1], *pages.shape[2:])


def in_pages(page_table: jax.Array, page_offset, page_size: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """`Stored.locate` of paged rows. Only table entries of the asked keys are used."""

    def locate(seq, keys):
        ids = ints.clipped(page_table, seq[:, None], ints.div(keys, page_size))
        return (ids + page_offset) * page_size + ints.rem(keys, page_size)

    return locate


def _separate(k, v, k_scale, v_scale, kind, locate, arrays) -> Stored:
    # keys and values in arrays of their own
    if k.shape[0] == 0:  # no keys at all: nothing to point a masked key at
        k, v = (jnp.zeros((1, *x.shape[1:]), x.dtype) for x in (k, v))

    def fetch(at, dtype):
        return float8.from_stored(take(k, at), kind, dtype), float8.from_stored(take(v, at), kind, dtype)

    arrays = (k, v, k_scale, v_scale, *arrays)
    return Stored(k.shape[1], k.shape[2], v.shape[2], arrays, k_scale, v_scale, locate, fetch)


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
