"""Latent (MLA) attention on TPU: absorbed decode, verification of chains and trees, and prefill, in one call.

A latent row is the key of every head and its front the value, so a block is copied once and both products read it. The
kernel is that of `attention.tpu` over such rows, with query heads and query tokens side by side in a product.
Source: arXiv:2405.04434, section 2.1 (DeepSeek-V2).
"""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._common import ints, rows, tpu_rows
from pallas_kernels._common.put import put_rows
from pallas_kernels._common.tpu_devices import device_named
from pallas_kernels._common.tpu_rows import LANES
from pallas_kernels.attention import tpu as attention
from pallas_kernels.attention.tpu_config import Config, Facts
from pallas_kernels.mla.tpu_config import heuristic, row_of


def attend_latent(
    q: jax.Array,
    pages: jax.Array,
    *,
    latent_dim: int,
    page_table: jax.Array,
    page_offset: jax.Array | int = 0,
    seq_lens: jax.Array,
    cu_q_lens: jax.Array,
    max_q_len: int,
    sm_scale: float,
    mask: str = "causal",
    tree_bits: jax.Array | None = None,
    tree_starts: jax.Array | None = None,
    tree_kv_positions: jax.Array | None = None,
    q_positions: jax.Array | None = None,
    num_splits: int = 1,
    kv_dtype: jax.typing.DTypeLike | None = None,
    config: Config | tuple[Config, ...] | None = None,
    device: str | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of absorbed queries over latent rows; see `pallas_kernels.mla.xla`.

    Args: as there, but for the pool and the sizes:
      pages: [pages_total, page_size, lanes], float; latent, key, and zeros up to a multiple of 128 lanes; or int32
        words of such rows (`_common/tpu_rows.py`), of entries of kv_dtype.
      config, device, interpret: as in `attention.tpu.paged_attention`.
    Returns: out: q.dtype [tokens, heads, latent_dim]. lse: f32[tokens, heads].
    """
    row = row_of(num_heads=q.shape[1], latent_dim=latent_dim, rope_dim=q.shape[2] - latent_dim)
    chip = device_named(device)
    if config is None:
        facts = Facts(
            row=row,
            group=q.shape[1] // row.kv_heads,
            max_q_len=max_q_len,
            page_size=pages.shape[1],
            kv_bytes=jnp.dtype(kv_dtype or pages.dtype).itemsize,
            held_as_words=pages.ndim == 5,
            q_bytes=max(q.dtype.itemsize, 2),
            tree_words=0 if tree_bits is None else tree_bits.shape[1] + 1,
        )
        config = heuristic(facts, vmem=attention.vmem_of(chip), cores=chip.cores)
    return attention.paged_attention(
        q,
        pages,
        page_table=page_table,
        page_offset=page_offset,
        seq_lens=seq_lens,
        cu_q_lens=cu_q_lens,
        max_q_len=max_q_len,
        sm_scale=sm_scale,
        mask=mask,
        tree_bits=tree_bits,
        tree_starts=tree_starts,
        tree_kv_positions=tree_kv_positions,
        q_positions=q_positions,
        row=row,
        kv_dtype=kv_dtype,
        num_splits=num_splits,
        config=config,
        device=device,
        interpret=interpret,
    )


def write_latent(
    pages: jax.Array,
    latent: jax.Array,
    k_rope: jax.Array,
    slots: jax.Array,
    *,
    page_offset: jax.Array | int = 0,
    num_pages: int | None = None,
    kv_dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """Store latent rows at their slots of one layer: a scatter, which XLA does in place on a donated pool.

    Args: pages: [pages_total, page_size, lanes], all layers, as `attend_latent` reads them; donate it.
      The rest as in `mla.xla.write_latent`.
    Raises: ValueError if the widths disagree with the rows.
    """
    at, held = rows.of_slots(pages, slots, page_offset, num_pages)
    used, kind = latent.shape[-1] + k_rope.shape[-1], jnp.dtype(kv_dtype or pages.dtype)
    parts = [latent.astype(kind), k_rope.astype(kind), jnp.zeros((latent.shape[0], -used % LANES), kind)]
    values = jnp.concatenate(parts, axis=-1)
    values = tpu_rows.to_words(values) if pages.ndim == 5 else values
    if values.shape[1:] != pages.shape[2:]:
        raise ValueError(
            f"latent and key of {latent.shape[-1]} + {k_rope.shape[-1]} are {list(values.shape[1:])} a token, the pool "
            f"has {list(pages.shape[2:])}: build both alike"
        )
    return put_rows((pages,), (values,), at, held)[0]


def gather_latent(
    pages: jax.Array,
    slots: jax.Array,
    *,
    latent_dim: int,
    rope_dim: int,
    page_offset: jax.Array | int = 0,
    dtype: jax.typing.DTypeLike,
    kv_dtype: jax.typing.DTypeLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Latents and keys of slots of one layer, as `mla.xla.gather_latent`; the lanes do not say how wide a key is."""
    rows.check_slots(pages)
    held = slots >= 0
    at = jnp.where(held, slots, 0)
    # page and row, not a row of all pages: a view of small pages as rows would be a copy of the pool
    page, row = ints.div(at, pages.shape[1]) + jnp.asarray(page_offset, jnp.int32), ints.rem(at, pages.shape[1])
    got = ints.pick(pages, page, row)
    if pages.ndim == 5:
        got = tpu_rows.from_words(got, kv_dtype, latent_dim + rope_dim)
    got = got[:, : latent_dim + rope_dim].astype(dtype)
    got = jnp.where(held[:, None], got, jnp.zeros((), dtype))
    return got[:, :latent_dim], got[:, latent_dim:]
