"""The header reader against the `gguf` package's own, and against files that are cut, damaged or something else."""

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jattn.loaders.chat import render_chat
from jattn.loaders.errors import ModelFileError
from jattn.loaders.gguf_file import read_metadata
from jattn.loaders.gguf_header import read_header
from jattn.loaders.tokenizer import Tokenizer
from jattn.loaders.weights import load_arrays


def load_everything(path):
    model = read_metadata(path)
    for _ in load_arrays(model):
        pass
    tokenizer = Tokenizer.from_metadata(model.metadata)
    tokenizer.decode(tokenizer.encode("a 123"))
    render_chat(model.metadata, [{"role": "user", "content": "a"}])


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("scratch") / "cut.gguf"


@pytest.fixture(scope="module")
def tiny_bytes(tiny_path):
    return tiny_path.read_bytes()


def assert_equals_the_packages_reader(path):
    header, oracle = read_header(path), gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in oracle.fields.items() if not key.startswith("GGUF.")}
    assert dict(header.metadata) == fields
    assert list(header.tensors) == [tensor.name for tensor in oracle.tensors]
    for tensor in oracle.tensors:
        ours = header.tensors[tensor.name]
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        assert (ours.quant_type, ours.offset, ours.num_bytes) == (
            tensor.tensor_type,
            tensor.data_offset,
            tensor.n_bytes,
        )


def test_a_tiny_header_equals_what_the_gguf_package_reads(tiny_path):
    assert_equals_the_packages_reader(tiny_path)


def test_the_real_header_equals_what_the_gguf_package_reads(smol):
    assert_equals_the_packages_reader(smol.path)


def test_every_value_type_of_the_format_is_read(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "types.gguf", "llama")
    numbers = {
        "u8": 255,
        "i8": -128,
        "u16": 65535,
        "i16": -3,
        "u32": 2**32 - 1,
        "i32": -5,
        "u64": 2**63,
        "i64": -(2**62),
    }
    kinds = dict(
        u8=writer.add_uint8,
        i8=writer.add_int8,
        u16=writer.add_uint16,
        i16=writer.add_int16,
        u32=writer.add_uint32,
        i32=writer.add_int32,
        u64=writer.add_uint64,
        i64=writer.add_int64,
    )
    for name, add in kinds.items():
        add(name, numbers[name])
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "Grüße 🙂")
    writer.add_array("flags", [True, False])
    writer.add_array("ints", [-1, 2, 3])
    writer.add_array("floats", [0.5, 0.25])
    writer.add_array("texts", ["", "ß"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    want = numbers | {"f32": 0.5, "f64": 0.1, "yes": True, "text": "Grüße 🙂", "general.architecture": "llama"}
    want |= {"flags": [True, False], "ints": [-1, 2, 3], "floats": [0.5, 0.25], "texts": ["", "ß"]}
    assert dict(read_header(tmp_path / "types.gguf").metadata) == want


@given(data=st.data())
def test_a_file_cut_anywhere_is_refused_as_cut(data, tiny_bytes, scratch):
    length = data.draw(st.integers(0, len(tiny_bytes) - 1))
    scratch.write_bytes(tiny_bytes[:length])
    with pytest.raises(ModelFileError, match="cut short or damaged" if length >= 4 else "not a GGUF file") as error:
        load_everything(scratch)
    assert str(scratch) in str(error.value) and "\n" not in str(error.value)


@given(flips=st.lists(st.tuples(st.integers(0, 2**16), st.integers(1, 255)), min_size=1, max_size=6))
def test_a_damaged_header_is_refused_or_read_but_never_breaks_the_loader(flips, tiny_bytes, scratch):
    damaged = bytearray(tiny_bytes)
    for place, flip in flips:
        damaged[place % min(len(damaged), 9000)] ^= flip  # most of the header, some of the data
    scratch.write_bytes(damaged)
    try:
        load_everything(scratch)
    except ModelFileError as error:
        assert "\n" not in str(error)


def test_a_missing_file_a_folder_and_another_format_are_each_named(tmp_path):
    with pytest.raises(ModelFileError, match="nothing.gguf does not exist"):
        read_metadata(tmp_path / "nothing.gguf")
    with pytest.raises(ModelFileError, match="is a directory"):
        read_metadata(tmp_path)
    (tmp_path / "other.gguf").write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(ModelFileError, match=r"not a GGUF file: it begins with b'PK\\x03\\x04'"):
        read_metadata(tmp_path / "other.gguf")


@pytest.mark.parametrize(
    "version, message", [(1, "GGUF version 1"), (9, "GGUF version 9"), (3 << 24, "big-endian GGUF file")]
)
def test_other_versions_and_byte_orders_are_refused(version, message, tiny_bytes, tmp_path):
    (tmp_path / "old.gguf").write_bytes(tiny_bytes[:4] + np.uint32(version).tobytes() + tiny_bytes[8:])
    with pytest.raises(ModelFileError, match=message):
        read_metadata(tmp_path / "old.gguf")


def test_a_wild_length_is_refused_before_memory_is_asked_for(tiny_bytes, tmp_path):
    at = tiny_bytes.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 8
    (tmp_path / "wild.gguf").write_bytes(tiny_bytes[:at] + np.uint64(2**61).tobytes() + tiny_bytes[at + 8 :])
    with pytest.raises(ModelFileError, match="'tokenizer.ggml.tokens' needs"):
        read_metadata(tmp_path / "wild.gguf")


def test_a_file_that_may_not_be_read_is_named_with_the_reason(tiny_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", refuse)
    with pytest.raises(ModelFileError, match=r"cannot be read \(Permission denied\)"):
        read_header(tiny_path)
