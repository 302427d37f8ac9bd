"""A tiny random model for tests of behaviour."""

import dataclasses

from flax import nnx

from jattn.models.config import ModelConfig
from jattn.models.decoder import Decoder
from jattn.resolve import resolve

CONFIG = ModelConfig(
    num_layers=3,
    d_model=48,
    num_q_heads=6,
    num_kv_heads=2,
    head_dim=8,
    ffn_dim=64,
    vocab_size=128,
    max_context=512,
    rms_eps=1e-5,
    rope_theta=1e4,
)


def tiny(kv_dtype=None, num_layers=CONFIG.num_layers):
    config = dataclasses.replace(CONFIG, num_layers=num_layers)
    spec = config.attn_spec(kv_dtype)
    return Decoder(config, spec, resolve(spec, "native", "cpu"), rngs=nnx.Rngs(0), weight_first=True)
