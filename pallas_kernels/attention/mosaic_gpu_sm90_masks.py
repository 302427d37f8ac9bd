"""Which keys a tile of the Hopper attention sees, over scores in registers."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.mosaic_gpu_sm90_records import Arrays, Item, Static
from pallas_kernels.attention.mosaic_gpu_sm90_rows import ROW, TILE


def iota(shape, axis):
    """Index along an axis, in the layout of a tile."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=TILE)


def mask(static: Static, smem: dict, item: Item, block, start, mine, scores):
    """Scores of a block, -inf where a rule or the length hides the key.

    start, mine: first of these 64 rows in the tile, and among the program's own.
    """
    rules, shape = static.rules, scores.shape
    key = iota(shape, 1) + block * static.config.block_kv
    seen = key < item.kv_len
    if static.words:
        node = key - item.high
        seen = seen & ((node < 0) | _bit(static, smem, node, mine))
        if rules.sliding_window is not None:
            low = plgpu.layout_cast(smem["low"][pl.ds(mine, 64)], ROW)
            seen = seen & ((node >= 0) | (key >= lax.broadcast_in_dim(low, shape, (0,))))
    elif rules.mask == "causal" and static.block_q > 1:
        place = (iota(shape, 0) + start) // static.group + item.first
        seen = seen & (key <= place)
        if rules.sliding_window is not None:
            seen = seen & (place - key < rules.sliding_window)
    elif rules.sliding_window is not None:
        seen = seen & (key >= item.low)
    return jnp.where(seen, scores, -jnp.inf)


def _bit(static: Static, smem: dict, node, mine):
    picked = jnp.zeros(node.shape, jnp.uint32)
    for word in range(static.words):
        bits = plgpu.layout_cast(smem["bits"][word, pl.ds(mine, 64)], ROW)
        picked = jnp.where(node >> 5 == word, lax.broadcast_in_dim(bits, node.shape, (0,)), picked)
    return ((picked >> (node & 31).astype(jnp.uint32)) & jnp.uint32(1)) == 1


def fetch_tree(static: Static, arrays: Arrays, smem: dict, item: Item, first) -> None:
    """Start copying what `mask` reads of a tree, from a tile's row `first` on; it completes on `tree_full`."""
    own = pl.ds(first, static.config.own_rows)
    plgpu.copy_gmem_to_smem(arrays.bits.at[item.tile, :, own], smem["bits"], smem["tree_full"])
    if static.rules.sliding_window is not None:
        plgpu.copy_gmem_to_smem(arrays.low.at[item.tile, own], smem["low"], smem["tree_full"])
