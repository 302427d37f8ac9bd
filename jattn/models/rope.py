"""Rotary position embedding, phases in float32 whatever the model's dtype. Source: arXiv:2104.09864."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Frequency bands of Llama 3.1: long waves are slowed by `factor`, short ones kept, the middle blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_context: int


def inv_freq(dim: int, theta: float, scaling: Llama3Scaling | None = None) -> np.ndarray:
    """Rotation per position, f32[dim / 2], computed in float64. Raises ValueError if `dim` is odd.

    >>> inv_freq(4, 100.0).tolist()
    [1.0, 0.10000000149011612]
    """
    if dim % 2:
        raise ValueError(f"rotary dim {dim} is odd: want an even number of rotated features")
    freq = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if scaling is not None:
        wavelength = 2 * math.pi / freq
        ratio = scaling.original_max_context / wavelength
        blend = (ratio - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        blend = np.clip(blend, 0.0, 1.0)
        freq = (1 - blend) * freq / scaling.factor + blend * freq
    return freq.astype(np.float32)


def cos_sin(positions: jax.Array, freq: np.ndarray | jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin of position * frequency: f32[tokens, dim / 2] each. positions: i32[tokens]."""
    phase = positions.astype(jnp.float32)[:, None] * jnp.asarray(freq, jnp.float32)[None, :]
    return jnp.cos(phase), jnp.sin(phase)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate feature pairs (i, i + dim / 2) of x [tokens, heads, dim]; result in x's dtype."""
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)


def rope(q: jax.Array, k: jax.Array, positions: jax.Array, *, theta: float = 10000.0) -> tuple[jax.Array, jax.Array]:
    """Rotate queries and keys [tokens, heads, head_dim] at `positions` i32[tokens]: the short form for one layer.

    >>> q, k = rope(jnp.ones((2, 1, 4)), jnp.ones((2, 1, 4)), jnp.array([0, 3]))
    >>> q[0, 0].tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    cos, sin = cos_sin(positions, inv_freq(q.shape[-1], theta))
    return rotate(q, cos, sin), rotate(k, cos, sin)
