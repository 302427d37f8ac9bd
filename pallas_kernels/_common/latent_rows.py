"""Rows of a latent cache: a token's normed latent, then its rotated key, which all heads share.

A float pool holds [latent | key]. A uint8 pool holds, a token, the bits of the latent as e4m3, of one f32 scale for
each 128 of them (the last group may be shorter), and of the key as bfloat16: 512 + 16 + 128 bytes for DeepSeek's 512
and 64.
Source of that row: https://github.com/deepseek-ai/FlashMLA (its FP8 KV cache format).
"""

import math

import jax
import jax.numpy as jnp

from pallas_kernels._common import quantise

GROUP = 128  # latents a scale
_E4M3 = jnp.dtype(jnp.float8_e4m3fn)


def num_bytes(latent_dim: int, rope_dim: int) -> int:
    """Entries of a uint8 row."""
    return latent_dim + 4 * -(-latent_dim // GROUP) + 2 * rope_dim


def width(pages: jax.Array, latent_dim: int) -> int:
    """latent_dim + rope_dim of a pool [pages, page_size, row].

    Raises: ValueError if its rows cannot hold a latent of that width.
    """
    row = pages.shape[-1]
    is_bits = pages.dtype == jnp.uint8
    key_entries = row - (num_bytes(latent_dim, 0) if is_bits else latent_dim)
    if key_entries < 0 or (is_bits and key_entries % 2):
        raise ValueError(f"rows of {row} {pages.dtype} hold no latent of {latent_dim} and a key: build both alike")
    return latent_dim + (key_entries // 2 if is_bits else key_entries)


def kind(pages: jax.Array) -> jnp.dtype:
    """Dtype of a pool's latents: e4m3 where rows are bytes."""
    return _E4M3 if pages.dtype == jnp.uint8 else pages.dtype


def pack(latent: jax.Array, k_rope: jax.Array, dtype) -> jax.Array:
    """Rows [tokens, row] of a pool of `dtype` from latents [tokens, latent_dim] and keys [tokens, rope_dim]."""
    if dtype != jnp.uint8:
        return jnp.concatenate([latent.astype(dtype), k_rope.astype(dtype)], axis=-1)
    latent_dim = latent.shape[-1]
    padded = jnp.pad(latent.astype(jnp.float32), ((0, 0), (0, -latent_dim % GROUP)))
    groups = padded.reshape(latent.shape[0], -(-latent_dim // GROUP), GROUP)
    top = jnp.max(jnp.abs(groups), axis=-1)
    # A product, because XLA makes one of a division by a constant on some platforms; the barrier, because it would
    # simplify 1 / (top * c): so a row's bits are the same everywhere.
    scales = jax.lax.optimization_barrier(jnp.where(top > 0, top * jnp.float32(1 / quantise.largest(_E4M3)), 1.0))
    values = quantise.stored(groups, scales[..., None], _E4M3).reshape(padded.shape)[:, :latent_dim]
    parts = _bits(values[..., None]), _bits(scales), _bits(k_rope.astype(jnp.bfloat16))
    return jnp.concatenate(parts, axis=-1)


def unpack(rows: jax.Array, latent_dim: int, dtype) -> jax.Array:
    """[..., latent_dim + rope_dim] of rows [..., row]: bits as values of `dtype`, floats as they are."""
    if rows.dtype != jnp.uint8:
        return rows
    scales_at = latent_dim + 4 * -(-latent_dim // GROUP)
    values, scales, key = jnp.split(rows, (latent_dim, scales_at), axis=-1)
    values = jax.lax.bitcast_convert_type(values, _E4M3).astype(jnp.float32)
    scales = jnp.repeat(_from_bits(scales, jnp.float32), GROUP, axis=-1)[..., :latent_dim]
    return jnp.concatenate([(values * scales).astype(dtype), _from_bits(key, jnp.bfloat16).astype(dtype)], axis=-1)


def _bits(x: jax.Array) -> jax.Array:
    # [tokens, n] of a wide dtype, or [tokens, n, 1] of bytes -> u8[tokens, bytes]
    tokens, *rest = x.shape  # the width by itself: of no token it could not be inferred
    return jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(tokens, math.prod(rest) * x.dtype.itemsize)


def _from_bits(x: jax.Array, dtype) -> jax.Array:
    size = jnp.dtype(dtype).itemsize
    return jax.lax.bitcast_convert_type(x.reshape(*x.shape[:-1], x.shape[-1] // size, size), dtype)
