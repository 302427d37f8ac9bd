"""Tensors of GGUF files: values, names, layouts, refusals and memory."""

import tracemalloc

import gguf
import ml_dtypes
import numpy as np
import pytest

from jattn.loaders.arches import ARCHES
from jattn.loaders.errors import ModelFileError
from jattn.loaders.gguf_file import read_metadata
from jattn.loaders.layouts import split_half
from jattn.loaders.weights import load_arrays

Q = gguf.GGMLQuantizationType
BLOCK_32 = [Q.F32, Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0, Q.IQ4_NL, Q.MXFP4]
BLOCK_256 = [Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.IQ4_XS, Q.IQ2_XXS, Q.IQ3_S, Q.IQ1_M, Q.TQ1_0, Q.TQ2_0]


@pytest.mark.parametrize("kind", BLOCK_32 + BLOCK_256, ids=lambda kind: kind.name)
def test_every_packing_loads_as_the_gguf_package_dequantises_it(kind, parts, tmp_path):
    dim = 32 if kind in BLOCK_32 else 1024  # a kv projection has dim columns: a multiple of 256
    path = parts(dim=dim, kind=kind, layers=1).write(tmp_path / "packed.gguf")
    oracle = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    model = read_metadata(path)
    assert model.tensor_names == tuple(oracle)
    for name, want in oracle.items():
        got = model.tensor(name)
        assert got.dtype == np.float32 and got.flags.owndata | (got.base is not None)
        np.testing.assert_array_equal(got, want)


def test_large_tensors_are_the_same_when_converted_in_chunks(parts, tmp_path, monkeypatch):
    model = read_metadata(parts().write(tmp_path / "tiny.gguf"))
    whole = model.tensor("blk.0.ffn_down.weight")
    for chunk in (1, 64, 100, 1000):
        monkeypatch.setattr("jattn.loaders.gguf_file._CHUNK", chunk)
        np.testing.assert_array_equal(model.tensor("blk.0.ffn_down.weight"), whole)


@pytest.mark.parametrize("tied", [True, False])
def test_arrays_carry_our_names_and_out_in_shapes(tied, parts, tmp_path):
    model = read_metadata(parts(tied=tied).write(tmp_path / "tiny.gguf"))
    shapes = {name: array.shape for name, array in load_arrays(model)}
    vocab = model.hparams.vocab_size
    want = {"embed": (vocab, 32), "final_norm": (32,)} | ({} if tied else {"lm_head": (vocab, 32)})
    for i in range(2):
        want |= {f"layers.{i}.{name}": (32,) for name in ("attn_norm", "ffn_norm")}
        want |= {f"layers.{i}.{name}": (32, 32) for name in ("q", "o")}
        want |= {f"layers.{i}.{name}": (16, 32) for name in ("k", "v")}
        want |= {f"layers.{i}.{name}": (64, 32) for name in ("gate", "up")} | {f"layers.{i}.down": (32, 64)}
    assert shapes == want
    assert model.hparams.tied_embeddings is tied


def test_progress_names_each_tensor_once_and_ends_full(tiny_path):
    seen = []
    names = [name for name, _ in load_arrays(read_metadata(tiny_path), on_tensor=lambda *step: seen.append(step))]
    assert seen == [(name, i + 1, len(names)) for i, name in enumerate(names)]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_another_dtype_is_the_float32_array_cast(dtype, tiny_path):
    model = read_metadata(tiny_path)
    for (name, got), (_, want) in zip(load_arrays(model, dtype=dtype), load_arrays(model), strict=True):
        assert got.dtype == np.dtype(dtype), name
        np.testing.assert_array_equal(got, want.astype(dtype))


