"""Absorbed latent attention on GPUs without a kernel set of their own: the portable kernel over latent rows."""

import jax

from pallas_kernels._common import latent_rows, masks, rows
from pallas_kernels._common.masks import Rules
from pallas_kernels.attention import gpu
from pallas_kernels.attention.gpu_config import Config


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
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of absorbed queries over latent rows, float or packed 8-bit ones; see `pallas_kernels.mla.xla`.

    Args, returns, raises: as there and in `attention.gpu.paged_attention`.
    """
    rows.check_paged(pages, page_table, seq_lens)
    width = latent_rows.width(pages, latent_dim)
    if q.shape[2] != width:
        raise ValueError(f"q has heads of {q.shape[2]}, the rows hold {width}: want equal widths")
    rules = Rules(sm_scale=sm_scale, mask=mask)
    return gpu.attend(
        q,
        rows.flat(pages)[:, None],
        None,
        None,
        None,
        where=page_table,
        offset=page_offset,
        page_size=pages.shape[1],
        kind=latent_rows.kind(pages),
        seq_lens=seq_lens,
        cu_q_lens=cu_q_lens,
        sinks=None,
        tree=masks.make_tree(rules, q.shape[0], tree_bits, tree_starts, tree_kv_positions, q_positions),
        rules=rules,
        max_q_len=max_q_len,
        num_splits=num_splits,
        config=config,
        interpret=interpret,
        latent_dim=latent_dim,
    )
