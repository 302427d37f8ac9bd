"""Open a GGUF model: hyperparameters at once, tensors one at a time. Names and layouts: `jattn.loaders.arches`."""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import DTypeLike

from jattn.loaders.arches import ARCHES, TensorRow
from jattn.loaders.errors import ModelFileError
from jattn.loaders.gguf_header import TensorInfo, read_header
from jattn.loaders.hparams import HParams, RopeScaling, read_hparams

__all__ = ["GgufModel", "HParams", "ModelFileError", "RopeScaling", "load_llama_arrays", "read_metadata", "split_half"]

_CHUNK = 1 << 20  # values dequantised at once: 4 MiB of float32, and gguf's temporaries are a few times that

OnTensor = Callable[[str, int, int], None]  # (our name, tensors done, tensors in all)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GgufModel:
    """A model file whose header is read. It holds no open file and no tensor data."""

    path: Path
    arch: str
    hparams: HParams
    metadata: Mapping[str, Any] = dataclasses.field(repr=False)  # every key of the file, as plain Python values
    tensors: Mapping[str, TensorInfo] = dataclasses.field(repr=False)  # by the file's names

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
            arch,
            header.metadata,
            tied_embeddings="output.weight" not in header.tensors,
            freq_factors=None if factors is None else tuple(_read_tensor(path, factors, np.dtype("f4")).tolist()),
        )
    except ModelFileError as error:
        raise ModelFileError(f"{path}: {error}") from None
    return GgufModel(path=path, arch=arch, hparams=hparams, metadata=header.metadata, tensors=header.tensors)


def load_llama_arrays(
    model: GgufModel, *, dtype: DTypeLike = np.float32, on_tensor: OnTensor | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (our name, array [out, in]) for every weight of the model, one at a time.

    Names: `embed`, `lm_head` (absent when tied), `layers.{i}.{attn_norm,q,k,v,o,ffn_norm,gate,up,down}`, `final_norm`.
    Rows of q and k are in half-split rope order: feature j of a head is paired with j + head_dim / 2.
    Every tensor is checked before the first is read. `on_tensor` is called when a tensor is ready.
    Raises: ModelFileError naming the tensor that is missing, unexpected, of a wrong shape or an unsupported type.
    """
    return _load(model, _checked(model), np.dtype(dtype), on_tensor)


def split_half(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder rows [num_heads * head_dim, in] from adjacent rope pairs (2j, 2j + 1) to pairs (j, j + head_dim / 2).

    Source: the permutation of llama.cpp's converter, undone.

    >>> split_half(np.arange(4.0)[:, None], 1).ravel().tolist()
    [0.0, 2.0, 1.0, 3.0]
    """
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _wanted(model: GgufModel) -> Iterator[tuple[str, str, TensorRow]]:
    rows = ARCHES[model.arch].tensors
    for row in rows:
        if not row.per_layer and not (row.untied and model.hparams.tied_embeddings):
            yield row.ours, row.theirs, row
    for i in range(model.hparams.num_layers):
        for row in rows:
            if row.per_layer:
                yield row.ours.format(i=i), row.theirs.format(i=i), row


def _checked(model: GgufModel) -> list[tuple[str, str, TensorRow]]:
    wanted, extra = [], model.tensors.keys() - ARCHES[model.arch].ignored
    for item in _wanted(model):  # lazily: a damaged layer count ends at the first tensor that is not there
        _check_tensor(model, *item[1:])
        wanted.append(item)
        extra.discard(item[1])
    if extra:  # a bias or an adapter that is left out makes wrong text, not an error
        raise ModelFileError(
            f"{model.path}: {len(extra)} tensors are not part of architecture {model.arch!r} as known here: "
            f"{', '.join(sorted(extra)[:4])}{', ...' if len(extra) > 4 else ''}; this variant is not supported"
        )
    return wanted


def _check_tensor(model: GgufModel, theirs: str, row: TensorRow) -> None:
    want = tuple(getattr(model.hparams, dim) for dim in row.shape)
    info = model.tensors.get(theirs)
    if info is None:
        raise ModelFileError(f"{model.path} lacks tensor {theirs!r}: want shape {want}; fetch or convert it again")
    if info.shape != want:
        raise ModelFileError(
            f"{model.path}: tensor {theirs!r} has shape {info.shape}, but the metadata wants {want} "
            f"({' x '.join(row.shape)}); convert the model again"
        )
    _check_type(model.path, info)


def _load(model: GgufModel, wanted, dtype: np.dtype, on_tensor: OnTensor | None) -> Iterator[tuple[str, np.ndarray]]:
    for done, (ours, theirs, row) in enumerate(wanted, 1):
        array = model.tensor(theirs, dtype)
        if row.rope_heads is not None:
            array = split_half(array, getattr(model.hparams, row.rope_heads))
        if on_tensor is not None:
            on_tensor(ours, done, len(wanted))
        yield ours, array
        del array  # the caller owns it now; keeping it would overlap with the next


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
