"""Which keys a tile of the Hopper latent attention sees, over scores in registers."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention import mosaic_gpu_sm90_rows as rows_io
from pallas_kernels.attention.mosaic_gpu_sm90_masks import iota
from pallas_kernels.attention.mosaic_gpu_sm90_records import Item
from pallas_kernels.attention.mosaic_gpu_sm90_rows import Rows
from pallas_kernels.mla.mosaic_gpu_sm90_records import Arrays, Static


def mask(static: Static, arrays: Arrays, item: Item, block, start, scores):
    """Scores f32[64, keys] of a block, -inf where a rule or the length hides the key.

    start: first of these 64 rows in the tile.
    """
    shape = scores.shape
    key = iota(shape, 1) + block * static.config.block_kv
    seen = key < item.kv_len
    if static.words:
        node = key - item.high
        scores = jnp.where(seen & (node < 32 * static.words), scores, -jnp.inf)
        return _tree(static, arrays, item, node, start, scores)
    if static.rules.mask == "causal" and static.block_q > 1:
        place = (iota(shape, 0) + start) // static.group + item.first
        seen = seen & (key <= place)
    return jnp.where(seen, scores, -jnp.inf)


def _tree(static: Static, arrays: Arrays, item: Item, node, start, scores):
    # Word by word onto the scores, which takes fewer registers than a tile of bits; they are read here, as few blocks
    # hold nodes.
    rows = static.config.rows
    for word in range(static.words):
        where = Rows(jnp.int32(0), (item.tile * static.words + word) * rows, jnp.int32(rows), rows, 0)
        bits = rows_io.load_vector(arrays.bits, where, start=start, interpret=static.interpret)
        bits = lax.broadcast_in_dim(bits, scores.shape, (0,)) >> (node & 31).astype(jnp.uint32)
        hidden = (node >> 5 == word) & ((bits & jnp.uint32(1)) == 0)
        scores = jnp.where(hidden, -jnp.inf, scores)
    return scores
