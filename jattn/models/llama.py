"""Llama-family decoder in Flax NNX: parameters only. Tokens, cache and plan come in; hidden states and cache go out."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.attend import write_attend
from jattn.cache import PagedKV
from jattn.models.config import ModelConfig
from jattn.models.layers import Linear, RMSNorm, project, split_heads
from jattn.models.rope import cos_sin, inv_freq, rotate
from jattn.plan import Plan
from jattn.resolve import Choice
from jattn.spec import AttnSpec


class Attention(nnx.Module):
    """Grouped-query attention through the door; q, k and v in one projection."""

    def __init__(self, config: ModelConfig, spec: AttnSpec, choice: Choice, *, rngs, dtype, weight_first):
        self.spec, self.choice = spec, choice
        v_head_dim = spec.v_head_dim or spec.head_dim
        out_dim = (spec.num_q_heads + spec.num_kv_heads) * spec.head_dim + spec.num_kv_heads * v_head_dim
        self.qkv = Linear(config.d_model, out_dim, rngs=rngs, dtype=dtype, weight_first=weight_first)
        self.out = Linear(
            spec.num_q_heads * v_head_dim, config.d_model, rngs=rngs, dtype=dtype, weight_first=weight_first
        )

    def __call__(self, x, phases, cache: PagedKV, plan: Plan, layer):
        q, k, v = split_heads(self.qkv(x), self.spec)
        q, k = rotate(q, *phases), rotate(k, *phases)
        out, _, cache = write_attend(q, k, v, cache, plan, layer=layer, spec=self.spec, choice=self.choice)
        return self.out(out.reshape(x.shape[0], -1)), cache


class MLP(nnx.Module):
    """down(silu(gate) * up), gate and up in one projection."""

    def __init__(self, config: ModelConfig, *, rngs, dtype, weight_first):
        self.gate_up = Linear(config.d_model, 2 * config.ffn_dim, rngs=rngs, dtype=dtype, weight_first=weight_first)
        self.down = Linear(config.ffn_dim, config.d_model, rngs=rngs, dtype=dtype, weight_first=weight_first)

    def __call__(self, x):
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)


class Block(nnx.Module):
    """One decoder layer: pre-norm attention and MLP, each added to the stream."""

    def __init__(self, config: ModelConfig, spec, choice, *, rngs, dtype, weight_first):
        kwargs = dict(rngs=rngs, dtype=dtype, weight_first=weight_first)
        self.attn_norm = RMSNorm(config.d_model, config.rms_eps, dtype)
        self.attn = Attention(config, spec, choice, **kwargs)
        self.mlp_norm = RMSNorm(config.d_model, config.rms_eps, dtype)
        self.mlp = MLP(config, **kwargs)

    def __call__(self, x, phases, cache, plan, layer):
        attended, cache = self.attn(self.attn_norm(x), phases, cache, plan, layer)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), cache


@functools.partial(jax.jit, static_argnums=0)
def _apply_block(graphdef, params, x, phases, cache: PagedKV, plan: Plan, layer: jax.Array):
    # jitted so that equal layers are traced and lowered once (seconds and 100 MB saved for 30); XLA inlines the calls
    return nnx.merge(graphdef, params)(x, phases, cache, plan, layer)


class Llama(nnx.Module):
    """Decoder-only language model.

    Layers are unrolled: scanning stacked weights copies each layer's slice on XLA:CPU (34 ms a step instead of 21),
    and unrolled programs still compile in about a second.
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: AttnSpec,
        choice: Choice,
        *,
        rngs: nnx.Rngs,
        dtype=jnp.float32,
        weight_first: bool = False,
    ):
        self.config, self.spec, self.choice = config, spec, choice
        self.weight_first = weight_first
        self.embed = nnx.Param(jax.random.normal(rngs.params(), (config.vocab_size, config.d_model), dtype) * 0.02)
        kwargs: dict[str, Any] = dict(rngs=rngs, dtype=dtype, weight_first=weight_first)
        self.layers = nnx.List([Block(config, spec, choice, **kwargs) for _ in range(config.num_layers)])
        self.final_norm = RMSNorm(config.d_model, config.rms_eps, dtype)
        if not config.tied_embeddings:
            self.lm_head = Linear(config.d_model, config.vocab_size, **kwargs)

    def __call__(self, tokens: jax.Array, cache: PagedKV, plan: Plan) -> tuple[jax.Array, PagedKV]:
        """tokens i32[rows] at `plan.positions` -> final hidden states [rows, d_model], cache with this step written."""
        x = self.embed[...][tokens]
        freq = inv_freq(self.config.head_dim, self.config.rope_theta, self.config.rope_scaling)
        # behind a barrier: XLA would compute cos and sin again in each layer, three times
        phases = jax.lax.optimization_barrier(cos_sin(plan.positions, freq))
        for layer, block in enumerate(self.layers):
            graphdef, params = nnx.split(block)
            x, cache = _apply_block(graphdef, params, x, phases, cache, plan, jnp.int32(layer))
        return self.final_norm(x), cache

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [rows, d_model] -> f32[rows, vocab_size]."""
        head = self.embed[...] if self.config.tied_embeddings else self.lm_head.weight[...]
        return project(hidden, head, weight_first=self.weight_first, out_dtype=jnp.float32)
