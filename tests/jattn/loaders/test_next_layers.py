"""Several layers behind a model's last, in the layouts that DeepSeek and MiMo publish."""

import json

import numpy as np
import pytest
from next_layers import HF, write_deepseek, write_mimo
from safetensors.numpy import load_file, save_file

from jattn.loaders.errors import ModelFileError
from jattn.loaders.open import open_model
from jattn.loaders.weights import load_arrays, load_next_arrays


def test_each_of_deepseeks_layers_is_read_by_its_own_names(tmp_path):
    drawn = write_deepseek(tmp_path / "model", 3)
    file = open_model(tmp_path / "model")
    own = dict(load_arrays(open_model(HF / "deepseek-v3")))
    for name, array in load_arrays(file):  # the model itself is as it was
        np.testing.assert_array_equal(array, own.pop(name))
    assert not own
    for index in range(3):
        got, front = dict(load_next_arrays(file, index)), f"model.layers.{2 + index}."
        for ours, theirs in (("token_norm", "enorm"), ("hidden_norm", "hnorm"), ("project", "eh_proj")):
            np.testing.assert_array_equal(got[ours], drawn[f"{front}{theirs}.weight"])
        np.testing.assert_array_equal(got["final_norm"], drawn[f"{front}shared_head.norm.weight"])
        np.testing.assert_array_equal(got["block.o"], drawn[f"{front}self_attn.o_proj.weight"])
        np.testing.assert_array_equal(got["block.down"][5], drawn[f"{front}mlp.experts.5.down_proj.weight"])
    with pytest.raises(ModelFileError, match="has 3 layers that predict further ahead: there is no index 3"):
        load_next_arrays(file, 3)


def test_mimos_layers_are_counted_from_zero_and_read_the_hidden_state_first(tmp_path):
    drawn = write_mimo(tmp_path / "model", 2)
    file = open_model(tmp_path / "model")
    assert len(dict(load_arrays(file))) == len(dict(load_arrays(open_model(HF / "qwen2"))))
    assert not file.table.family.chained_next
    for index in range(2):
        got, front = dict(load_next_arrays(file, index)), f"model.mtp_layers.{index}."
        hidden, token = np.split(drawn[f"{front}input_proj.weight"], 2, axis=1)
        np.testing.assert_array_equal(got["project"], np.concatenate([token, hidden], axis=1))
        np.testing.assert_array_equal(got["token_norm"], drawn[f"{front}token_layernorm.weight"])
        np.testing.assert_array_equal(got["final_norm"], drawn[f"{front}final_layernorm.weight"])
        np.testing.assert_array_equal(got["block.q_bias"], drawn[f"{front}self_attn.q_proj.bias"])
        np.testing.assert_array_equal(got["block.gate"], drawn[f"{front}mlp.gate_proj.weight"])


def test_a_layer_that_is_one_too_many_or_lacks_a_tensor_is_named(tmp_path):
    path = tmp_path / "model"
    write_mimo(path, 2)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | dict(num_nextn_predict_layers=1)))
    with pytest.raises(ModelFileError, match="are not part of architecture 'mimo' as known here: model.mtp_layers.1"):
        load_arrays(open_model(path))
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    del tensors["model.mtp_layers.1.input_proj.weight"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"lacks tensor 'model.mtp_layers.1.input_proj.weight': want shape"):
        load_next_arrays(open_model(path), 1)
