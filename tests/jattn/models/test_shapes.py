"""Models of published sizes, as shapes only: the parameters that their authors count."""

import jax
import pytest
from flax import nnx

from jattn.loaders.hf_config import read_config
from jattn.models.decoder import Decoder
from jattn.resolve import resolve
from jattn.serving.build import config_of

LLAMA_3_8B = dict(
    model_type="llama",
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
)
LATENT = dict(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, rms_norm_eps=1e-6)
YARN = dict(beta_fast=32, beta_slow=1, factor=40, original_max_position_embeddings=4096, type="yarn")
V2_LITE = LATENT | dict(
    model_type="deepseek_v2",
    hidden_size=2048,
    intermediate_size=10944,
    moe_intermediate_size=1408,
    num_hidden_layers=27,
    num_attention_heads=16,
    n_routed_experts=64,
    n_shared_experts=2,
    num_experts_per_tok=6,
    first_k_dense_replace=1,
    moe_layer_freq=1,
    norm_topk_prob=False,
    routed_scaling_factor=1.0,
    scoring_func="softmax",
    topk_method="greedy",
    n_group=1,
    topk_group=1,
    q_lora_rank=None,
    vocab_size=102400,
    max_position_embeddings=163840,
    rope_theta=10000,
    rope_scaling=YARN | dict(mscale=0.707, mscale_all_dim=0.707),
)
V3 = LATENT | dict(
    model_type="deepseek_v3",
    hidden_size=7168,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    num_hidden_layers=61,
    num_attention_heads=128,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    first_k_dense_replace=3,
    moe_layer_freq=1,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    n_group=8,
    topk_group=4,
    q_lora_rank=1536,
    vocab_size=129280,
    max_position_embeddings=163840,
    num_nextn_predict_layers=1,
    rope_theta=10000,
    rope_scaling=YARN | dict(mscale=1.0, mscale_all_dim=1.0),
    quantization_config=dict(activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=[128, 128]),
)


@pytest.mark.parametrize(
    ("published", "billions"),
    [
        (LLAMA_3_8B, 8.030),
        (V2_LITE, 15.706),
        pytest.param(V3, 671.026, marks=pytest.mark.long),
    ],
    ids=["Llama-3-8B", "DeepSeek-V2-Lite", "DeepSeek-V3"],
)
def test_parameters_are_as_many_as_published(published, billions):
    config = config_of(read_config(published)[1])
    spec = config.attn_spec()
    model = nnx.eval_shape(lambda: Decoder(config, spec, resolve(spec, "native", "cpu"), rngs=nnx.Rngs(0)))
    assert round(sum(leaf.size for leaf in jax.tree.leaves(model)) / 1e9, 3) == billions
