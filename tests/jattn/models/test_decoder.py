"""What a decoder refuses, how narrow dtypes are kept, and which programs its layers become."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jattn.models import decoder
from jattn.models.config import ExpertsConfig
from jattn.models.decoder import Decoder
from jattn.models.load import build_decoder
from jattn.modes import ForwardMode
from jattn.plan import make_plan
from jattn.resolve import resolve
from jattn.serving.loaded import Options, load


def test_a_spec_that_the_config_does_not_give_its_layer_is_refused(checkpoint):
    held = checkpoint("gemma2")
    spec = held.config.attn_spec()
    choice = resolve(spec, "native", "cpu")
    with pytest.raises(ValueError, match="layer 1 has .* but the config wants .*: take config.attn_specs"):
        build_decoder(held.config, spec, choice, held.arrays.items())
    with pytest.raises(ValueError, match="1 specs and 1 choices for num_layers=2: want one a layer"):
        build_decoder(held.config, (spec,), (choice,), held.arrays.items())


def test_windows_and_experts_out_of_range_are_refused(checkpoint):
    with pytest.raises(ValueError, match="3 windows for num_layers=2: want one each"):
        dataclasses.replace(checkpoint("mistral").config, windows=(8, 8, 8))
    with pytest.raises(ValueError, match="top_k=5 of num_experts=4"):
        ExpertsConfig(num_experts=4, top_k=5, limit=7.0, alpha=1.702)


def test_tensors_that_the_config_does_not_ask_for_are_refused(checkpoint):
    held = checkpoint("qwen2")
    with pytest.raises(ValueError, match="tensor 'layers.0.q_bias' is not part of this model"):
        held.build(dataclasses.replace(held.config, qkv_bias=False))
    with pytest.raises(ValueError, match="6 tensors are missing: layers.0.k_bias"):
        held.build(without=("q_bias", "k_bias", "v_bias"))


def test_layers_of_different_windows_have_choices_of_their_own(checkpoint):
    model = load(Options(model=str(checkpoint("gemma2").path))).model
    needs = [sorted(block.attn.choice.needs) for block in model.layers]
    assert needs == [["logit_soft_cap", "sliding_window"], ["logit_soft_cap"]]


def test_equal_layers_are_traced_once_a_kind(checkpoint, monkeypatch):
    held = checkpoint("gemma2")
    config = dataclasses.replace(held.config, num_layers=6, windows=(8, None) * 3)
    arrays = {
        name.replace(f"layers.{i}.", f"layers.{i + shift}."): array
        for name, array in held.arrays.items()
        for shift in ((0, 2, 4) if name.startswith("layers.") else (0,))
        for i in (0, 1)
        if not name.startswith("layers.") or name.startswith(f"layers.{i}.")
    }
    model = dataclasses.replace(held, arrays=arrays).build(config)
    traced = []
    apply = decoder.Block.__call__
    monkeypatch.setattr(decoder.Block, "__call__", lambda self, *args: (traced.append(self), apply(self, *args))[1])
    run(model, jnp.zeros(7, jnp.int32), 7)  # a length that no other test has
    assert len(traced) == 2


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "qwen3"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_narrow_model_is_near_the_wide_one(name, dtype, checkpoint):
    held = checkpoint(name)
    model = held.build(dtype=dtype)
    assert model.embed.dtype == dtype
    wide = {"gemma3", "gpt-oss"}
    assert model.final_norm.weight.dtype == (jnp.float32 if name in wide else dtype)
    prompt = held.prompts[0][:12]
    got = run(model, jnp.asarray(prompt), 12, dtype=dtype)
    want = held.logits[0][:12]
    assert got.dtype == np.float32
    assert np.abs(got - want).mean() < (0.1 if dtype == jnp.bfloat16 else 0.02) * want.std()


def run(model: Decoder, ids, count, dtype=jnp.float32):
    cache = model.new_cache(num_pages=4, page_size=4, dtype=dtype)
    lens = np.asarray([count])
    plan = make_plan(ForwardMode.EXTEND, lens, lens, np.arange(4)[None], page_size=4)
    hidden, _ = model(ids, cache, plan)
    return np.asarray(model.logits(hidden))
