"""Write a step's keys and values into a TPU pool of rows, in place when it is donated."""

from typing import Any

import jax

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
    kv_dtype: jax.typing.DTypeLike | None = None,
    **scales,
) -> tuple[jax.Array | None, ...]:
    """Store rows at their slots of one layer; see `pallas_kernels.kv_write.xla`.

    Args: as there, but for the pool: k_pages [pages_total, page_size, lanes] as `pallas_kernels._common.tpu_rows` has
      it, and v_pages None. A pool of two arrays is written as plain JAX does.
    Returns: the pool, and None for its second half.
    """
    where: dict[str, Any] = dict(page_offset=page_offset, num_pages=num_pages)
    if v_pages is not None:
        scales |= dict(k_scale=k_scale, v_scale=v_scale)
        return xla.write_kv(k_pages, v_pages, k, v, slots, kv_dtype=kv_dtype, **where, **scales)
    kind = float8.kind_of(k_pages, kv_dtype)
    rows, held = of_slots(k_pages, slots, page_offset, num_pages)
    values = tpu_rows.pack(*(quantise.stored(x, scale, kind) for x, scale in ((k, k_scale), (v, v_scale))))
    if values.shape[-1] != k_pages.shape[-1]:
        raise ValueError(f"k{list(k.shape)}, v{list(v.shape)} take {values.shape[-1]} lanes, not {k_pages.shape[-1]}")
    return *put_rows((k_pages,), (values,), rows, held), None
