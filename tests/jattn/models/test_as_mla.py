"""A grouped-query model written as a latent-attention model computes the same logits."""

import dataclasses

import numpy as np
import pytest
from packed_run import Run, within

from jattn.dispatch import AttnForwardMethod as M
from jattn.models.as_mla import as_mla_arrays, as_mla_config
from jattn.modes import ForwardMode


def converted(held):
    """The checkpoint as an MLA model."""
    arrays = dict(as_mla_arrays(held.config, held.arrays.items()))
    return dataclasses.replace(held, config=as_mla_config(held.config), arrays=arrays)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("qwen3", M.MLA),  # with norms of q and k
        *(
            pytest.param(name, method, marks=pytest.mark.long)
            for name in ("llama-llama3", "llama-yarn", "qwen3")
            for method in (M.MHA, M.MLA, M.MHA_ONE_SHOT, M.MHA_CHUNKED_KV)
        ),
    ],
)
def test_logits_are_those_that_transformers_computes_of_the_model_itself(name, method, checkpoint):
    held = checkpoint(name)
    run = Run(converted(held).build(), held.prompts, method=method, capacity=22)
    got = [run.take(ForwardMode.EXTEND, counts, rows=40, longest=20) for counts in ((20, 9), (9, 20))]
    for (first, second), want in zip(zip(*got, strict=True), held.logits, strict=True):
        within(np.concatenate([first, second]), want[: len(first) + len(second)])


@pytest.mark.long
def test_biases_carry_over(checkpoint):
    held = checkpoint("qwen2")
    held = dataclasses.replace(held, config=dataclasses.replace(held.config, windows=()))
    counts = dict(counts=(20, 9), rows=40, longest=20)
    plain, equal = (
        Run(one.build(), held.prompts).take(ForwardMode.EXTEND, **counts) for one in (held, converted(held))
    )
    for got, want in zip(equal, plain, strict=True):
        within(got, want)


@pytest.mark.parametrize(
    ("name", "option"),
    [("mistral", "windows"), ("gpt-oss", "windows"), ("gemma2", "windows"), ("deepseek-v2", "latent attention")],
)
def test_a_model_that_has_no_equal_is_refused(name, option, checkpoint):
    with pytest.raises(ValueError, match=f"as_mla of a model with {option}: .*; leave as_mla out"):
        as_mla_config(checkpoint(name).config)


@pytest.mark.parametrize(("field", "value"), [("sinks", True), ("attn_soft_cap", 30.0)])
def test_options_that_latent_attention_lacks_are_refused(field, value, checkpoint):
    config = dataclasses.replace(checkpoint("qwen3").config, **{field: value})
    with pytest.raises(ValueError, match=f"as_mla of a model with {field}"):
        as_mla_config(config)
