"""Draft heads: small networks that read the target's hidden states and predict the token after the next.

Row i pairs what the target computed at token i with token i + 1, and predicts token i + 2; a level of a draft tree
feeds a head its own output instead. Sources: arXiv:2401.15077 (EAGLE), arXiv:2406.16858 (EAGLE-2, the same network),
arXiv:2503.01840 (EAGLE-3), arXiv:2412.19437, section 2.2 (MTP).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.cache import Cache
from jattn.models.config import ModelConfig
from jattn.models.decoder import Attention, Block, Decoder, Spec, apply_block
from jattn.models.head_body import HeadBody
from jattn.models.latent import Form
from jattn.models.layers import Linear, RMSNorm, project
from jattn.models.mlp import MLP
from jattn.plan import Plan
from jattn.resolve import Choice
from jattn.spec import AttnSpec


class Eagle(HeadBody):
    """layers(fc([embedding, features])), the features being the target's final hidden states.

    The first layer has no norm before its attention, and nothing is normed behind the last.
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
        bias: bool = False,
    ):
        kwargs: dict[str, Any] = dict(rngs=rngs, dtype=dtype, weight_first=weight_first)
        self.config, self.spec, self.kv_layout = config, spec, choice.kv_layout
        self.num_cached = config.num_layers
        self.fc = Linear(2 * config.d_model, config.d_model, bias=bias, **kwargs)
        self.layers = nnx.List(
            [
                Block(config, spec, choice, experts=config.has_experts(layer), normed=layer > 0, **kwargs)
                for layer in range(config.num_layers)
            ]
        )

    def __call__(self, embedded, features, cache, plan, /, *, layer=0):
        """As `HeadBody`, of all layers."""
        x = self.fc(jnp.concatenate([embedded, features], axis=-1))
        phases = self.config.rope(0).phases(plan.positions, self.config.rope_dim)
        for layer, block in enumerate(self.layers):
            x, cache = apply_block(*nnx.split(block), x, phases, cache, plan, jnp.int32(layer), Form())
        return x, cache


