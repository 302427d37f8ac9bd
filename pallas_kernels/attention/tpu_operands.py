"""Arrays of a TPU attention call: queries as rows of products, and the way back to packed tokens."""

import jax.numpy as jnp

from pallas_kernels._common import ints
from pallas_kernels._common.masks import Rules
from pallas_kernels._common.tpu_rows import LANES
from pallas_kernels.attention.tpu_records import Static
from pallas_kernels.attention.tpu_schedule import Items


def queries(static: Static, q, items: Items):
    """[items, tiles, rows, window]: heads, then tokens; zeros in the lanes of other heads."""
    row, heads, group = static.row, static.config.heads, static.group
    picked = ints.pick(q, items.tokens)  # [items, block_q, q_heads, k_dim]
    picked = picked.reshape(*picked.shape[:2], static.tiles, heads, group, row.k_dim)
    picked = jnp.moveaxis(picked, 1, 4)  # [items, tiles, heads, group, block_q, k_dim]
    placed = []
    for tile in range(static.tiles):
        base, wide = row.window("k", tile * heads, heads)
        for head in range(heads):
            at = row.offset("k", tile * heads + head) - base
            padding = [(0, 0)] * 3 + [(at, wide - at - row.k_dim)]
            placed.append(jnp.pad(picked[:, tile, head], padding))
    wide = placed[0].shape[-1]
    out = jnp.stack(placed, axis=1).reshape(picked.shape[0], static.tiles, heads * group * static.config.block_q, wide)
    return jnp.pad(out, [(0, 0), (0, 0), (0, static.rows - out.shape[2]), (0, 0)])


def one_scale(scales, rules: Rules):
    """f32[2]: what all scores and all outputs are multiplied by."""
    k, v = (jnp.float32(1) if x is None else x.astype(jnp.float32) for x in scales)
    return jnp.stack([k * rules.sm_scale, v])


def sink_rows(static: Static, sinks):
    """f32[tiles, rows, 128]: the logit of each row of a product."""
    rows = jnp.repeat(sinks.astype(jnp.float32).reshape(static.tiles, -1), static.config.block_q, axis=1)
    rows = jnp.pad(rows, [(0, 0), (0, static.rows - rows.shape[1])])
    return jnp.broadcast_to(rows[..., None], (*rows.shape, LANES))


def tokens(static: Static, items: Items, out, lse):
    """Results as rows of products -> out [splits, tokens, q_heads, v_dim], lse [splits, tokens, q_heads]."""
    row, heads, group, block_q = static.row, static.config.heads, static.group, static.config.block_q
    used = heads * group * block_q

    def split(x):
        return x[:, :, :used].reshape(x.shape[0], static.tiles, heads, group, block_q, x.shape[-1])

    out, lse = split(out), split(lse[..., :1])[..., 0]
    parts = []
    for tile in range(static.tiles):
        base, _ = row.window("v", tile * heads, heads)
        for head in range(heads):
            at = row.offset("v", tile * heads + head) - base
            parts.append(out[:, tile, head, :, :, at : at + row.v_dim])
    out = jnp.stack(parts, axis=1)  # [items, kv_heads, group, block_q, v_dim]
    out = out.reshape(out.shape[0], row.kv_heads * group, block_q, row.v_dim)
    lse = lse.reshape(lse.shape[0], row.kv_heads * group, block_q)
    out, lse = jnp.moveaxis(out, 2, 1), jnp.moveaxis(lse, 2, 1)
    place = jnp.broadcast_to(items.place[None], items.item.shape)
    return ints.pick(out, items.item, place), ints.pick(lse, items.item, place)
