"""GGUF files of every family: the checkpoints of tests/data/hf as llama.cpp's converter would write them.

Names come from the `gguf` package's own map between the two spellings. The converter permutes rows of q and k for Llama
and Mistral only, adds 1 to Gemma's norms, and splits the fused projections of gpt-oss.
"""

import dataclasses
import json
import math
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_gguf import Parts, Q, tiny_vocabulary

from jattn.loaders.errors import ModelFileError
from jattn.loaders.gguf_file import read_metadata
from jattn.loaders.hf_folder import read_folder
from jattn.loaders.weights import load_arrays

HF = Path(__file__).parents[2] / "data" / "hf"
ARCH = {
    "llama-linear": gguf.MODEL_ARCH.LLAMA,
    "llama-llama3": gguf.MODEL_ARCH.LLAMA,
    "llama-yarn": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "gpt-oss": gguf.MODEL_ARCH.GPT_OSS,
}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
YARN |= {"rope.scaling.yarn_beta_fast": 1.0, "rope.scaling.yarn_beta_slow": 0.125}
KEYS = {  # what a family's file says beside the sizes
    "llama-linear": {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    "llama-yarn": YARN,
    "mistral": {"attention.sliding_window": 9},
    "gemma2": {
        "attention.sliding_window": 8,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 4.0,
    },
    "gemma3": {
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": 2,
        "rope.freq_base_swa": 200.0,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 2.0,
    },
    "gpt-oss": {"attention.sliding_window": 8, "expert_count": 4, "expert_used_count": 2} | YARN,
}
UNSAID = {  # what the format has no key for: the family's constants
    "gemma2": dict(sm_scale=None),
    "gemma3": dict(sm_scale=None),
    "gpt-oss": dict(swiglu_limit=7.0),
    "qwen2": dict(windows=()),
}


def permuted(weight, heads):
    """Half-split rope pairs, as the converter makes them adjacent."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def converted(name, tensors, arch) -> dict[str, np.ndarray]:
    """Tensors under GGUF's names."""
    names = gguf.get_tensor_name_map(arch, 2)
    made = {}
    for theirs, array in tensors.items():
        if theirs.startswith("model.layers") and "gate_up_proj" in theirs:
            layer = theirs.split(".")[2]
            kind = "bias" if theirs.endswith("bias") else "weight"
            for part, half in (("gate", array[..., 0::2]), ("up", array[..., 1::2])):
                made[f"blk.{layer}.ffn_{part}_exps.{kind}"] = half if kind == "bias" else half.swapaxes(1, 2)
            continue
        if "experts.down_proj" in theirs:
            layer = theirs.split(".")[2]
            bias = theirs.endswith("bias")
            made[f"blk.{layer}.ffn_down_exps.{'bias' if bias else 'weight'}"] = array if bias else array.swapaxes(1, 2)
            continue
        if theirs.endswith("sinks"):
            theirs += ".weight"
        new = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        assert new is not None, theirs
        if arch == gguf.MODEL_ARCH.LLAMA and theirs.endswith(("q_proj.weight", "k_proj.weight")):
            array = permuted(array, 4 if "q_proj" in theirs else 2)
        if name.startswith("gemma") and theirs.endswith("norm.weight"):
            array = array + 1
        made[new] = array
    return {key: np.ascontiguousarray(array) for key, array in made.items()}


def write(name, folder: Path, **keys) -> Path:
    config = json.loads((HF / name / "config.json").read_text())
    arch = ARCH[name]
    tensors = {}
    for path in (HF / name).glob("*.safetensors"):
        tensors |= load_file(path)
    rope = config["rope_parameters"]
    sizes = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": read_folder(HF / name).hparams.head_dim,
        "attention.value_length": read_folder(HF / name).hparams.head_dim,
        "rope.freq_base": rope.get("full_attention", rope)["rope_theta"],
        "vocab_size": 128,
    } | KEYS.get(name, {})
    prefix = gguf.MODEL_ARCH_NAMES[arch]
    made = converted(name, tensors, arch)
    if name == "llama-llama3":  # the converter's factors, in its own words: high, low and middle wavelengths
        made["rope_freqs.weight"] = np.asarray(llama3_factors(12, rope), np.float32)
    parts = Parts(
        arch=prefix,
        metadata={f"{prefix}.{key}": value for key, value in (sizes | keys).items()} | tiny_vocabulary(),
        tensors={key: (array, Q.F32) for key, array in made.items()},
    )
    return parts.write(folder / f"{name}.gguf")


