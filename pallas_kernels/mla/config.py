"""Block sizes of the plain JAX latent attention, chosen from static facts."""

from pallas_kernels.attention.config import Config


def heuristic(*, max_q_len: int, num_heads: int) -> tuple[Config, ...]:
    """Configs for requests with at most `max_q_len` query rows, all of whose heads read one KV head.

    As `attention.config.heuristic`, with fewer query rows a tile: each counts for `num_heads` rows of the products.
    """
    wide = max(1, 512 // num_heads)
    if max_q_len <= wide:
        return (Config(block_q=max(max_q_len, 1), block_kv=256),)
    return Config(block_q=max(wide // 8, 1), block_kv=256), Config(block_q=wide, block_kv=256)
