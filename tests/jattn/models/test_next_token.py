"""The layer that predicts a token further ahead, against the logits that transformers computed."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.loaders.errors import ModelFileError
from jattn.loaders.hf_folder import read_folder
from jattn.loaders.open import open_model
from jattn.loaders.weights import load_next_arrays
from jattn.models.load import build_next
from jattn.modes import ForwardMode
from jattn.plan import make_plan
from jattn.resolve import resolve

PAGE, TABLE = 8, np.asarray([[3, 0, 5, 1, 4, 2]])


@functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
def step(model, inputs, cache, plan):
    return model(*inputs, cache, plan)


def take(model, inputs, start, end, cache):
    """Hidden states of rows `start` to `end` of one request; inputs: arrays of a row each."""
    lens = np.asarray([end]), np.asarray([end - start])
    plan = make_plan(ForwardMode.EXTEND, *lens, TABLE, page_size=PAGE)
    return step(model, tuple(x[start:end] for x in inputs), cache, plan)


def test_logits_in_two_steps_are_those_of_transformers(checkpoint):
    held = checkpoint("deepseek-v3")
    with np.load(held.path / "expected.npz") as file:
        want = file["logits_next"]
    target, spec = held.build(), held.config.attn_spec()
    choice = resolve(spec, "native", "cpu")
    layer = build_next(held.config, spec, choice, load_next_arrays(open_model(held.path)), weight_first=True)
    pool: dict[str, Any] = dict(num_pages=6, page_size=PAGE, dtype=jnp.float32)
    ids = jnp.asarray(held.prompts[0])[:39]
    hidden, _ = take(target, [ids], 0, len(ids), target.new_cache(**pool))
    inputs, cache = (target.embedded(ids[1:]), hidden[:-1]), layer.new_cache(**pool)
    for start, end in ((0, 19), (19, 38)):
        out, cache = take(layer, inputs, start, end, cache)
        np.testing.assert_allclose(target.logits(out), want[start:end], rtol=0, atol=2e-4)


def test_a_layer_that_is_not_there_is_refused(checkpoint):
    file = open_model(checkpoint("deepseek-v3").path)
    with pytest.raises(ModelFileError, match="has 1 layers that predict further ahead: there is no index 1"):
        next(iter(load_next_arrays(file, 1)))
    without = open_model(checkpoint("deepseek-v2").path)
    with pytest.raises(ModelFileError, match="has 0 layers that predict further ahead: there is no index 0"):
        load_next_arrays(without)


def test_a_tensor_of_it_that_is_missing_is_named(checkpoint):
    file = read_folder(checkpoint("deepseek-v3").path)
    tensors = {name: info for name, info in file.tensors.items() if not name.endswith("eh_proj.weight")}
    with pytest.raises(ModelFileError, match=r"lacks tensor 'model.layers.2.eh_proj.weight': want shape \(32, 64\)"):
        load_next_arrays(dataclasses.replace(file, tensors=tensors))
