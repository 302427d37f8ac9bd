"""Multi-head latent attention as a part of a decoder: projections and rotation, then the form that the caller chose."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.cache import MLACache
from jattn.combinators.mla import mla_attend
from jattn.dispatch import AttnForwardMethod
from jattn.models.config import ModelConfig
from jattn.models.layers import Linear, RMSNorm
from jattn.models.rope import rotate
from jattn.plan import Plan
from jattn.resolve import Choice
from jattn.spec import MLASpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How the MLA layers of one forward are computed: the same result, at a different cost. The method is static."""

    method: AttnForwardMethod = dataclasses.field(default=AttnForwardMethod.MLA, metadata=dict(static=True))
    chunks: Any = None  # of the cached prefixes, planned once a forward for the methods that expand them


class LatentAttention(nnx.Module):
    """MLA: one latent and one rotary key a token, for every head. Source: arXiv:2405.04434, section 2.1.

    The matrices that read only the layer's input are one: the queries' (or their latent's), then the latent and the
    rotary key. Rotary features are in half-split order within each of `rope_blocks` blocks.
    """

    def __init__(self, config: ModelConfig, spec: MLASpec, choice: Choice, *, rngs, dtype, weight_first):
        assert config.mla is not None
        self.spec, self.choice, self.mla = spec, choice, config.mla
        rank, heads, rope_dim = spec.kv_lora_rank, spec.num_q_heads, spec.qk_rope_head_dim
        q_dim = heads * (spec.qk_nope_head_dim + rope_dim)
        kwargs = dict(rngs=rngs, dtype=dtype, weight_first=weight_first)
        self.first_dim = self.mla.q_lora_rank or q_dim
        fused = Linear(config.d_model, self.first_dim + rank + rope_dim, bias=config.qkv_bias, **kwargs)
        lora = self.mla.q_lora_rank is not None
        self.q_kv_a, self.qkv_a = (None, fused) if lora else (fused, None)
        self.q_a_norm = RMSNorm(self.first_dim, self.mla.eps, dtype) if lora else None
        self.q_b = Linear(self.first_dim, q_dim, **kwargs) if lora else None
        self.kv_a_norm = RMSNorm(rank, self.mla.eps, dtype) if self.mla.latent_norm else None
        self.w_kc = _drawn((heads, spec.qk_nope_head_dim, rank), rank, rngs, dtype)
        self.w_vc = _drawn((heads, rank, spec.v_head_dim), rank, rngs, dtype)
        self.out = Linear(heads * spec.v_head_dim, config.d_model, bias=config.out_bias, **kwargs)
        # of a model that was a GQA model: of each head, which is a block of the rotary features
        norm = functools.partial(RMSNorm, config.rope_dim, config.rms_eps, dtype, wide=config.wide_norms)
        self.q_norm = norm() if config.qk_norm else None
        self.k_norm = norm() if config.qk_norm else None

    def __call__(
        self, x: jax.Array, phases, cache: MLACache, plan: Plan, layer: jax.Array, form: Form
    ) -> tuple[jax.Array, MLACache]:
        """x [rows, d_model] -> same shape and dtype, and the cache with the step written."""
        tokens, spec = x.shape[0], self.spec
        fused = self.q_kv_a if self.qkv_a is None else self.qkv_a
        assert fused is not None
        ends = (self.first_dim, self.first_dim + spec.kv_lora_rank)
        first, latent, k_rope = jnp.split(fused(x), ends, axis=-1)
        if self.q_b is not None and self.q_a_norm is not None:
            first = self.q_b(self.q_a_norm(first))
        q_nope, q_rope = jnp.split(first.reshape(tokens, spec.num_q_heads, -1), (spec.qk_nope_head_dim,), axis=-1)
        out, cache = mla_attend(
            q_nope,
            self._rotated(q_rope, self.q_norm, phases),
            latent if self.kv_a_norm is None else self.kv_a_norm(latent),
            self._rotated(k_rope[:, None], self.k_norm, phases)[:, 0],
            cache,
            plan,
            layer=layer,
            spec=spec,
            choice=self.choice,
            w_kc=self.w_kc[...],
            w_vc=self.w_vc[...],
            method=form.method,
            chunks=form.chunks,
        )
        return self.out(out.reshape(tokens, -1)), cache

    def _rotated(self, x: jax.Array, norm: RMSNorm | None, phases) -> jax.Array:
        # [tokens, heads, rope_dim], block by block; a block of zeros stays one
        tokens, heads, dim = x.shape
        blocks = x.reshape(tokens, heads * self.mla.rope_blocks, -1)
        return rotate(blocks if norm is None else norm(blocks), *phases).reshape(tokens, heads, dim)


def _drawn(shape: tuple[int, ...], in_dim: int, rngs: nnx.Rngs, dtype) -> nnx.Param:
    return nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * in_dim**-0.5)
