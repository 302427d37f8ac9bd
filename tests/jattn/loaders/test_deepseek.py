"""DeepSeek checkpoints: what config.json says, 8-bit weights, and refusals in one sentence."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jattn.loaders.errors import ModelFileError
from jattn.loaders.hf_config import read_config
from jattn.loaders.hf_folder import read_folder
from jattn.loaders.shape import id_tokenizer, read_shape
from jattn.loaders.weights import load_arrays

HF = Path(__file__).parents[2] / "data" / "hf"
BLOCK = (16, 12)  # divides no width here
SCALED = dict(quant_method="fp8", fmt="e4m3", weight_block_size=list(BLOCK))


def config_of(name="deepseek-v3", **changes) -> dict:
    return json.loads((HF / name / "config.json").read_text()) | changes


def refusal(config: dict) -> str:
    with pytest.raises(ModelFileError) as error:
        read_config(config)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_public_spellings_say_what_transformers_writes():
    rope = config_of()["rope_parameters"]
    public = config_of(
        head_dim=None,
        qk_head_dim=None,
        rope_parameters=None,
        rope_theta=rope["rope_theta"],
        rope_scaling={name: value for name, value in rope.items() if name not in ("rope_theta", "rope_type")}
        | {"type": "yarn"},
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        moe_layer_freq=1,
        ep_size=1,
        aux_loss_alpha=0.001,
        seq_aux=True,
    )
    assert read_config(public) == read_config(config_of())


def test_which_layers_have_experts():
    _, hparams = read_config(config_of(num_hidden_layers=7, first_k_dense_replace=2, moe_layer_freq=2))
    assert [hparams.has_experts(layer) for layer in range(7)] == [False, False, True, False, True, False, True]
    _, dense = read_config(config_of("deepseek-v2", n_routed_experts=None))
    assert not any(dense.has_experts(layer) for layer in range(7))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deepseek-v3", dict(topk_method="best"), "topk_method is 'best': want one of greedy, group_limited_greedy, "),
        ("deepseek-v3", dict(topk_method=["greedy"]), "topk_method is ['greedy']"),
        ("deepseek-v3", dict(scoring_func="tanh"), "scoring_func is 'tanh': want one of softmax, sigmoid"),
        ("deepseek-v2", dict(norm_topk_prob=True), "norm_topk_prob is True: only False is supported"),
        ("deepseek-v3", dict(n_group=3), "n_group is 3: want groups of one size of n_routed_experts=8"),
        ("deepseek-v3", dict(topk_group=5), "topk_group is 5: want at most n_group=4"),
        ("deepseek-v3", dict(topk_group=1), "topk_group is 1: want at most n_group=4, and room for"),
        ("deepseek-v3", dict(num_experts_per_tok=9), "num_experts_per_tok is 9: want at most n_routed_experts=8"),
        ("deepseek-v3", dict(kv_lora_rank=None), "kv_lora_rank is missing: want a whole number above 0"),
        ("deepseek-v3", dict(qk_rope_head_dim=7, head_dim=7, qk_head_dim=19), "qk_rope_head_dim is 7: want an even"),
        ("deepseek-v3", dict(num_key_value_heads=2), "num_key_value_heads is 2: only 4 is supported"),
        ("deepseek-v3", dict(attention_bias=True), "attention_bias is True: only False is supported"),
        ("deepseek-v3", dict(index_topk=2048), "index_topk is 2048: this variant of 'deepseek_v3' is not supported"),
        ("deepseek-v3", dict(rope_interleave=1), "rope_interleave is 1: want true or false"),
        ("deepseek-v3", dict(quantization_config={"quant_method": "awq"}), "want quant_method fp8 with fmt e4m3"),
        ("deepseek-v3", dict(quantization_config={"quant_method": "fp8"}), "weight_block_size is missing: want two"),
    ],
)
def test_a_config_beyond_what_is_known_is_refused_by_name(name, changes, message):
    assert message in refusal(config_of(name, **changes))


@pytest.fixture
def packed(tmp_path) -> Path:
    """A folder whose projections are stored in 8 bits with a scale a block; norms, router and embeddings are not."""
    folder = Path(shutil.copytree(HF / "deepseek-v3", tmp_path / "packed"))
    (folder / "config.json").write_text(json.dumps(config_of(quantization_config=SCALED)))
    tensors = load_file(folder / "model.safetensors")
    for name, weight in list(tensors.items()):
        if "_proj" in name and "eh_proj" not in name:
            rows, columns = (-(-size // step) for size, step in zip(weight.shape, BLOCK, strict=True))
            scales = np.random.default_rng(len(name)).uniform(0.01, 0.1, (rows, columns)).astype(np.float32)
            wide = np.kron(scales, np.ones(BLOCK, np.float32))[: weight.shape[0], : weight.shape[1]]
            tensors[name] = (weight / wide).astype(ml_dtypes.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scales
    save_file(tensors, folder / "model.safetensors")
    return folder


def change(folder: Path, edit) -> str:
    tensors = read_all(folder)
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelFileError) as error:
        list(load_arrays(read_folder(folder)))
    return str(error.value)


def read_all(folder: Path) -> dict[str, np.ndarray]:
    from jattn.loaders.hf_float8 import read_float8

    model = read_folder(folder)
    stored = {name: info for name, info in model.tensors.items()}
    plain = {info.name: model._read(info, np.float32) for info in model.scales.values()}
    for name, info in stored.items():
        plain[name] = (
            np.array(read_float8(info.shard, name)) if info.dtype == "F8_E4M3" else model._read(info, np.float32)
        )
    return plain


def test_8_bit_weights_are_scaled_block_by_block(packed):
    got, want = (dict(load_arrays(read_folder(path))) for path in (packed, HF / "deepseek-v3"))
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert got[name].dtype == np.float32 and got[name].shape == array.shape
        # e4m3 keeps 3 bits behind the leading one; the smallest values of a block lose more
        assert np.abs(got[name] - array).max() <= (2.0**-4 + 1e-6) * np.abs(array).max(), name
    assert any((got[name] != array).any() for name, array in want.items())
    stored = read_all(packed)
    name = "model.layers.0.self_attn.o_proj.weight"
    wide = np.kron(stored[f"{name}_scale_inv"], np.ones(BLOCK, np.float32))[:32, :40]
    np.testing.assert_array_equal(got["layers.0.o"], stored[name].astype(np.float32) * wide)


def test_scales_that_are_missing_or_misshapen_are_named(packed):
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    said = change(packed, lambda tensors: tensors.update({f"{name}_scale_inv": np.ones((2, 2), np.float32)}))
    assert f"tensor {name + '_scale_inv'!r} is F32 of shape (2, 2): want plain floats of shape (2, 3)" in said
    said = change(packed, lambda tensors: tensors.pop(f"{name}_scale_inv"))
    assert f"lacks tensor {name + '_scale_inv'!r}, the scales of {name!r}" in said


def test_8_bit_weights_that_the_config_does_not_announce_are_refused(packed):
    (packed / "config.json").write_text(json.dumps(config_of()))
    with pytest.raises(ModelFileError, match="is stored as F8_E4M3: want one of F64, F32, F16, BF16"):
        list(load_arrays(read_folder(packed)))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.self_attn.kv_b_proj.weight", "want shape (88, 24)"),
        ("model.layers.1.mlp.experts.7.down_proj.weight", "want shape (32, 20)"),
        ("model.layers.1.mlp.gate.e_score_correction_bias", "want shape (8,)"),
        ("model.layers.1.mlp.shared_experts.gate_proj.weight", "want shape (40, 32)"),
    ],
)
def test_a_tensor_that_is_missing_is_named(name, shape, tmp_path):
    folder = Path(shutil.copytree(HF / "deepseek-v3", tmp_path / "cut"))
    said = change(folder, lambda tensors: tensors.pop(name))
    assert f"lacks tensor {name!r}: {shape}" in said


def test_a_shape_without_a_tokenizer_takes_and_prints_ids(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_of()))
    for path in (tmp_path, tmp_path / "config.json"):
        shape = read_shape(path)
        assert shape.hparams.kv_lora_rank == 24
        assert shape.tokenizer().encode("17 4 120") == [17, 4, 120]
        assert shape.tokenizer().decode([5, 60]) == " 5 60"
        assert shape.tokenizer().eos_ids == (2,)
    assert read_shape(HF / "deepseek-v3").tokenizer().encode("te") != []
    with pytest.raises(ValueError, match="the prompt is 'Hello', but this model has no tokenizer: give token ids"):
        id_tokenizer(9).encode("Hello")
