"""The decoder family in Flax NNX: parameters only. Tokens, cache and plan come in; hidden states and cache go out."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.attend import attend, rotate_write, write_attend
from jattn.cache import Cache, MLACache, PagedKV
from jattn.models.config import ModelConfig
from jattn.models.experts import Experts
from jattn.models.latent import Form, LatentAttention
from jattn.models.layers import Linear, RMSNorm, project, split_heads
from jattn.models.mlp import MLP
from jattn.models.rope import rotate
from jattn.plan import Plan
from jattn.resolve import Choice
from jattn.spec import AttnSpec, MLASpec

Spec = AttnSpec | MLASpec


class Attention(nnx.Module):
    """Grouped-query attention through the door; q, k and v in one projection."""

    def __init__(
        self,
        config: ModelConfig,
        spec: AttnSpec,
        choice: Choice,
        *,
        rngs,
        dtype,
        weight_first,
        in_dim: int | None = None,
    ):
        self.spec, self.choice = spec, choice
        v_head_dim = spec.v_head_dim or spec.head_dim
        out_dim = (spec.num_q_heads + spec.num_kv_heads) * spec.head_dim + spec.num_kv_heads * v_head_dim
        kwargs = dict(rngs=rngs, dtype=dtype, weight_first=weight_first)
        self.qkv = Linear(in_dim or config.d_model, out_dim, bias=config.qkv_bias, **kwargs)
        self.out = Linear(spec.num_q_heads * v_head_dim, config.d_model, bias=config.out_bias, **kwargs)
        self.q_norm = _norm(config, config.head_dim, dtype) if config.qk_norm else None
        self.k_norm = _norm(config, config.head_dim, dtype) if config.qk_norm else None
        self.sinks = nnx.Param(jnp.zeros((spec.num_q_heads,), jnp.float32)) if spec.sinks else None

    def __call__(self, x, phases, cache: PagedKV, plan: Plan, layer, form: Form):
        (cos, sin), rows = phases, self.qkv(x)
        sinks = None if self.sinks is None else self.sinks[...]
        kernels: dict[str, Any] = dict(layer=layer, spec=self.spec, choice=self.choice)
        rotated = None if self.q_norm is not None else rotate_write(rows, cos, sin, cache, plan, **kernels)
        if rotated is not None:
            q, cache = rotated
            out, _ = attend(q, cache, plan, sinks=sinks, **kernels)
            return self.out(out.reshape(x.shape[0], -1)), cache
        q, k, v = split_heads(rows, self.spec)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out, _, cache = write_attend(q, k, v, cache, plan, sinks=sinks, **kernels)
        return self.out(out.reshape(x.shape[0], -1)), cache


class Block(nnx.Module):
    """One decoder layer: attention and MLP, each normed before, by choice normed after, and added to the stream.

    `normed` False leaves out the norm before attention.
    """

    def __init__(
        self, config: ModelConfig, spec: Spec, choice, *, experts: bool, rngs, dtype, weight_first, normed: bool = True
    ):
        kwargs = dict(rngs=rngs, dtype=dtype, weight_first=weight_first)
        self.attn_norm = _norm(config, config.d_model, dtype) if normed else None
        latent = isinstance(spec, MLASpec)
        self.attn = (
            LatentAttention(config, spec, choice, **kwargs) if latent else Attention(config, spec, choice, **kwargs)
        )
        self.mlp_norm = _norm(config, config.d_model, dtype)
        self.mlp = Experts(config, **kwargs) if experts else MLP(config, **kwargs)
        self.post_attn_norm = _norm(config, config.d_model, dtype) if config.post_norms else None
        self.post_mlp_norm = _norm(config, config.d_model, dtype) if config.post_norms else None

    def __call__(self, x, phases, cache, plan, layer, form: Form):
        normed = x if self.attn_norm is None else self.attn_norm(x)
        attended, cache = self.attn(normed, phases, cache, plan, layer, form)
        x = x + (attended if self.post_attn_norm is None else self.post_attn_norm(attended))
        mixed = self.mlp(self.mlp_norm(x))
        return x + (mixed if self.post_mlp_norm is None else self.post_mlp_norm(mixed)), cache


@functools.partial(jax.jit, static_argnums=0)
def apply_block(graphdef, params, x, phases, cache: Cache, plan: Plan, layer: jax.Array, form: Form):
    """A `Block`, split, on x [rows, d_model]: the stream behind it and the cache.

    Jitted so that equal layers are traced and lowered once a kind (seconds and 100 MB saved for 30); XLA inlines it.
    """
    return nnx.merge(graphdef, params)(x, phases, cache, plan, layer, form)


class Decoder(nnx.Module):
    """Decoder-only language model: Llama, Qwen, Gemma, Mistral, gpt-oss and DeepSeek are configurations of it.

    Layers are unrolled: scanning stacked weights copies each layer's slice on XLA:CPU (34 ms a step instead of 21),
    and unrolled programs still compile in about a second.

    Args:
      spec, choice: of every layer, or tuples with one a layer (`config.attn_specs`, each resolved).
      weight_first: as in `Linear`, for all of them.
    Raises: ValueError if a spec is not the one that `config` gives its layer, storage of the cache aside.
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: Spec | tuple[Spec, ...],
        choice: Choice | tuple[Choice, ...],
        *,
        rngs: nnx.Rngs,
        dtype=jnp.float32,
        weight_first: bool = False,
    ):
        specs = spec if isinstance(spec, tuple) else (spec,) * config.num_layers
        choices = choice if isinstance(choice, tuple) else (choice,) * config.num_layers
        _check_specs(config, specs, choices)
        self.kv_layout = choices[0].kv_layout
        self.config, self.spec, self.weight_first = config, specs[0], weight_first
        self.embed = nnx.Param(jax.random.normal(rngs.params(), (config.vocab_size, config.d_model), dtype) * 0.02)
        kwargs: dict[str, Any] = dict(rngs=rngs, dtype=dtype, weight_first=weight_first)
        self.layers = nnx.List(
            [
                Block(config, *pair, experts=config.has_experts(layer), **kwargs)
                for layer, pair in enumerate(zip(specs, choices, strict=True))
            ]
        )
        self.final_norm = _norm(config, config.d_model, dtype)
        if not config.tied_embeddings:
            self.lm_head = Linear(config.d_model, config.vocab_size, **kwargs)

    def __call__[C: Cache](
        self, tokens: jax.Array, cache: C, plan: Plan, form: Form | None = None
    ) -> tuple[jax.Array, C]:
        """tokens i32[rows] at `plan.positions` -> final hidden states [rows, d_model], cache with this step written.

        `form` is of latent attention; None attends in the latent space, which is right in every mode.
        """
        hidden, cache, _ = self.tapped(tokens, cache, plan, form)
        return hidden, cache

    def tapped[C: Cache](
        self, tokens: jax.Array, cache: C, plan: Plan, form: Form | None = None, *, taps: tuple[int, ...] = ()
    ) -> tuple[jax.Array, C, list[jax.Array]]:
        """As a call, and the stream [rows, d_model] behind each of the first `taps` layers (0: the embedding)."""
        config = self.config
        form = Form() if form is None else form
        x = self.embedded(tokens)
        ropes = [config.rope(layer) for layer in range(config.num_layers)]
        kinds = tuple(dict.fromkeys(ropes))
        # behind a barrier: XLA would compute cos and sin again in each layer, three times
        phases = jax.lax.optimization_barrier([rope.phases(plan.positions, config.rope_dim) for rope in kinds])
        streams = [x]
        for layer, block in enumerate(self.layers):
            graphdef, params = nnx.split(block)
            x, cache = apply_block(
                graphdef, params, x, phases[kinds.index(ropes[layer])], cache, plan, jnp.int32(layer), form
            )
            streams.append(x)
        return self.final_norm(x), cache, [streams[tap] for tap in taps]

    def embedded(self, tokens: jax.Array) -> jax.Array:
        """tokens i32[rows] -> what the first layer reads, [rows, d_model]."""
        x, scale = self.embed[...][tokens], self.config.embed_scale
        return x if scale is None else x * jnp.asarray(scale, x.dtype)

    def new_cache(self, *, num_pages: int, page_size: int, dtype=None) -> Cache:
        """An empty cache of the kind that this model's layers write; dtype: where the spec names none."""
        sizes: dict[str, Any] = dict(num_pages=num_pages, page_size=page_size, dtype=dtype)
        return new_cache(self.spec, num_layers=self.config.num_layers, layout=self.kv_layout, **sizes)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [rows, d_model] -> f32[rows, vocab_size]."""
        head = self.embed[...] if self.config.tied_embeddings else self.lm_head.weight[...]
        logits = project(hidden, head, weight_first=self.weight_first, out_dtype=jnp.float32)
        cap = self.config.final_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def new_cache(
    spec: Spec, *, num_layers: int, num_pages: int, page_size: int, dtype=None, layout: str | None = None
) -> Cache:
    """An empty cache of the kind that layers with `spec` write; dtype: where the spec names none.

    Args: layout: of keys and values, what the layers' kernels want (`Choice.kv_layout`).
    """
    sizes: dict[str, Any] = dict(num_layers=num_layers, num_pages=num_pages, page_size=page_size, dtype=dtype)
    if isinstance(spec, MLASpec):
        return MLACache.create(spec, layout=layout, **sizes)
    return PagedKV.create(spec, layout=layout, **sizes)


def _norm(config: ModelConfig, dim: int, dtype) -> RMSNorm:
    return RMSNorm(dim, config.rms_eps, dtype, wide=config.wide_norms)


def _check_specs(config: ModelConfig, specs: tuple[Spec, ...], choices: tuple[Choice, ...]) -> None:
    if not len(specs) == len(choices) == config.num_layers:
        raise ValueError(
            f"{len(specs)} specs and {len(choices)} choices for num_layers={config.num_layers}: want one a layer each"
        )
    for layer, spec in enumerate(specs):
        stored = {name: getattr(spec, name) for name in ("kv_dtype", "kv_scales") if hasattr(spec, name)}
        want = config.attn_spec(layer=layer)
        want = dataclasses.replace(want, **stored) if type(want) is type(spec) else want
        if spec != want:
            raise ValueError(f"layer {layer} has {spec}, but the config wants {want}: take config.attn_specs(...)")