class Eagle3(HeadBody):
    """One layer whose attention reads [norm(embedding), norm(features)], added to the features.

    The features are fc([streams behind some of the target's layers]), or a level above the head's own output.

    Args: config: of the head's layer. feature_dim: width of the streams together.
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: AttnSpec,
        choice: Choice,
        *,
        feature_dim: int,
        rngs: nnx.Rngs,
        dtype=jnp.float32,
        weight_first: bool = False,
    ):
        def norm() -> RMSNorm:
            return RMSNorm(config.d_model, config.rms_eps, dtype, wide=config.wide_norms)

        kwargs: dict[str, Any] = dict(rngs=rngs, dtype=dtype, weight_first=weight_first)
        self.config, self.spec, self.kv_layout = config, spec, choice.kv_layout
        self.fc = Linear(feature_dim, config.d_model, **kwargs)
        self.token_norm, self.hidden_norm = norm(), norm()
        self.attn = Attention(config, spec, choice, in_dim=2 * config.d_model, **kwargs)
        self.mlp_norm, self.mlp = norm(), MLP(config, **kwargs)
        self.final_norm = norm()

    def __call__(self, embedded, features, cache: Any, plan, /, *, layer=0):
        """As `HeadBody`, of its one layer."""
        both = jnp.concatenate([self.token_norm(embedded), self.hidden_norm(features)], axis=-1)
        phases = self.config.rope(0).phases(plan.positions, self.config.rope_dim)
        attended, cache = self.attn(both, phases, cache, plan, jnp.int32(0), Form())
        x = features + attended
        return x + self.mlp(self.mlp_norm(x)), cache

    def features(self, hidden, /):
        """As `HeadBody`."""
        flat = self.fc(hidden.reshape(-1, hidden.shape[-1]))
        return flat.reshape(*hidden.shape[:-1], flat.shape[-1])

    def readout(self, hidden, /):
        """As `HeadBody`."""
        return self.final_norm(hidden)


class DraftHead(nnx.Module):
    """A head as a drafter, over the target's embedding and its own or the target's rows of the vocabulary.

    Args:
      rows: [n, d_model], of the tokens that it can draft; None shares the target's, all or those of `token_ids`.
      token_ids: i32[n], their ids; None where they are the whole vocabulary. A subset saves most of a draft's cost:
        rows of rare tokens would be read and never win.
      embed: [vocab, d_model]; None shares the target's parameter. taps: layers of the target behind which its stream is
        read, together the features; () for its final hidden states.
    """

    def __init__(
        self,
        body: HeadBody,
        target: Decoder,
        *,
        rows: jax.Array | None = None,
        token_ids: jax.Array | None = None,
        embed: jax.Array | None = None,
        taps: tuple[int, ...] = (),
    ):
        config, layers = target.config, target.config.num_layers
        if not all(0 <= tap <= layers for tap in taps):
            raise ValueError(f"taps={taps} of a target of {layers} layers: want 0 to {layers} each")
        self.body, self.taps, self.feature_dim = body, taps, max(len(taps), 1) * config.d_model
        self.ahead, self.chained = body.ahead, body.chained
        self.embed = target.embed if embed is None else nnx.Param(embed)
        self.embed_scale, self.weight_first = config.embed_scale, target.weight_first
        held = target.embed if config.tied_embeddings else target.lm_head.weight
        if rows is not None:
            self.rows = nnx.Param(rows)
        else:
            self.rows = held if token_ids is None else nnx.Param(held[...][jnp.asarray(token_ids)])
        self.ids = None if token_ids is None else nnx.Variable(jnp.asarray(token_ids, jnp.int32))
        self.vocab_size = config.vocab_size
        wants = (config.vocab_size if token_ids is None else len(token_ids), body.config.d_model)
        if self.rows.shape != wants or self.embed.shape != (config.vocab_size, body.config.d_model):
            raise ValueError(
                f"rows{list(self.rows.shape)}, embed{list(self.embed.shape)} of a head of width {body.config.d_model} "
                f"that drafts {wants[0]} of {config.vocab_size} tokens: want rows{list(wants)} and "
                f"embed{[config.vocab_size, body.config.d_model]}"
            )

    def __call__(self, tokens, features, cache, plan, /, *, level: int = 0):
        """As `combinators.drafter.Drafter`."""
        return self.body(self.embedded(tokens), features, cache, plan, layer=level)

    def embedded(self, tokens: jax.Array) -> jax.Array:
        """tokens i32[rows] -> what the head reads of them, [rows, d_model]."""
        x, scale = self.embed[...][tokens], self.embed_scale
        return x if scale is None else x * jnp.asarray(scale, x.dtype)

    def logits(self, hidden: jax.Array, /) -> jax.Array:
        """[rows, d_model] -> f32[rows, n]."""
        read = self.body.readout(hidden)
        return project(read, self.rows[...], weight_first=self.weight_first, out_dtype=jnp.float32)

    def kept(self, hidden: jax.Array, /) -> jax.Array:
        """The target's hidden states, or of those with streams the streams: [..., all] -> [..., `feature_dim`]."""
        return hidden[..., -self.feature_dim :]

    def features(self, hidden: jax.Array, /) -> jax.Array:
        """Of the target's hidden states, or of what was kept of them: [..., all] -> [..., d_model]."""
        return self.body.features(self.kept(hidden))

    def token_ids(self) -> jax.Array | None:
        """i32[n], or None."""
        return None if self.ids is None else self.ids[...]

    def new_cache(self, *, num_pages: int, page_size: int, dtype=None) -> Cache:
        """An empty cache of the head's layers."""
        return self.body.new_cache(num_pages=num_pages, page_size=page_size, dtype=dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class WithStreams:
    """A decoder whose hidden states carry the streams behind `taps` layers at their end."""

    model: Decoder
    taps: tuple[int, ...]

    def __call__[C: Cache](
        self, tokens: jax.Array, cache: C, plan: Plan, form: Form | None = None, /
    ) -> tuple[jax.Array, C]:
        """i32[rows] -> [rows, d_model * (1 + taps)], and the cache."""
        hidden, cache, streams = self.model.tapped(tokens, cache, plan, form, taps=self.taps)
        return jnp.concatenate([hidden, *streams], axis=-1), cache

    def logits(self, hidden: jax.Array, /) -> jax.Array:
        """[rows, d_model * (1 + taps)] -> f32[rows, vocab_size]."""
        return self.model.logits(hidden[:, : self.model.config.d_model])
