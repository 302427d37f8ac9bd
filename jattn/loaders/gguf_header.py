"""Read the header of a GGUF file: metadata as plain Python values, tensors as records of where their bytes lie.

Enumerations and block sizes come from the `gguf` package. Its `GGUFReader` is the oracle in the tests and not used
here: it makes an array object per string (2.3 s and 160 MB for a vocabulary of 49152, against 0.1 s and 7 MB), and a
slice past the end of a cut file comes back short without an error.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import dataclasses
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from jattn.loaders.errors import ModelFileError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4  # the format's limit
_DTYPES = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Where a tensor's bytes lie and how they are packed."""

    name: str
    shape: tuple[int, ...]  # row-major, [out, in]: the reverse of the order in the file
    type_id: int
    offset: int  # bytes from the start of the file

    @property
    def quant_type(self) -> GGMLQuantizationType | None:
        """The packing, or None for a type that the installed `gguf` does not know."""
        known = self.type_id in GGMLQuantizationType.__members__.values()
        return GGMLQuantizationType(self.type_id) if known else None

    @property
    def type_name(self) -> str:
        """The packing's name as people write it: Q4_1, F16, or `type 99` if nobody here knows it."""
        return self.quant_type.name if self.quant_type is not None else f"type {self.type_id}"

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, 0 for an unknown type."""
        if self.quant_type is None:
            return 0
        block, size = GGML_QUANT_SIZES[self.quant_type]
        return self.shape[-1] // block * size

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor, 0 for an unknown type."""
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a GGUF file says before its data."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


class _Cursor:
    """Reads forward through a file, and says what it was reading when the bytes run out."""

    def __init__(self, file: BinaryIO, path: Path):
        self.file, self.path = file, path
        self.size = os.fstat(file.fileno()).st_size
        self.position = 0

    def take(self, count: int, what: str) -> bytes:
        if count > self.size - self.position:
            raise ModelFileError(
                f"{self.path} is cut short or damaged: {what} needs {count} bytes at {self.position}, but the file has "
                f"{self.size}; fetch it again"
            )
        self.position += count
        return self.file.read(count)

    def number(self, code: str, what: str) -> int:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]

    def text(self, what: str) -> str:
        raw = self.take(self.number("Q", what), what)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise ModelFileError(
                f"{self.path} is damaged: {what} is not UTF-8 ({raw[:20]!r}); fetch it again"
            ) from None

    def value(self, kind: int, what: str) -> Any:
        """A metadata value: bool, int, float, str, or a flat list of one of them."""
        if kind == GGUFValueType.STRING:
            return self.text(what)
        if kind == GGUFValueType.ARRAY:
            item, count = self.number("I", what), self.number("Q", what)
            if item == GGUFValueType.STRING:
                self._fits(8 * count, what)  # before a list of a wild length is begun
                return [self.text(what) for _ in range(count)]
            dtype = self._dtype(item, what)
            return np.frombuffer(self.take(dtype.itemsize * count, what), dtype).tolist()
        dtype = self._dtype(kind, what)
        return np.frombuffer(self.take(dtype.itemsize, what), dtype)[0].item()

    def _dtype(self, kind: int, what: str) -> np.dtype:
        if kind not in _DTYPES:
            raise ModelFileError(
                f"{self.path} is damaged: {what} has value type {kind}; want 0 to 12, no nested arrays"
            )
        return np.dtype(_DTYPES[GGUFValueType(kind)])

    def _fits(self, count: int, what: str) -> None:
        if count > self.size - self.position:
            self.take(count, what)


def read_header(path: Path) -> Header:
    """Metadata and tensor records of a GGUF file of version 2 or 3; the data itself is not read.

    Raises: ModelFileError if the path is no readable GGUF file, or the file is too short for what its header promises.
    """
    if path.is_dir():
        raise ModelFileError(f"{path} is a directory: want a GGUF file; name the .gguf inside it")
    try:
        with path.open("rb") as file:
            cursor = _Cursor(file, path)
            _check_magic(cursor)
            num_tensors, num_keys = cursor.number("Q", "the tensor count"), cursor.number("Q", "the key count")
            metadata = _read_metadata(cursor, num_keys)
            return Header(metadata=metadata, tensors=_read_tensors(cursor, num_tensors, metadata))
    except FileNotFoundError:
        raise ModelFileError(f"{path} does not exist: want a GGUF file or a known model name") from None
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read ({error.strerror}): want a readable GGUF file") from None


def _check_magic(cursor: _Cursor) -> None:
    magic = cursor.file.read(4)
    if magic != _MAGIC:
        raise ModelFileError(f"{cursor.path} is not a GGUF file: it begins with {magic!r}, want {_MAGIC!r}")
    cursor.position = 4
    version = cursor.number("I", "the version")
    if version & 0xFFFF == 0:
        raise ModelFileError(f"{cursor.path} is a big-endian GGUF file: only little-endian is read; convert it")
    if version not in _VERSIONS:
        raise ModelFileError(f"{cursor.path} is GGUF version {version}: want one of {_VERSIONS}; convert it again")


def _read_metadata(cursor: _Cursor, count: int) -> Mapping[str, Any]:
    metadata = {}
    for i in range(count):
        key = cursor.text(f"metadata key {i + 1} of {count}")
        if key in metadata:
            raise ModelFileError(f"{cursor.path} is damaged: metadata key {key!r} comes twice; fetch it again")
        what = f"metadata {key!r}"
        metadata[key] = cursor.value(cursor.number("I", what), what)
    return MappingProxyType(metadata)


def _read_tensors(cursor: _Cursor, count: int, metadata: Mapping[str, Any]) -> Mapping[str, TensorInfo]:
    relative = [_read_tensor(cursor, f"tensor {i + 1} of {count}") for i in range(count)]
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise ModelFileError(f"{cursor.path} is damaged: general.alignment={alignment!r}, want a power of two")
    start = -(-cursor.position // alignment) * alignment
    tensors = {}
    for tensor in relative:
        if tensor.name in tensors:
            raise ModelFileError(f"{cursor.path} is damaged: tensor {tensor.name!r} comes twice; fetch it again")
        tensor = tensors[tensor.name] = dataclasses.replace(tensor, offset=start + tensor.offset)
        if tensor.offset + tensor.num_bytes > cursor.size:
            raise ModelFileError(
                f"{cursor.path} is cut short or damaged: the data of tensor {tensor.name!r} ends at byte "
                f"{tensor.offset + tensor.num_bytes}, but the file has {cursor.size}; fetch it again"
            )
    return MappingProxyType(tensors)


def _read_tensor(cursor: _Cursor, what: str) -> TensorInfo:
    name = cursor.text(f"the name of {what}")
    what = f"the record of tensor {name!r}"
    num_dims = cursor.number("I", what)
    if not 1 <= num_dims <= _MAX_DIMS:
        raise ModelFileError(
            f"{cursor.path} is damaged: tensor {name!r} has {num_dims} dimensions, want 1 to {_MAX_DIMS}"
        )
    shape = tuple(cursor.number("Q", what) for _ in range(num_dims))[::-1]
    tensor = TensorInfo(name=name, shape=shape, type_id=cursor.number("I", what), offset=cursor.number("Q", what))
    block = GGML_QUANT_SIZES[tensor.quant_type][0] if tensor.quant_type is not None else 1
    if shape[-1] % block:
        raise ModelFileError(
            f"{cursor.path} is damaged: tensor {name!r} has rows of {shape[-1]} values, want a multiple of {block} for "
            f"{tensor.type_name}"
        )
    return tensor
