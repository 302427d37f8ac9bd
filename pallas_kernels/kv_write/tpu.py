"""Write a step's keys and values into a TPU pool of rows, in place when it is donated."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._common import float8, quantise, tpu_rows
from pallas_kernels._common.put import put_rows
from pallas_kernels._common.rows import of_slots
from pallas_kernels.kv_write import xla


def write_kv(
    k_pages: jax.Array,
    v_pages: jax.Array | None,
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
) -> tuple[jax.Array | None, ...]:
    """Store rows at their slots of one layer; see `pallas_kernels.kv_write.xla`.

    Args: as there, but for the pool: k_pages [pages_total, page_size, lanes] as `pallas_kernels._common.tpu_rows` has
      it, or int32 words of entries of kv_dtype, and v_pages None. A pool of two arrays is written as plain JAX does.
    Returns: the pool, None for its second half, and k_scales, v_scales if given.
    """
    where: dict[str, Any] = dict(page_offset=page_offset, num_pages=num_pages)
    if v_pages is not None:
        scales: dict[str, Any] = dict(k_scale=k_scale, v_scale=v_scale, k_scales=k_scales, v_scales=v_scales)
        return xla.write_kv(k_pages, v_pages, k, v, slots, kv_dtype=kv_dtype, **where, **scales)
    words = k_pages.ndim == 5 and kv_dtype is not None
    kind = jnp.dtype(kv_dtype) if words else float8.kind_of(k_pages, kv_dtype)
    rows, held = of_slots(k_pages, slots, page_offset, num_pages)
    by_token = ()
    if k_scales is not None and v_scales is not None:
        # the barrier keeps 1 / (top / largest) from becoming largest / top
        by_token = jax.lax.optimization_barrier((quantise.row_scale(k, kind), quantise.row_scale(v, kind)))
        k_scale, v_scale = (scale[..., None] for scale in by_token)
    values = tpu_rows.pack(*(quantise.stored(x, scale, kind) for x, scale in ((k, k_scale), (v, v_scale))))
    if k_pages.ndim == 5:
        values = tpu_rows.to_words(values)
    if values.shape[1:] != k_pages.shape[2:]:
        raise ValueError(
            f"a token of k{list(k.shape)}, v{list(v.shape)} is {list(values.shape[1:])}, of the pool "
            f"{list(k_pages.shape[2:])}: want a cache of this spec"
        )
    if not by_token or k_scales is None or v_scales is None:
        return *put_rows((k_pages,), (values,), rows, held), None
    pool, *written = put_rows((k_pages, k_scales, v_scales), (values, *by_token), rows, held)
    return pool, None, *written
