"""Latent attention in a model: every form against transformers' logits, and the constants of published models."""

import numpy as np
import pytest
from packed_run import Run, within

from jattn.dispatch import AttnForwardMethod as M
from jattn.loaders.hf_config import read_config
from jattn.models.rope import inv_freq
from jattn.modes import ForwardMode
from jattn.serving.build import config_of

FORMS = (M.MHA, M.MHA_ONE_SHOT, M.MHA_CHUNKED_KV, M.MLA)


@pytest.mark.long  # programs of each; by default `serving/test_latent_forms` runs one
@pytest.mark.parametrize("method", FORMS)
@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v2-groups", "deepseek-v3"])
def test_logits_of_chunked_prefill_in_each_form_then_of_drafts(name, method, checkpoint):
    held = checkpoint(name)
    run = Run(held.build(), held.prompts, method=method, capacity=16 if method == M.MHA_CHUNKED_KV else 131072)
    got: list[list[np.ndarray]] = [[], []]
    steps = [(ForwardMode.EXTEND, counts, 20) for counts in ((11, 3), (7, 13), (0, 9))]  # one waits; chunks of 8
    steps += [(ForwardMode.TARGET_VERIFY, (5, 4), 12)]
    for mode, counts, rows in steps:
        for kept, part in zip(got, run.take(mode, counts, rows=rows, longest=min(rows, 13)), strict=True):
            kept.append(part)
    for parts, want in zip(got, held.logits, strict=True):
        rows = np.concatenate(parts)
        within(rows, want[: len(rows)])


PUBLISHED = dict(  # of config.json at huggingface.co/deepseek-ai, as far as attention goes
    hidden_size=2048,
    intermediate_size=10944,
    num_hidden_layers=2,
    num_attention_heads=16,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    vocab_size=1024,
    max_position_embeddings=163840,
    rms_norm_eps=1e-6,
    rope_theta=10000,
)
YARN = dict(beta_fast=32, beta_slow=1, factor=40, original_max_position_embeddings=4096, type="yarn")


@pytest.mark.parametrize(
    ("kind", "mscale", "scale"), [("deepseek_v2", 0.707, 0.114721), ("deepseek_v3", 1.0, 0.135234)]
)
def test_scale_and_frequencies_are_those_of_the_published_models(kind, mscale, scale):
    scaling = YARN | dict(mscale=mscale, mscale_all_dim=mscale)
    _, hparams = read_config(PUBLISHED | dict(model_type=kind, rope_scaling=scaling))
    config = config_of(hparams)
    assert config.attn_spec().sm_scale == pytest.approx(scale, abs=5e-7)
    rope = config.rope(0)
    assert (
        rope.scaling is not None and rope.scaling.amplitude == 1.0
    )  # cos and sin are not rescaled: the scale carries the gain
    ratio = inv_freq(64, 10000.0, rope.scaling) / inv_freq(64, 10000.0)
    assert (ratio[:11] == 1).all() and ratio[11] < 1  # the ramp goes from feature 10 to 23
    np.testing.assert_allclose(ratio[23:], 1 / 40, rtol=1e-6)
    assert ratio[22] > 1.01 / 40
