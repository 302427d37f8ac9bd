"""Write a step's keys and values into paged caches on Hopper: a program moves one token's rows, in place.

The copy engine brings a row of all heads to shared memory and takes it to its slot, so that any head count and width
goes, and keys and values take one launch.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common.rows import check_slots


def write_kv(
    k_pages: jax.Array,
    v_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    *,
    page_offset: jax.Array | int = 0,
    num_pages: int | None = None,
    interpret=False,
) -> tuple[jax.Array, jax.Array]:
    """Store rows at their slots of one layer; see `pallas_kernels.kv_write.xla`.

    Args: as there, without scales: rows are stored in the pages' dtype. k_pages, v_pages: in place when donated.
    Raises: ValueError if shapes disagree, rows are not multiples of 16 bytes, or a value takes less than 2 bytes.
    """
    tokens, heads, k_dim = k.shape
    if k_pages.shape[2:] != (heads, k_dim) or v_pages.shape[2:] != v.shape[1:] or v.shape[0] != tokens:
        raise ValueError(
            f"k{list(k.shape)}, v{list(v.shape)} into pages k{list(k_pages.shape)}, v{list(v_pages.shape)}: want equal "
            "heads and widths, and as many keys as values"
        )
    sizes = [pages.shape[3] * pages.dtype.itemsize for pages in (k_pages, v_pages)]
    if any(size % 16 for size in sizes) or k_pages.dtype.itemsize < 2:
        raise ValueError(
            f"rows of {sizes[0]} and {sizes[1]} bytes of {k_pages.dtype}: the Hopper kernel writes unscaled rows of "
            "multiples of 16 bytes; resolve with prefer=('xla',)"
        )
    check_slots(k_pages)
    if tokens == 0:
        return k_pages, v_pages
    capacity = (k_pages.shape[0] if num_pages is None else num_pages) * k_pages.shape[1]
    launch = pl.kernel(
        functools.partial(_kernel, capacity=capacity),
        out_type=(),
        mesh=plgpu.Mesh(grid=(tokens,), grid_names=("tokens",)),
        cost_estimate=pl.CostEstimate(
            flops=0, bytes_accessed=2 * (k.size + v.size) * k.dtype.itemsize, transcendentals=0
        ),
        interpret=interpret,
        name="jattn_kv_write",
    )
    offset = jnp.asarray(page_offset, jnp.int32).reshape(1)
    refs = jax.new_ref(k_pages), jax.new_ref(v_pages)
    launch(k.astype(k_pages.dtype), v.astype(v_pages.dtype), slots, offset, *refs)  # pyright: ignore[reportCallIssue]
    return jax.freeze(refs[0]), jax.freeze(refs[1])


def _kernel(k, v, slots, offset, k_pages, v_pages, *, capacity: int):
    # k, v [tokens, heads, dim], slots i32[tokens], offset i32[1] -> pages [pages, page_size, heads, dim]
    def scoped(k_row, v_row, barrier):
        token = lax.axis_index("tokens")
        slot = slots[token]

        @pl.when((slot >= 0) & (slot < capacity))
        def _():
            size = k_pages.shape[1]
            page, place = slot // size + offset[0], slot % size
            plgpu.copy_gmem_to_smem(k.at[token], k_row, barrier)
            plgpu.copy_gmem_to_smem(v.at[token], v_row, barrier)
            plgpu.barrier_wait(barrier)
            plgpu.copy_smem_to_gmem(k_row, k_pages.at[page, place])
            plgpu.copy_smem_to_gmem(v_row, v_pages.at[page, place])
            plgpu.wait_smem_to_gmem(0)

    pl.run_scoped(
        scoped,
        plgpu.SMEM(k.shape[1:], k.dtype),
        plgpu.SMEM(v.shape[1:], v.dtype),
        plgpu.Barrier(num_arrivals=2),
    )
