"""The layers behind a model's last that predict further ahead, each one token more (MTP, NextN).

Source: arXiv:2412.19437, section 2.2, as published in https://huggingface.co/deepseek-ai/DeepSeek-V3.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.cache import Cache
from jattn.models.config import ModelConfig
from jattn.models.decoder import Block, Spec, apply_block
from jattn.models.head_body import HeadBody
from jattn.models.latent import Form
from jattn.models.layers import Linear, RMSNorm
from jattn.plan import Plan
from jattn.resolve import Choice


class NextToken(HeadBody):
    """norm(block(project([norm(embedding of the next token), norm(hidden state)]))), the embedding being the target's.

    Row i pairs the target's final hidden state i with token i + 1, and predicts token i + 2.

    Args: index: how many such layers stand before it.
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: Spec,
        choice: Choice,
        *,
        rngs: nnx.Rngs,
        dtype=jnp.float32,
        weight_first: bool = False,
        index: int = 0,
    ):
        def norm() -> RMSNorm:
            return RMSNorm(config.d_model, config.rms_eps, dtype, wide=config.wide_norms)

        self.config, self.spec, self.kv_layout = config, spec, choice.kv_layout
        kwargs: dict[str, Any] = dict(rngs=rngs, dtype=dtype, weight_first=weight_first)
        self.token_norm, self.hidden_norm = norm(), norm()
        self.project = Linear(2 * config.d_model, config.d_model, **kwargs)
        self.block = Block(config, spec, choice, experts=config.has_experts(config.num_layers + index), **kwargs)
        self.final_norm = norm()

    def __call__(
        self,
        embedded: jax.Array,
        hidden: jax.Array,
        cache: Cache,
        plan: Plan,
        form: Form | None = None,
        *,
        layer: int = 0,
    ) -> tuple[jax.Array, Cache]:
        """Hidden states for `Decoder.logits`, and the cache with this step written.

        Args: embedded, hidden: [rows, d_model] each, `Decoder.embedded` of the next tokens and the final hidden states
          that the target (or this layer, a step earlier) gave. cache: of this layer alone, or its place is `layer`.
        """
        config = self.config
        both = jnp.concatenate([self.token_norm(embedded), self.hidden_norm(hidden)], axis=-1)
        phases = config.rope(0).phases(plan.positions, config.rope_dim)
        split = nnx.split(self.block)
        form = Form() if form is None else form
        x, cache = apply_block(*split, self.project(both), phases, cache, plan, jnp.int32(layer), form)
        return self.final_norm(x), cache


class NextTokens(HeadBody):
    """A layer a draft step: layer j reads token i + 1 + j in row i, and predicts the one behind it.

    Args:
      layers: as many as tokens are drafted. chained: a layer reads the hidden states of the one before, as DeepSeek's
        were trained; False: every layer reads the target's, as MiMo's.
    """

    def __init__(self, layers: Sequence[NextToken], *, chained: bool):
        first = layers[0]
        self.layers, self.chained = nnx.List(layers), chained
        self.ahead = self.num_cached = len(layers)
        self.config, self.spec, self.kv_layout = first.config, first.spec, first.kv_layout

    def __call__(
        self, embedded: jax.Array, hidden: jax.Array, cache: Cache, plan: Plan, /, *, layer: int = 0
    ) -> tuple[jax.Array, Cache]:
        """As `NextToken`, of one layer; `cache` holds all of them."""
        return self.layers[layer](embedded, hidden, cache, plan, layer=layer)
