"""Rotary position embedding, phases in float32 whatever the model's dtype. Source: arXiv:2104.09864."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._common.rotary import rotate as rotate


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Positions are divided by `factor`. Source: arXiv:2306.15595."""

    factor: float
    amplitude: float = 1.0

    def stretch(self, freq: np.ndarray, theta: float) -> np.ndarray:
        """f64[dim / 2] -> f64[dim / 2]."""
        return freq / self.factor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FactorScaling:
    """Each frequency is divided by a factor of its own: Llama 3.1's bands as GGUF files carry them."""

    factors: tuple[float, ...]  # [dim / 2]
    amplitude: float = 1.0

    def stretch(self, freq: np.ndarray, theta: float) -> np.ndarray:
        """f64[dim / 2] -> f64[dim / 2]. Raises ValueError if there is not one factor a frequency."""
        if len(self.factors) != len(freq):
            raise ValueError(f"{len(self.factors)} rotary factors for {len(freq)} frequencies: want one each")
        return freq / np.asarray(self.factors, np.float64)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Frequency bands of Llama 3.1: long waves are slowed by `factor`, short ones kept, the middle blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_context: int
    amplitude: float = 1.0

    def stretch(self, freq: np.ndarray, theta: float) -> np.ndarray:
        """f64[dim / 2] -> f64[dim / 2]."""
        turns = self.original_max_context * freq / (2 * math.pi)
        blend = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0.0, 1.0)
        return (1 - blend) * freq / self.factor + blend * freq


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """A ramp over the features, from those that turn often (kept) to those that turn less than once (slowed).

    Args:
      factor: by how much the slow features are slowed. original_max_context: tokens of the first training.
      beta_fast, beta_slow: turns over that context at which the ramp begins and ends.
      truncate: the ramp begins and ends at whole features.
      amplitude: factor on cos and sin, so that logits grow by its square.
    Source: arXiv:2309.00071, section 3.2.
    """

    factor: float
    original_max_context: int
    amplitude: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def stretch(self, freq: np.ndarray, theta: float) -> np.ndarray:
        """f64[dim / 2] -> f64[dim / 2]."""
        dim = 2 * len(freq)
        begin, end = (self._feature(turns, dim, theta) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            begin, end = math.floor(begin), math.ceil(end)
        begin, end = max(begin, 0), min(end, dim - 1)
        ramp = (np.arange(dim // 2) - begin) / max(end - begin, 1e-3)
        slowed = np.clip(ramp, 0.0, 1.0)
        return freq * (1 - slowed) + freq / self.factor * slowed

    def _feature(self, turns: float, dim: int, theta: float) -> float:
        # the (real) feature index whose wave turns `turns` times in the original context
        return dim * math.log(self.original_max_context / (turns * 2 * math.pi)) / (2 * math.log(theta))


Scaling = LinearScaling | FactorScaling | Llama3Scaling | YarnScaling


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """The rotary embedding of a layer. Static: layers with the same record share their phases."""

    theta: float
    scaling: Scaling | None = None

    def phases(self, positions: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
        """cos and sin, f32[tokens, dim / 2] each, with the scaling's amplitude. positions: i32[tokens]."""
        cos, sin = cos_sin(positions, inv_freq(dim, self.theta, self.scaling))
        if self.scaling is None or self.scaling.amplitude == 1.0:
            return cos, sin
        return cos * self.scaling.amplitude, sin * self.scaling.amplitude


def inv_freq(dim: int, theta: float, scaling: Scaling | None = None) -> np.ndarray:
    """Rotation per position, f32[dim / 2], computed in float64. Raises ValueError if `dim` is odd.

    >>> inv_freq(4, 100.0).tolist()
    [1.0, 0.10000000149011612]
    >>> inv_freq(4, 100.0, LinearScaling(factor=2.0)).tolist()
    [0.5, 0.05000000074505806]
    """
    if dim % 2:
        raise ValueError(f"rotary dim {dim} is odd: want an even number of rotated features")
    freq = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if scaling is not None:
        freq = scaling.stretch(freq, theta)
    return freq.astype(np.float32)


def cos_sin(positions: jax.Array, freq: np.ndarray | jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin of position * frequency: f32[tokens, dim / 2] each. positions: i32[tokens]."""
    phase = positions.astype(jnp.float32)[:, None] * jnp.asarray(freq, jnp.float32)[None, :]
    return jnp.cos(phase), jnp.sin(phase)


def rope(q: jax.Array, k: jax.Array, positions: jax.Array, *, theta: float = 10000.0) -> tuple[jax.Array, jax.Array]:
    """Rotate queries and keys [tokens, heads, head_dim] at `positions` i32[tokens]: the short form for one layer.

    >>> q, k = rope(jnp.ones((2, 1, 4)), jnp.ones((2, 1, 4)), jnp.array([0, 3]))
    >>> q[0, 0].tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    cos, sin = cos_sin(positions, inv_freq(q.shape[-1], theta))
    return rotate(q, cos, sin), rotate(k, cos, sin)
