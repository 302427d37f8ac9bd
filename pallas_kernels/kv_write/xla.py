"""Write a step's keys and values into paged caches, in place when the caches are donated."""

import jax

from pallas_kernels._common import float8, quantise
from pallas_kernels._common.put import put_rows
from pallas_kernels._common.rotary import rotate
from pallas_kernels._common.rows import of_slots


def write_kv(
    k_pages: jax.Array,
    v_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    *,
    page_offset: jax.Array | int = 0,
    num_pages: int | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
    kv_dtype: jax.typing.DTypeLike | None = None,
) -> tuple[jax.Array, ...]:
    """Store rows at their slots of one layer.

    Args:
      k_pages, v_pages: [pages_total, page_size, kv_heads, k_dim | v_dim], all layers; donate them.
      k, v: [tokens, kv_heads, k_dim | v_dim].
      slots: i32[tokens], page * page_size + offset within the layer; -1, or past the layer's end, writes nothing.
      page_offset: first page of the layer; may be traced.
      num_pages: pages a layer (static), so that no slot reaches the next one; None: all pages after `page_offset`.
      k_scale, v_scale: f32 scalars; the stored value is value * (1 / scale) in float32, saturated and rounded to
        nearest even.
      k_scales, v_scales: f32[pages_total, page_size, kv_heads]; each row of each head gets its own scale,
        absolute maximum / largest stored value, which is written there.
      kv_dtype: what uint8 pages are the bits of, float8_e4m3fn or float8_e5m2; None for other pages.

    Returns: k_pages, v_pages, and k_scales, v_scales if given.
    Raises: ValueError if shapes disagree or one scale of a pair is missing.
    """
    rows, held = of_slots(k_pages, slots, page_offset, num_pages)
    kind = float8.kind_of(k_pages, kv_dtype)
    if k_scales is None or v_scales is None:
        values = tuple(
            float8.to_stored(quantise.stored(x, scale, kind), k_pages.dtype)
            for x, scale in ((k, k_scale), (v, v_scale))
        )
        return put_rows((k_pages, v_pages), values, rows, held)
    # Without the barrier 1 / (top / largest) becomes largest / top: rows would be divided by another scale than theirs.
    scales = jax.lax.optimization_barrier((quantise.row_scale(k, kind), quantise.row_scale(v, kind)))
    values = (
        float8.to_stored(quantise.stored(x, scale[..., None], kind), k_pages.dtype)
        for x, scale in zip((k, v), scales, strict=True)
    )
    return put_rows((k_pages, v_pages, k_scales, v_scales), (*values, *scales), rows, held)


def rotate_write_kv(
    k_pages: jax.Array, v_pages: jax.Array, rows: jax.Array, cos: jax.Array, sin: jax.Array, slots: jax.Array, **where
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rotated queries, and the pages with the rotated keys and the values of `rows` at `slots`.

    Args:
      rows: [tokens, q_heads * dim + kv_heads * (dim + v_dim)]: queries, keys and values of each head in turn.
      cos, sin: f32[tokens, dim / 2]; features i and i + dim / 2 of a head are a pair.
      The rest as in `write_kv`, without scales a row.
    Returns: q [tokens, q_heads, dim] in rows' dtype, of padding rows too; k_pages, v_pages.
    """
    tokens, (kv_heads, dim), v_dim = rows.shape[0], k_pages.shape[2:], v_pages.shape[3]
    first = rows.shape[1] - kv_heads * v_dim
    turned = rotate(rows[:, :first].reshape(tokens, -1, dim), cos, sin)
    q, k = turned[:, :-kv_heads], turned[:, -kv_heads:]
    k_pages, v_pages = write_kv(k_pages, v_pages, k, rows[:, first:].reshape(tokens, kv_heads, v_dim), slots, **where)
    return q, k_pages, v_pages
