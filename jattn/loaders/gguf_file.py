"""Open a GGUF model: hyperparameters at once, tensors one at a time. Names and layouts: `jattn.loaders.arches`."""

import dataclasses
import functools
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import DTypeLike

from jattn.loaders.arches import ARCHES, Arch
from jattn.loaders.errors import ModelFileError
from jattn.loaders.gguf_header import TensorInfo, read_header
from jattn.loaders.gguf_hparams import read_hparams
from jattn.loaders.hparams import HParams
from jattn.loaders.tokenizer import Tokenizer

_CHUNK = 1 << 20  # values dequantised at once: 4 MiB of float32, and gguf's temporaries are a few times that


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GgufModel:
    """A model file whose header is read. It holds no open file and no tensor data."""

    path: Path
    arch: str
    hparams: HParams
    metadata: Mapping[str, Any] = dataclasses.field(repr=False)  # every key of the file, as plain Python values
    tensors: Mapping[str, TensorInfo] = dataclasses.field(repr=False)  # by the file's names

    @property
    def table(self) -> Arch:
        """The row of the architecture."""
        return ARCHES[self.arch]

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """The file's names, in its order."""
        return tuple(self.tensors)

    def tensor(self, name: str, dtype: DTypeLike = np.float32) -> np.ndarray:
        """Dequantise one tensor by the file's name: [out, in], or [out] for a vector, a fresh array in `dtype`.

        Rows are read and converted in chunks of about a million values, so no second copy of a large tensor exists.
        Raises: ModelFileError if there is no such tensor, its type cannot be dequantised, or the file was cut.
        """
        if name not in self.tensors:
            raise ModelFileError(
                f"{self.path} has no tensor {name!r}: want one of its {len(self.tensors)} tensor_names"
            )
        return _read_tensor(self.path, self.tensors[name], np.dtype(dtype))

    def check_type(self, name: str) -> None:
        """Raises ModelFileError if the tensor's packing cannot be dequantised."""
        _check_type(self.path, self.tensors[name])

    def tokenizer(self) -> Tokenizer:
        """The tokenizer in the file's metadata. Raises ModelFileError if it is of another kind."""
        return Tokenizer.from_metadata(self.metadata)


def read_metadata(path: str | os.PathLike[str]) -> GgufModel:
    """Read the header of a GGUF file of a known architecture.

    Raises: ModelFileError for anything else: no file, no GGUF, cut short, split, or an architecture not in `ARCHES`.

    >>> read_metadata("nothing.gguf")
    Traceback (most recent call last):
    jattn.loaders.errors.ModelFileError: nothing.gguf does not exist: want a GGUF file or a known model name
    """
    path = Path(path)
    header = read_header(path)
    split = header.metadata.get("split.count", 1)
    if split > 1:
        part = header.metadata.get("split.no", 0) + 1
        raise ModelFileError(
            f"{path} is part {part} of {split} of a split model: only whole files are read; join them with "
            "llama-gguf-split --merge"
        )
    arch = header.metadata.get("general.architecture")
    if arch not in ARCHES:
        raise ModelFileError(f"{path} has architecture {arch!r}: want one of {', '.join(sorted(ARCHES))}")
    factors = header.tensors.get("rope_freqs.weight")
    try:
        hparams = read_hparams(
            ARCHES[arch],
            header.metadata,
            tied_embeddings="output.weight" not in header.tensors,
            freq_factors=None if factors is None else tuple(_read_tensor(path, factors, np.dtype("f4")).tolist()),
        )
    except ModelFileError as error:
        raise ModelFileError(f"{path}: {error}") from None
    return GgufModel(path=path, arch=arch, hparams=hparams, metadata=header.metadata, tensors=header.tensors)


@functools.cache
def _dequantises(quant_type: gguf.GGMLQuantizationType) -> bool:
    """Whether `gguf.dequantize` knows the type: asked with one block of zeros, since it publishes no list."""
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[quant_type][1]), np.uint8), quant_type)
    except NotImplementedError:
        return False
    return True


def _check_type(path: Path, info: TensorInfo) -> gguf.GGMLQuantizationType:
    if info.quant_type is None or not _dequantises(info.quant_type):
        known = ", ".join(sorted(kind.name for kind in gguf.GGMLQuantizationType if _dequantises(kind)))
        raise ModelFileError(
            f"{path}: tensor {info.name!r} is packed as {info.type_name}: want one of {known}; requantise it"
        )
    return info.quant_type


def _read_tensor(path: Path, info: TensorInfo, dtype: np.dtype) -> np.ndarray:
    quant_type = _check_type(path, info)
    rows = math.prod(info.shape[:-1])
    out = np.empty((rows, info.shape[-1]), dtype)
    try:
        with path.open("rb") as file:
            file.seek(info.offset)
            for chunk in np.array_split(out, max(1, -(-out.size // _CHUNK))):
                packed = np.empty((len(chunk), info.row_bytes), np.uint8)
                if file.readinto(packed.data) != packed.nbytes:
                    raise ModelFileError(f"{path} was cut while tensor {info.name!r} was read; fetch it again")
                with np.errstate(all="ignore"):  # a scale may be infinite in the file: that is not for numpy to report
                    values = gguf.dequantize(packed, quant_type)
                chunk[...] = values
    except OSError as error:
        raise ModelFileError(f"{path} can no longer be read ({error.strerror}): keep the file in place") from None
    return out.reshape(info.shape)
