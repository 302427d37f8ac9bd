"""Latent (MLA) attention on TPU: absorbed decode, verification of chains and trees, and prefill, in one call.

A latent row is the key of every head and its front the value, so a block is copied once and both products read it. The
kernel is that of `attention.tpu` over such rows, with query heads and query tokens side by side in a product.
Source: arXiv:2405.04434, section 2.1 (DeepSeek-V2).
"""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._common import ints, rows, tpu_rows
from pallas_kernels._common.tpu_devices import device_named
from pallas_kernels._common.tpu_rows import LANES, LatentRow
from pallas_kernels.attention import tpu as attention
from pallas_kernels.attention.tpu_config import Config
from pallas_kernels.attention.tpu_write import together
from pallas_kernels.kv_write.tpu import put
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
    fresh: attention.Fresh | None = None,
    kv_dtype: jax.typing.DTypeLike | None = None,
    config: Config | tuple[Config, ...] | None = None,
    device: str | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, ...]:
    """Attention of absorbed queries over latent rows; see `pallas_kernels.mla.xla`.

    Args: as there, but for the pool and the sizes:
      pages: [pages_total, page_size, lanes], float; latent, key, and zeros up to a multiple of 128 lanes; or int8, as
        `tpu_rows.LatentBytes`; or int32 words of such rows, of entries of kv_dtype (float8_e4m3fn for 8-bit rows).
      fresh, config, device, interpret: as in `attention.tpu.paged_attention`.
    Returns: out: q.dtype [tokens, heads, latent_dim]. lse: f32[tokens, heads]. With `fresh` also the pool.
    """
    rope_dim = q.shape[2] - latent_dim
    row = _row(pages, kv_dtype, q.shape[1], latent_dim, rope_dim)
    if config is None:
        config = _configs(q, pages, kv_dtype, row, max_q_len, tree_bits, device, writes=fresh is not None)
    gap = row.k_dim - q.shape[2]  # where the key begins behind the latent's last lanes
    if gap:
        q = jnp.concatenate(
            [q[..., :latent_dim], jnp.zeros((*q.shape[:2], gap), q.dtype), q[..., latent_dim:]], axis=-1
        )
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
        kv_dtype=kv_dtype if row.packed is None else None,
        num_splits=num_splits,
        fresh=fresh,
        config=config,
        device=device,
        interpret=interpret,
    )


def write_attend_latent(
    q: jax.Array,
    latent: jax.Array,
    k_rope: jax.Array,
    pages: jax.Array,
    *,
    slots: jax.Array,
    num_pages: int | None = None,
    page_offset: jax.Array | int = 0,
    **more: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Store a step's latents, then attend, in one kernel where `attention.tpu_write.write_attend` would.

    Args: q, pages, page_offset, more: as in `attend_latent`. latent, k_rope, slots, num_pages: as in `write_latent`.
    Returns: out, lse, and the pool.
    """
    row = _row(pages, more.get("kv_dtype"), q.shape[1], latent.shape[1], k_rope.shape[1])
    length, bits, device, kv_dtype = (more.get(name) for name in ("max_q_len", "tree_bits", "device", "kv_dtype"))
    given = more.get("config") or _configs(q, pages, kv_dtype, row, length, bits, device, writes=True)
    configs = given if isinstance(given, tuple) else (given,)
    call = functools.partial(attend_latent, **(more | dict(config=configs)))
    rows = as_rows(pages, latent, k_rope, kv_dtype=kv_dtype)
    fused = attention.can_write(configs, length)
    return together(call, q, pages, rows, slots, page_offset, num_pages, fused=fused)


def _row(pages, kv_dtype, num_heads: int, latent_dim: int, rope_dim: int) -> LatentRow:
    packed = is_packed(pages, kv_dtype)
    return row_of(num_heads=num_heads, latent_dim=latent_dim, rope_dim=rope_dim, packed=packed)


def is_packed(pages: jax.Array, kv_dtype) -> bool:
    """Whether a pool of rows or words holds latents in 8 bits."""
    return jnp.dtype(kv_dtype or pages.dtype).itemsize == 1


def _configs(
    q, pages, kv_dtype, row: LatentRow, max_q_len: int, tree_bits, device, *, writes: bool
) -> tuple[Config, ...]:
    kind, chip = q.dtype if row.packed else jnp.dtype(kv_dtype or pages.dtype), device_named(device)
    facts = attention.facts_of(q, pages, row, kind, max_q_len, tree_bits, writes=writes)
    return heuristic(facts, vmem=attention.vmem_of(chip), cores=chip.cores)


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
    return put(pages, as_rows(pages, latent, k_rope, kv_dtype=kv_dtype), at, held)


def as_rows(pages: jax.Array, latent: jax.Array, k_rope: jax.Array, *, kv_dtype=None) -> jax.Array:
    """Latents [tokens, latent_dim] and keys [tokens, rope_dim] as a pool of rows or words holds them.

    Raises: ValueError if the pool is not one of such rows.
    """
    used, kind = latent.shape[-1] + k_rope.shape[-1], jnp.dtype(kv_dtype or pages.dtype)
    if is_packed(pages, kv_dtype):
        values = tpu_rows.LatentBytes(latent_dim=latent.shape[-1], rope_dim=k_rope.shape[-1]).pack(latent, k_rope)
    else:
        parts = [latent.astype(kind), k_rope.astype(kind), jnp.zeros((latent.shape[0], -used % LANES), kind)]
        values = jnp.concatenate(parts, axis=-1)
    values = tpu_rows.to_words(values) if pages.ndim == 5 else values
    if values.shape[1:] != pages.shape[2:]:
        raise ValueError(
            f"latent and key of {latent.shape[-1]} + {k_rope.shape[-1]} are {list(values.shape[1:])} a token, the pool "
            f"has {list(pages.shape[2:])}: build both alike"
        )
    return values


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
    if is_packed(pages, kv_dtype):
        held_as = tpu_rows.LatentBytes(latent_dim=latent_dim, rope_dim=rope_dim)
        got = tpu_rows.from_words(got, jnp.int8, held_as.lanes) if pages.ndim == 5 else got
        got = held_as.unpack(got, dtype)
    else:
        got = tpu_rows.from_words(got, kv_dtype, latent_dim + rope_dim) if pages.ndim == 5 else got
        got = got[:, : latent_dim + rope_dim].astype(dtype)
    got = jnp.where(held[:, None], got, jnp.zeros((), dtype))
    return got[:, :latent_dim], got[:, latent_dim:]
