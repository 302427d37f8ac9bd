"""Checkpoint folders: what they say is read whole, and what cannot be read is refused in one sentence."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jattn.loaders.chat import render_chat
from jattn.loaders.errors import ModelFileError
from jattn.loaders.hf_config import read_config
from jattn.loaders.hf_folder import read_folder
from jattn.loaders.open import open_model
from jattn.loaders.weights import load_arrays

HF = Path(__file__).parents[2] / "data" / "hf"
NAMES = tuple(sorted(path.name for path in HF.iterdir()))


def config_of(name: str) -> dict:
    return json.loads((HF / name / "config.json").read_text())


def expected_of(name: str) -> dict:
    return json.loads((HF / name / "expected.json").read_text())


@pytest.fixture
def copy(tmp_path):
    """name -> a copy of the folder, to be damaged."""

    def make(name: str = "qwen3") -> Path:
        return Path(shutil.copytree(HF / name, tmp_path / name))

    return make


def edit_json(path: Path, **changes) -> None:
    value = json.loads(path.read_text())
    path.write_text(json.dumps({**value, **changes}))


def refusal(path: Path) -> str:
    """The one sentence, whatever step finds the damage."""
    with pytest.raises(ModelFileError) as error:
        model = open_model(path)
        for _ in load_arrays(model):
            pass
        model.tokenizer()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_the_tokenizer_cuts_as_the_file_says_and_its_pieces_are_the_text(name):
    tokenizer, expected = open_model(HF / name).tokenizer(), expected_of(name)
    assert tokenizer.encode(expected["text"]) == expected["text_ids"]
    assert tokenizer.decode(expected["text_ids"], skip_special=True).strip() == expected["text"]
    assert tokenizer.vocab_size == 128 and tokenizer.decode([127]) == ""  # the model has more ids than entries
    assert tokenizer.eos_ids == (2,) and tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.add_bos == (expected["text_ids"][0] == 1)


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])  # in tokenizer_config.json, in a file of its own
def test_the_chat_template_comes_with_its_tokens(name):
    metadata = open_model(HF / name).metadata
    assert render_chat(metadata, [{"role": "user", "content": "Hi"}]) == "<s><user>Hi</s>"


def test_a_template_may_be_one_of_several(copy):
    folder = copy()
    rows = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ eos_token }}"}]
    edit_json(folder / "tokenizer_config.json", chat_template=rows)
    assert render_chat(read_folder(folder).metadata, [{"role": "user", "content": "Hi"}]) == "</s>"


def test_the_generation_config_adds_ends(copy):
    folder = copy()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    assert read_folder(folder).tokenizer().eos_ids == (2, 5)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_narrow_and_wide_floats_are_read_as_their_values(dtype, copy):
    folder = copy()
    stored = {name: array.astype(dtype) for name, array in load_file(folder / "model.safetensors").items()}
    save_file(stored, folder / "model.safetensors")
    arrays = dict(load_arrays(read_folder(folder)))
    want = stored["model.layers.1.mlp.up_proj.weight"].astype(np.float32)
    np.testing.assert_array_equal(arrays["layers.1.up"], want)


def test_shards_are_one_model(copy):
    folder = copy("gpt-oss")
    sharded = dict(load_arrays(read_folder(folder)))
    whole = {}
    for path in folder.glob("model-*.safetensors"):
        whole |= load_file(path)
    save_file(whole, folder / "model.safetensors")
    single = dict(load_arrays(read_folder(folder)))
    assert sharded.keys() == single.keys()
    for name, array in single.items():
        np.testing.assert_array_equal(sharded[name], array)


OLD = {  # what the same models said before `rope_parameters`
    "llama-linear": dict(rope_theta=500.0, rope_scaling={"type": "linear", "factor": 4.0}),
    "llama-llama3": dict(
        rope_theta=10000.0,
        rope_scaling=dict(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "llama-yarn": dict(
        rope_theta=1000.0,
        rope_scaling=dict(
            type="yarn",
            rope_type="yarn",
            factor=4.0,
            original_max_position_embeddings=32,
            beta_fast=1.0,
            beta_slow=0.125,
        ),
    ),
    "mistral": dict(rope_scaling=None),
    "qwen2": dict(layer_types=None),
    "gemma2": dict(layer_types=None),
    "gemma3": dict(
        layer_types=None,
        sliding_window_pattern=2,
        rope_theta=5000.0,
        rope_local_base_freq=200.0,
        rope_scaling={"rope_type": "linear", "factor": 2.0},
    ),
    "gpt-oss": dict(layer_types=None, experts_per_token=2),
}


@pytest.mark.parametrize("name", OLD)
def test_older_spellings_say_the_same(name):
    config = config_of(name)
    old = {**config, **OLD[name]}
    if "rope_theta" in OLD[name] or "rope_scaling" in OLD[name]:
        del old["rope_parameters"]
    assert read_config(old) == read_config(config)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3", dict(model_type="mamba"), "model_type is 'mamba': want one of deepseek_v2, deepseek_v3, gemma2, "),
        ("qwen3", dict(model_type=None), "model_type is None"),
        ("qwen3", dict(model_type=["llama"]), "model_type is ['llama']"),
        ("qwen3", dict(hidden_size="big"), "hidden_size is 'big': want a whole number above 0"),
        ("qwen3", dict(hidden_size=None), "hidden_size is missing"),
        ("qwen3", dict(num_hidden_layers=2.0), "num_hidden_layers is 2.0"),
        ("qwen3", dict(num_key_value_heads=3), "4 query heads over 3 kv heads"),
        ("qwen3", dict(rms_norm_eps=0), "rms_norm_eps is 0: want a number above 0"),
        ("qwen3", dict(tie_word_embeddings="no"), "tie_word_embeddings is 'no': want true or false"),
        ("qwen3", dict(attention_bias=True), "attention_bias is True: only False is supported"),
        ("llama-yarn", dict(attention_bias=True), "attention_bias is True: only False is supported"),
        ("llama-yarn", dict(mlp_bias=True), "mlp_bias is True: this variant of 'llama' is not supported"),
        ("llama-yarn", dict(sliding_window=8), "sliding_window is 8: this variant of 'llama' is not supported"),
        ("llama-yarn", dict(layer_types=["sliding_attention"] * 2), "layer_types is ['sliding_attention'"),
        ("gpt-oss", dict(attention_bias=False), "attention_bias is False: only True is supported"),
        ("qwen3", dict(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5: only 1.0 is supported"),
        ("qwen3", dict(quantization_config={"quant_method": "mxfp4"}), "quantization_config is {'quant_method'"),
        ("qwen3", dict(logit_scale=0.5), "logit_scale is 0.5: this variant of 'qwen3' is not supported"),
        ("qwen3", dict(hidden_act="relu"), "hidden_act is 'relu': only silu is supported"),
        ("gemma3", dict(attn_logit_softcapping=50.0), "attn_logit_softcapping is 50.0: this variant"),
        ("gemma3", dict(use_bidirectional_attention=True), "use_bidirectional_attention is True"),
        ("gemma2", dict(query_pre_attn_scalar=None), "query_pre_attn_scalar is missing"),
        ("gemma2", dict(sliding_window=None), "sliding_window is missing: want a whole number"),
        ("gemma2", dict(layer_types=["full_attention"]), "layer_types is ['full_attention']: want 'full_attention' or"),
        ("gemma2", dict(layer_types=["chunked_attention"] * 2), "layer_types is ['chunked_attention'"),
        ("gpt-oss", dict(num_local_experts=None), "num_local_experts is missing"),
        ("gpt-oss", dict(experts_per_token=3), "experts_per_token is 3: only 2 is supported"),
        ("mistral", dict(layer_types=["full_attention"] * 2), "want what sliding_window=9 implies"),
        ("qwen3", dict(rope_parameters=[1]), "rope_parameters is [1]: want an object"),
        ("qwen3", dict(rope_theta=5.0), "rope_theta is 5.0: only 10000.0 is supported (as rope_parameters says)"),
        ("gemma3", dict(rope_parameters={"rope_theta": 1e4}), "rope_parameters is missing: want an object"),
    ],
)
def test_a_config_beyond_what_is_known_is_refused_by_name(name, changes, message, copy):
    folder = copy(name)
    edit_json(folder / "config.json", **changes)
    said = refusal(folder)
    assert message in said and "config.json" in said


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (dict(rope_type="longrope", factor=2.0), "rope type is 'longrope': want one of default, linear, llama3, yarn"),
        (dict(rope_type="dynamic", factor=2.0), "rope type is 'dynamic'"),
        (dict(rope_type=7), "rope type is 7"),
        (dict(rope_type="linear"), "rope factor is missing: want a number above 0"),
        (dict(rope_type="linear", factor=-1.0), "rope factor is -1.0"),
        (dict(rope_type="default", factor=4.0), "rope factor is 4.0: this variant of 'rope default' is not supported"),
        (dict(rope_type="default", partial_rotary_factor=0.25), "rope partial_rotary_factor is 0.25"),
        (dict(rope_type="llama3", factor=8.0, low_freq_factor=4.0, high_freq_factor=1.0), "low_freq_factor is 4.0"),
        (dict(rope_type="yarn", factor=4.0, truncate=1), "rope truncate is 1: want true or false"),
    ],
)
def test_a_rope_beyond_what_is_known_is_refused_by_name(rope, message, copy):
    folder = copy()
    edit_json(folder / "config.json", rope_parameters={"rope_theta": 1e4, **rope})
    assert message in refusal(folder)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "\udcff", "[" * 100_000], ids=["empty", "cut", "list", "bytes", "deep"]
)
def test_a_json_file_that_is_damaged_is_named(file, text, copy):
    folder = copy()
    (folder / file).write_bytes(text.encode(errors="surrogateescape"))
    assert f"{folder / file} " in refusal(folder)


def test_files_that_are_not_there_are_named(copy, tmp_path):
    (tmp_path / "nothing").mkdir()
    assert "config.json does not exist: want a Hugging Face model folder" in refusal(tmp_path / "nothing")
    folder = copy()
    (folder / "tokenizer.json").unlink()
    assert "tokenizer.json does not exist" in refusal(folder)
    (folder / "model.safetensors").unlink()
    assert "has neither model.safetensors nor model.safetensors.index.json" in refusal(folder)


def test_a_shard_that_is_not_there_is_named(copy):
    folder = copy("gpt-oss")
    (folder / "model-00003-of-00005.safetensors").unlink()
    assert "model-00003-of-00005.safetensors does not exist" in refusal(folder)


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}, {"a": "../up.safetensors"}])
def test_an_index_that_is_no_map_to_file_names_is_refused(weight_map, copy):
    folder = copy("gpt-oss")
    edit_json(folder / "model.safetensors.index.json", weight_map=weight_map)
    assert "index.json has no weight_map from tensor names to file names" in refusal(folder)


def test_an_index_that_promises_a_tensor_is_held_to_it(copy):
    folder = copy("gpt-oss")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    shard = index["model.norm.weight"]
    edit_json(folder / "model.safetensors.index.json", weight_map=index | {"model.norm.bias": shard})
    assert f"{shard} lacks tensor 'model.norm.bias'" in refusal(folder)


def change_tensors(folder: Path, edit) -> Path:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_tensor_that_is_missing_misshapen_or_unknown_is_named(copy, tmp_path):
    name = "model.layers.1.self_attn.k_proj.weight"
    folder = change_tensors(copy(), lambda tensors: tensors.pop(name))
    assert f"lacks tensor {name!r}: want shape (24, 32)" in refusal(folder)

    folder = change_tensors(folder, lambda tensors: tensors.update({name: np.zeros((24, 31), np.float32)}))
    assert f"tensor {name!r} has shape (24, 31), but the metadata wants (24, 32) (kv_dim x d_model)" in refusal(folder)

    packed = np.zeros((24, 32), np.int8)
    folder = change_tensors(folder, lambda tensors: tensors.update({name: packed}))
    assert f"tensor {name!r} is stored as I8: want one of F64, F32, F16, BF16" in refusal(folder)

    def edit(tensors):
        tensors[name] = np.zeros((24, 32), np.float32)
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(48, np.float32)

    assert "1 tensors are not part of architecture 'qwen3'" in refusal(change_tensors(folder, edit))
    assert "model.layers.0.self_attn.q_proj.bias" in refusal(folder)


@pytest.mark.parametrize("damage", [lambda raw: raw[:100], lambda raw: raw[:-1], lambda raw: b"x" * len(raw)])
def test_a_damaged_safetensors_file_is_named(damage, copy):
    file = copy() / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    assert "model.safetensors is no whole safetensors file" in refusal(file.parent)


def test_a_head_that_is_tied_may_be_stored_twice_and_old_tables_are_passed_over(copy):
    def edit(tensors):
        tensors["lm_head.weight"] = np.zeros((128, 32), np.float32)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(6, np.float32)

    arrays = dict(load_arrays(read_folder(change_tensors(copy("llama-llama3"), edit))))
    assert "lm_head" not in arrays


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda spec: spec.update(decoder={"type": "WordPiece", "prefix": "##", "cleanup": True}), "decoder WordPiece"),
        (lambda spec: spec.update(decoder=None), "decoder none"),
        (lambda spec: spec.update(model={"type": "New"}), "tokenizer.json cannot be read"),
        (lambda spec: spec["model"]["vocab"].update(far=128), "has token id 128, but the model has 128 ids"),
    ],
)
def test_a_tokenizer_of_an_unknown_kind_is_refused(edit, message, copy):
    folder = copy()
    spec = json.loads((folder / "tokenizer.json").read_text())
    edit(spec)
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    assert message in refusal(folder)


def test_bytes_of_a_sentence_piece_vocabulary_are_joined(copy):
    folder = copy("mistral")
    spec = json.loads((folder / "tokenizer.json").read_text())
    vocab = spec["model"]["vocab"]
    vocab |= {"<0xC3>": len(vocab), "<0xA9>": len(vocab) + 1}
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer = read_folder(folder).tokenizer()
    assert tokenizer.decode([vocab["<0xC3>"], vocab["<0xA9>"], vocab["\u2581t"]]) == "\u00e9 t"