def test_half_split_rope_on_reordered_rows_equals_adjacent_rope_on_the_files_rows():
    heads, head_dim, columns = 3, 8, 5
    draw = np.random.default_rng(1)
    weight, x = draw.standard_normal((heads * head_dim, columns)), draw.standard_normal(columns)
    angle = draw.standard_normal(head_dim // 2)
    cos, sin = np.cos(angle), np.sin(angle)
    pairs = (weight @ x).reshape(heads, head_dim // 2, 2)
    adjacent = np.stack(
        [pairs[..., 0] * cos - pairs[..., 1] * sin, pairs[..., 1] * cos + pairs[..., 0] * sin], axis=-2
    ).reshape(heads, head_dim)  # all first members, then all second ones
    low, high = np.split((split_half(weight, heads) @ x).reshape(heads, head_dim), 2, axis=-1)
    np.testing.assert_allclose(np.concatenate([low * cos - high * sin, high * cos + low * sin], -1), adjacent)


def test_only_rows_of_q_and_k_are_reordered(tiny_path):
    model = read_metadata(tiny_path)
    arrays = dict(load_arrays(model))
    for ours, theirs, heads in [("q", "attn_q", 4), ("k", "attn_k", 2)]:
        want = split_half(model.tensor(f"blk.1.{theirs}.weight"), heads)
        np.testing.assert_array_equal(arrays[f"layers.1.{ours}"], want)
    np.testing.assert_array_equal(arrays["layers.1.v"], model.tensor("blk.1.attn_v.weight"))


def test_the_real_model_has_the_reference_hyperparameters(smol, reference):
    want = reference["hparams"]
    got = smol.hparams
    assert (got.num_layers, got.d_model, got.num_q_heads, got.num_kv_heads, got.head_dim) == tuple(
        want[key] for key in ("layers", "d_model", "heads", "kv_heads", "head_dim")
    )
    assert (got.rms_eps, got.rope_theta) == (want["rms_eps"], want["rope_theta"])
    assert (got.ffn_dim, got.vocab_size, got.max_context, got.tied_embeddings) == (1536, 49152, 8192, True)
    assert (got.bos_id, got.eos_id, got.rope_scaling) == (1, 2, None)
    assert smol.arch == "llama" and len(repr(smol)) < 1000


def test_loading_the_real_model_holds_one_tensor_beside_what_the_caller_keeps(smol):
    num_bytes, largest = 0, 0
    tracemalloc.start()
    try:
        for _, array in load_arrays(smol):
            num_bytes, largest = num_bytes + array.nbytes, max(largest, array.nbytes)
            del array
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert num_bytes == 134_515_008 * 4
    assert largest < peak < 1.5 * largest


def refusal(edit, parts, tmp_path, **kwargs):
    """The message for a tiny file that `edit` has changed."""
    made = parts(**kwargs)
    edit(made)
    with pytest.raises(ModelFileError) as error:
        load_arrays(read_metadata(made.write(tmp_path / "bad.gguf")))
    assert "bad.gguf" in str(error.value)
    return str(error.value)


def test_a_missing_tensor_is_named_with_the_shape_it_should_have(parts, tmp_path):
    message = refusal(lambda made: made.tensors.pop("blk.1.attn_k.weight"), parts, tmp_path)
    assert "lacks tensor 'blk.1.attn_k.weight': want shape (16, 32)" in message


def test_a_wrong_shape_is_named_with_both_shapes(parts, tmp_path):
    def edit(made):
        made.tensors["blk.0.ffn_up.weight"] = (np.zeros((8, 32), np.float32), None)

    message = refusal(edit, parts, tmp_path)
    assert "'blk.0.ffn_up.weight' has shape (8, 32), but the metadata wants (64, 32) (ffn_dim x d_model)" in message


def test_a_tensor_that_would_be_left_out_is_refused(parts, tmp_path):
    def edit(made):
        made.tensors["blk.0.attn_q.bias"] = (np.zeros(32, np.float32), None)

    assert "blk.0.attn_q.bias" in refusal(edit, parts, tmp_path)


@pytest.mark.parametrize("dtype", [np.float64, np.int8, np.int32])
def test_a_packing_that_gguf_cannot_dequantise_is_refused_by_name(dtype, parts, tmp_path):
    def edit(made):
        made.tensors["blk.0.attn_v.weight"] = (np.zeros((16, 32), dtype), None)

    message = refusal(edit, parts, tmp_path)
    kind = {"float64": "F64", "int8": "I8", "int32": "I32"}[np.dtype(dtype).name]
    assert f"'blk.0.attn_v.weight' is packed as {kind}: want one of BF16, F16, F32, IQ1_M" in message


def test_a_packing_that_nobody_knows_is_refused_by_number(tiny_path, tmp_path):
    raw = bytearray(tiny_path.read_bytes())
    at = raw.index(b"blk.1.ffn_up.weight") + len(b"blk.1.ffn_up.weight") + 4 + 2 * 8
    raw[at : at + 4] = np.uint32(4711).tobytes()
    (tmp_path / "new.gguf").write_bytes(raw)
    with pytest.raises(ModelFileError, match="'blk.1.ffn_up.weight' is packed as type 4711"):
        load_arrays(read_metadata(tmp_path / "new.gguf"))


def test_an_unknown_architecture_is_refused_with_the_known_ones(parts, tmp_path):
    def edit(made):
        made.arch = "mamba"

    assert f"has architecture 'mamba': want one of {', '.join(sorted(ARCHES))}" in refusal(edit, parts, tmp_path)


def test_one_part_of_a_split_model_is_refused(parts, tmp_path):
    def edit(made):
        made.metadata |= {"split.no": 1, "split.count": 3}

    message = refusal(edit, parts, tmp_path)
    assert "part 2 of 3 of a split model" in message and "llama-gguf-split --merge" in message


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("block_count", None, "metadata llama.block_count is missing: want a whole number above 0"),
        ("attention.head_count", [4, 4], "llama.attention.head_count is [4, 4]"),
        ("attention.head_count_kv", 3, "4 query heads over 3 kv heads"),
        ("attention.layer_norm_rms_epsilon", 0.0, "layer_norm_rms_epsilon is 0.0: want a number above 0"),
        ("rope.dimension_count", 4, "rope.dimension_count is 4: only 8 is supported"),
        ("attention.value_length", 16, "value_length is 16: only 8 is supported"),
        ("expert_count", 8, "expert_count is 8: only 0 is supported (a dense MLP)"),
        ("context_length", "long", "context_length is 'long'"),
    ],
)
def test_a_hyperparameter_outside_the_rules_is_named(key, value, message, parts, tmp_path):
    def edit(made):
        made.metadata.pop(f"llama.{key}", None)
        made.metadata |= {} if value is None else {f"llama.{key}": value}

    assert message in refusal(edit, parts, tmp_path)


def test_what_the_file_says_about_stretched_rope_is_kept(parts, tmp_path):
    made = parts()
    made.metadata |= {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    made.metadata["llama.rope.scaling.original_context_length"] = 16
    scaling = read_metadata(made.write(tmp_path / "yarn.gguf")).hparams.rope_scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factor, scaling.original_max_context) == ("yarn", 4.0, 16)

    made = parts()
    made.tensors["rope_freqs.weight"] = (np.array([1, 2, 4, 8], np.float32), None)
    model = read_metadata(made.write(tmp_path / "factors.gguf"))
    assert model.hparams.rope_scaling is not None
    assert (model.hparams.rope_scaling.kind, model.hparams.rope_scaling.freq_factors) == ("freq_factors", (1, 2, 4, 8))
    assert "rope_freqs" not in dict(load_arrays(model))


def test_a_file_that_disappears_after_its_header_was_read_is_named(parts, tmp_path):
    model = read_metadata(parts().write(tmp_path / "gone.gguf"))
    model.path.unlink()
    with pytest.raises(ModelFileError, match="gone.gguf can no longer be read"):
        model.tensor("token_embd.weight")
    with pytest.raises(ModelFileError, match="has no tensor 'embed'"):
        model.tensor("embed")