def llama3_factors(dim, rope):
    factors = []
    for at in range(0, dim, 2):
        wave = 2 * math.pi * rope["rope_theta"] ** (at / dim)
        context, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
        if wave < context / high:
            factors.append(1.0)
        elif wave > context / low:
            factors.append(rope["factor"])
        else:
            smooth = (context / wave - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return factors


def rounded(value):
    """Floats as the format keeps them, in 32 bits."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return float(np.float32(value)) if isinstance(value, float) else value


@pytest.mark.parametrize("name", ARCH)
def test_both_formats_hold_the_same_model(name, tmp_path):
    ours, theirs = read_metadata(write(name, tmp_path)), read_folder(HF / name)
    got, want = (dataclasses.asdict(model.hparams) for model in (ours, theirs))
    for key in ("bos_id", "eos_id", *(("rope_scaling",) if name == "llama-llama3" else ())):
        del got[key], want[key]
    assert rounded(got) == rounded(want | UNSAID.get(name, {}))
    arrays = dict(load_arrays(ours))
    expected = dict(load_arrays(theirs))
    assert arrays.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_array_equal(arrays[key], array, key)


def test_llama3_bands_come_as_factors(tmp_path):
    from jattn.models.rope import inv_freq
    from jattn.serving.build import config_of

    ours, theirs = (
        config_of(model.hparams)
        for model in (read_metadata(write("llama-llama3", tmp_path)), read_folder(HF / "llama-llama3"))
    )
    got, want = (inv_freq(12, config.rope_theta, config.rope_scaling) for config in (ours, theirs))
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert (want != inv_freq(12, ours.rope_theta)).any()


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("qwen3", {"attention.sliding_window": 8}, "qwen3.attention.sliding_window is 8: this variant of 'qwen3'"),
        ("qwen3", {"logit_scale": 0.5}, "qwen3.logit_scale is 0.5: this variant of 'qwen3' is not supported"),
        ("qwen3", {"rope.scaling.type": "longrope"}, "rope.scaling.type is 'longrope': want none, linear or yarn"),
        ("qwen3", {"rope.scaling.type": "yarn"}, "rope.scaling.factor is missing"),
        ("qwen3", {"attention.causal": False}, "attention.causal is False: only True is supported"),
        ("llama-llama3", {"rope.scaling.factor": 2.0}, "rope.scaling.type is 'linear': want none, linear or yarn"),
        (
            "gemma3",
            {"attention.sliding_window_pattern": "x"},
            "sliding_window_pattern is 'x': want a number, or a flag",
        ),
        ("gpt-oss", {"rope.freq_base_swa": 7.0}, "rope.freq_base_swa is 7.0: only 1000.0 is supported"),
        ("gpt-oss", {"expert_weights_scale": 2.0}, "gpt-oss.expert_weights_scale is 2.0: this variant"),
    ],
)
def test_a_variant_beyond_what_is_known_is_refused_by_name(name, keys, message, tmp_path):
    with pytest.raises(ModelFileError) as error:
        read_metadata(write(name, tmp_path, **keys))
    assert message in str(error.value)


def test_a_pattern_may_be_a_flag_a_layer(tmp_path):
    path = write("gemma3", tmp_path, **{"attention.sliding_window_pattern": [False, True]})
    assert read_metadata(path).hparams.windows == (None, 8)
