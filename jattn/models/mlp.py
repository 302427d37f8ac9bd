"""The gated MLP of a dense layer, and of the experts that every token uses."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.models.config import ModelConfig
from jattn.models.layers import Linear

ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True)}


class MLP(nnx.Module):
    """down(activation(gate) * up), gate and up in one projection. ffn_dim: the model's unless given."""

    def __init__(self, config: ModelConfig, ffn_dim: int | None = None, *, rngs, dtype, weight_first):
        ffn_dim = ffn_dim or config.ffn_dim
        self.activation = config.activation
        self.gate_up = Linear(config.d_model, 2 * ffn_dim, rngs=rngs, dtype=dtype, weight_first=weight_first)
        self.down = Linear(ffn_dim, config.d_model, rngs=rngs, dtype=dtype, weight_first=weight_first)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [rows, d_model] -> same shape and dtype."""
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(ACTIVATIONS[self.activation](gate) * up)
