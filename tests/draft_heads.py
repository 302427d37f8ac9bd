"""Draft heads with random weights over the tiny model."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn.models.config import ModelConfig
from jattn.models.decoder import Decoder
from jattn.models.draft_head import DraftHead, Eagle, Eagle3
from jattn.models.next_token import NextToken, NextTokens
from jattn.resolve import resolve
from jattn.spec import AttnSpec

TAPS = (0, 2, 3)
KINDS = ("eagle", "eagle3", "mtp")


def head_config(config: ModelConfig, num_layers: int) -> ModelConfig:
    """A grouped-query head for any target of this width."""
    return ModelConfig(
        num_layers=num_layers,
        d_model=config.d_model,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=8,
        ffn_dim=40,
        vocab_size=config.vocab_size,
        max_context=config.max_context,
        rms_eps=1e-5,
        rope_theta=1e4,
    )


def draft_head(target: Decoder, kind: str, *, num_ids: int | None = None, seed: int = 3) -> DraftHead:
    """A random head; `num_ids` tokens, drawn, are its vocabulary."""
    config = head_config(target.config, 2 if kind == "eagle" else 1)
    spec = config.attn_spec(None)
    assert isinstance(spec, AttnSpec)
    choice = resolve(spec, "native", "cpu")
    rngs = nnx.Rngs(seed)
    if kind == "eagle":
        body, taps = Eagle(config, spec, choice, rngs=rngs, bias=True, weight_first=True), ()
    elif kind == "mtp":
        spec = target.config.attn_spec(None)
        body = NextToken(target.config, spec, resolve(spec, "native", "cpu"), rngs=rngs, weight_first=True)
        taps = ()
    else:
        taps = tuple(min(tap, target.config.num_layers) for tap in TAPS)
        width = len(taps) * target.config.d_model
        body = Eagle3(config, spec, choice, feature_dim=width, rngs=rngs, weight_first=True)
    ids = None
    if num_ids is not None:
        ids = jnp.asarray(np.random.default_rng(seed).permutation(target.config.vocab_size)[:num_ids], jnp.int32)
    return DraftHead(body, target, token_ids=ids, taps=taps)


def layer_head(
    target: Decoder, num_layers: int, *, chained: bool = True, token_ids: list[int] | None = None, seed: int = 3
) -> DraftHead:
    """A random head of a layer a step, of the target's own kind; it drafts `token_ids`, or any token."""
    spec, rngs = target.config.attn_spec(None), nnx.Rngs(seed)
    choice = resolve(spec, "native", "cpu")
    layers = [
        NextToken(target.config, spec, choice, rngs=rngs, weight_first=True, index=index) for index in range(num_layers)
    ]
    ids = None if token_ids is None else jnp.asarray(token_ids, jnp.int32)
    return DraftHead(NextTokens(layers, chained=chained), target, token_ids=ids)
