"""Latent (MLA) attention in plain JAX: absorbed attention over pages, writing latent rows, gathering them.

Source: arXiv:2405.04434, section 2.1 (DeepSeek-V2); blocks as in `pallas_kernels.attention`.
"""

import jax
import jax.numpy as jnp

from pallas_kernels._common import ints, latent_rows, masks, rows
from pallas_kernels._common.masks import Rules
from pallas_kernels._common.put import put_rows
from pallas_kernels.attention.config import Config
from pallas_kernels.attention.xla import attend_stored
from pallas_kernels.mla.config import heuristic


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
    config: Config | tuple[Config, ...] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of absorbed queries over latent rows: the whole row is the key of every head, its front the value.

    Args:
      q: [tokens, heads, latent_dim + rope_dim], the absorbed part first.
      pages: [pages_total, page_size, row], all layers; rows as `_common/latent_rows.py` says, float or uint8.
      The rest as in `attention.xla.paged_attention`, which also says what is returned and raised.

    Returns: out: q.dtype [tokens, heads, latent_dim]. lse: f32[tokens, heads].
    """
    rows.check_paged(pages, page_table, seq_lens)
    stored = rows.latents(pages, latent_dim, page_table, page_offset)
    rules = Rules(sm_scale=sm_scale, mask=mask)
    tree = masks.make_tree(rules, q.shape[0], tree_bits, tree_starts, tree_kv_positions, q_positions)
    config = config or heuristic(max_q_len=max_q_len, num_heads=q.shape[1])
    return attend_stored(q, stored, seq_lens, cu_q_lens, None, tree, rules, max_q_len, num_splits, config)


def write_latent(
    pages: jax.Array,
    latent: jax.Array,
    k_rope: jax.Array,
    slots: jax.Array,
    *,
    page_offset: jax.Array | int = 0,
    num_pages: int | None = None,
) -> jax.Array:
    """Store latent rows at their slots of one layer.

    Args:
      pages: [pages_total, page_size, row], all layers; donate it.
      latent, k_rope: [tokens, latent_dim], [tokens, rope_dim].
      slots, page_offset, num_pages: as in `kv_write.xla.write_kv`.

    Returns: pages. A uint8 pool gets each group of 128 latents with its own scale, absolute maximum / 448.
    Raises: ValueError if the widths disagree with the rows.
    """
    at, held = rows.of_slots(pages, slots, page_offset, num_pages)
    want = latent_rows.width(pages, latent.shape[-1])
    if latent.shape[-1] + k_rope.shape[-1] != want:
        raise ValueError(
            f"latent and key of {latent.shape[-1]} + {k_rope.shape[-1]} for rows of {want}: build them alike"
        )
    return put_rows((pages,), (latent_rows.pack(latent, k_rope, pages.dtype),), at, held)[0]


def gather_latent(
    pages: jax.Array,
    slots: jax.Array,
    *,
    latent_dim: int,
    rope_dim: int | None = None,
    page_offset: jax.Array | int = 0,
    dtype,
) -> tuple[jax.Array, jax.Array]:
    """Latents and keys of slots of one layer.

    Args: pages: [pages_total, page_size, row]. slots: i32[rows]; -1 gives zeros. rope_dim: None: what the rows hold
      behind the latent. dtype: of what is returned.
    Returns: latent [rows, latent_dim], k_rope [rows, rope_dim].
    """
    rows.check_slots(pages)
    held_dim = latent_rows.width(pages, latent_dim) - latent_dim
    if rope_dim not in (None, held_dim):
        raise ValueError(f"rope_dim={rope_dim} but the rows hold keys of {held_dim}: build both alike")
    rope_dim = held_dim
    if pages.shape[0] == 0:
        return jnp.zeros((slots.shape[0], latent_dim), dtype), jnp.zeros((slots.shape[0], rope_dim), dtype)
    held = slots >= 0
    at = jnp.where(held, slots + jnp.asarray(page_offset, jnp.int32) * pages.shape[1], 0)
    got = latent_rows.unpack(ints.pick(rows.flat(pages), at), latent_dim, dtype).astype(dtype)
    got = jnp.where(held[:, None], got, jnp.zeros((), dtype))
    return got[:, :latent_dim], got[:, latent_dim:]
