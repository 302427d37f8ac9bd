"""Sizes of the TPU latent attention: how many heads and queries share a product, and how many keys a block has."""

import dataclasses

from pallas_kernels._common.tpu_rows import LANES, LatentBytes, LatentRow
from pallas_kernels.attention.tpu_config import Config, Facts, fitting

ROWS = 256  # of a product: the matrix units take keys and values anew for every so many
_GROUP = 16  # query heads that always share a product: the rows of a register of bfloat16


def row_of(*, num_heads: int, latent_dim: int, rope_dim: int, packed: bool = False) -> LatentRow:
    """Latent rows as the attention kernel sees them: a KV head for every few query heads, all in the same lanes.

    Args: packed: whether pages hold them in 8 bits; a row then has the key at the next multiple of 128 lanes.

    >>> row = row_of(num_heads=128, latent_dim=512, rope_dim=64)
    >>> row.kv_heads, row.k_dim, row.v_dim
    (8, 576, 512)
    """
    group = max(g for g in range(1, _GROUP + 1) if num_heads % g == 0)
    held = LatentBytes(latent_dim=latent_dim, rope_dim=rope_dim) if packed else None
    key_at = held.rope_at if held else latent_dim
    return LatentRow(kv_heads=num_heads // group, k_dim=key_at + rope_dim, v_dim=latent_dim, packed=held)


def heuristic(facts: Facts, *, vmem: int, cores: int = 1) -> tuple[Config, ...]:
    """Sizes for requests of up to `facts.max_q_len` rows; with several, a request uses the first that holds its rows.

    Args: facts: of a `LatentRow`. vmem: bytes of vector memory that a program may use. cores: TensorCores of a device.
    """
    blocks = [1] if facts.max_q_len == 1 else [8] if facts.max_q_len <= 8 else [1, 8, 32]
    return tuple(fitting(_config(facts, block_q, cores), facts, vmem) for block_q in blocks)


def _config(facts: Facts, block_q: int, cores: int) -> Config:
    kv_heads = facts.row.kv_heads
    fit = [h for h in range(1, kv_heads + 1) if kv_heads % h == 0 and h * facts.group * block_q <= ROWS]
    heads = max(fit, default=1)
    rows = heads * facts.group * block_q
    # As many keys as keep the scores of a part in half a mebibyte; more only delay the first product of a request.
    keys = min(max((1 << 18) // max(rows, 1), 512), 2048)
    pages = 1 << max((keys // facts.page_size).bit_length() - 1, 0)
    config = Config(block_q=block_q, block_pages=pages, heads=heads, unroll_heads=False, parts=2, cores=cores)
    whole = pages * facts.page_size % (2 * LANES) == 0 and not facts.unpacked
    return config if whole else dataclasses.replace(config, parts=1)
