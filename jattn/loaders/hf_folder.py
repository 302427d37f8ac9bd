"""Open a Hugging Face checkpoint: a folder with config.json, safetensors shards, tokenizer.json and a chat template.

Pickled weights and code that comes with a model are never run.
"""

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy, which safetensors asks for
import numpy as np
from numpy.typing import DTypeLike
from safetensors import SafetensorError, safe_open

from jattn.loaders.arches import Arch
from jattn.loaders.errors import ModelFileError
from jattn.loaders.hf_arches import HF_ARCHES
from jattn.loaders.hf_config import read_config
from jattn.loaders.hf_float8 import DTYPE, SUFFIX, dequantise, read_float8, scale_shape
from jattn.loaders.hf_tokenizer import read_tokenizer
from jattn.loaders.hparams import HParams
from jattn.loaders.tokenizer import Tokenizer

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = ("F64", "F32", "F16", "BF16")  # others are packed, with scales that stand elsewhere
_CHUNK = 1 << 20  # values converted at once


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies and what it is."""

    name: str
    shard: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors says it


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HfModel:
    """A checkpoint folder whose configs and shard headers are read. It holds no open file and no tensor data."""

    path: Path
    arch: str
    hparams: HParams
    metadata: Mapping[str, Any] = dataclasses.field(repr=False)  # the chat template's inputs, under GGUF's names
    tensors: Mapping[str, StoredTensor] = dataclasses.field(repr=False)
    scales: Mapping[str, StoredTensor] = dataclasses.field(repr=False)  # of the 8-bit ones, by the weight's name
    end_ids: tuple[int, ...] = dataclasses.field(repr=False)  # ids that end an answer, as the configs say

    @property
    def table(self) -> Arch:
        """The row of the architecture."""
        return HF_ARCHES[self.arch]

    def check_type(self, name: str) -> None:
        """Raises ModelFileError if the tensor is stored neither as plain floats nor as 8-bit ones with their scales."""
        info = self.tensors[name]
        if info.dtype == DTYPE and self.hparams.scale_block is not None:
            self._check_scales(name, info)
        elif info.dtype not in _DTYPES:
            raise ModelFileError(
                f"{info.shard}: tensor {name!r} is stored as {info.dtype}: want one of {', '.join(_DTYPES)}; convert it"
            )

    def tensor(self, name: str, dtype: DTypeLike = np.float32) -> np.ndarray:
        """One tensor as a fresh array in `dtype`, converted in chunks of about a million values, 8-bit ones rescaled.

        Raises: ModelFileError if there is no such tensor, `check_type` refuses it, or its shard cannot be read.
        """
        if name not in self.tensors:
            raise ModelFileError(f"{self.path} has no tensor {name!r}: want one of its {len(self.tensors)} tensors")
        self.check_type(name)
        info = self.tensors[name]
        if info.dtype == DTYPE and self.hparams.scale_block is not None:
            scales = self._read(self.scales[name], np.float32)
            return dequantise(read_float8(info.shard, name), scales, self.hparams.scale_block, dtype)
        return self._read(info, dtype)

    def _check_scales(self, name: str, info: StoredTensor) -> None:
        assert self.hparams.scale_block is not None
        if len(info.shape) != 2:
            raise ModelFileError(f"{info.shard}: tensor {name!r} is 8-bit with shape {info.shape}: want a matrix")
        want, scales = scale_shape(info.shape, self.hparams.scale_block), self.scales.get(name)
        if scales is None:
            raise ModelFileError(f"{self.path} lacks tensor {name + SUFFIX!r}, the scales of {name!r}: fetch it again")
        if scales.shape != want or scales.dtype not in _DTYPES:
            raise ModelFileError(
                f"{scales.shard}: tensor {scales.name!r} is {scales.dtype} of shape {scales.shape}: want plain floats "
                f"of shape {want}, one a block of {' x '.join(map(str, self.hparams.scale_block))}"
            )

    def _read(self, info: StoredTensor, dtype: DTypeLike) -> np.ndarray:
        out = np.empty(info.shape, dtype)
        try:
            with safe_open(info.shard, framework="np") as shard:
                stored = shard.get_slice(info.name)
                rows = max(1, _CHUNK // max(1, math.prod(info.shape[1:])))
                for start in range(0, info.shape[0], rows):
                    end = min(start + rows, info.shape[0])  # safetensors refuses a slice past the end
                    out[start:end] = stored[start:end]
        except (OSError, SafetensorError) as error:
            raise ModelFileError(f"{info.shard}: tensor {info.name!r} can no longer be read ({error})") from None
        return out

    def integers(self, name: str) -> np.ndarray:
        """One tensor of whole numbers, i64. Raises ModelFileError if it is none, or its shard cannot be read."""
        info = self.tensors[name]
        if info.dtype not in ("I64", "I32"):
            raise ModelFileError(f"{info.shard}: tensor {name!r} is stored as {info.dtype}: want I64 or I32")
        return self._read(info, np.int64)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of tokenizer.json. Raises ModelFileError if there is none, or one of an unknown kind."""
        return read_tokenizer(
            self.path / "tokenizer.json",
            read_json(self.path / "tokenizer.json"),
            vocab_size=self.hparams.vocab_size,
            bos_id=self.hparams.bos_id,
            eos_ids=self.end_ids,
        )


def read_folder(path: str | os.PathLike[str]) -> HfModel:
    """Read the configs and the shard headers of a checkpoint.

    Raises: ModelFileError for a file that is missing or malformed, an unknown architecture, or a config beyond what
      decoders here do; the message names the file, and the key or the tensor.

    >>> read_folder("no/such/folder")
    Traceback (most recent call last):
    jattn.loaders.errors.ModelFileError: no/such/folder/config.json does not exist: want a Hugging Face model folder
    """
    path = Path(path)
    model = read_without_tensors(path)
    tensors, scales = _split_scales(read_tensors(path))
    return dataclasses.replace(model, tensors=tensors, scales=scales)


def read_without_tensors(path: Path, config_name: str = "config.json") -> HfModel:
    """Read the configs of a folder, with or without weights beside them. Raises ModelFileError as `read_folder`."""
    config = read_json(path / config_name)
    try:
        arch, hparams = read_config(config)
    except ModelFileError as error:
        raise ModelFileError(f"{path / config_name}: {error}") from None
    return HfModel(
        path=path,
        arch=arch.name,
        hparams=hparams,
        metadata=_chat_metadata(path),
        tensors=MappingProxyType({}),
        scales=MappingProxyType({}),
        end_ids=_end_ids(path, config),
    )


def _end_ids(path: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    generation = read_json(path / "generation_config.json", optional=True)
    ends = [config.get("eos_token_id"), generation.get("eos_token_id")]
    return tuple(dict.fromkeys(i for value in ends for i in _ids(value)))


def _split_scales(tensors: Mapping[str, StoredTensor]) -> tuple[Mapping[str, StoredTensor], Mapping[str, StoredTensor]]:
    """Tensors, and the scales of those that are stored as 8-bit floats."""
    of = {name: name.removesuffix(SUFFIX) for name in tensors if name.endswith(SUFFIX)}
    scales = {of[name]: info for name, info in tensors.items() if name in of and of[name] in tensors}
    scales = {name: info for name, info in scales.items() if tensors[name].dtype == DTYPE}
    taken = {info.name for info in scales.values()}
    rest = {name: info for name, info in tensors.items() if name not in taken}
    return MappingProxyType(rest), MappingProxyType(scales)


def _ids(value: Any) -> list[int]:
    return [i for i in (value if isinstance(value, list) else [value]) if type(i) is int]


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """The object of a JSON file; with `optional`, {} where there is none. Raises ModelFileError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if optional:
            return {}
        raise ModelFileError(f"{path} does not exist: want a Hugging Face model folder") from None
    except (ValueError, OSError, RecursionError) as error:
        raise ModelFileError(f"{path} is not readable JSON ({error}): fetch it again") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} holds a {type(value).__name__}: want a JSON object; fetch it again")
    return value


def read_tensors(path: Path) -> Mapping[str, StoredTensor]:
    """What the shards of a folder hold, by name. Raises ModelFileError."""
    if (path / _SINGLE).exists():
        return MappingProxyType(_read_shard(path / _SINGLE))
    if not (path / _INDEX).exists():
        raise ModelFileError(
            f"{path} has neither {_SINGLE} nor {_INDEX}: want safetensors; pickled weights are not read"
        )
    weight_map = read_json(path / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) and Path(name).name == name for name in weight_map.values()
    ):
        raise ModelFileError(f"{path / _INDEX} has no weight_map from tensor names to file names: fetch it again")
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        for name, info in _read_shard(path / shard).items():
            if name in tensors:
                raise ModelFileError(f"{path}: tensor {name!r} is in {tensors[name].shard.name} and in {shard}")
            tensors[name] = info
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].shard.name != shard:
            raise ModelFileError(f"{path / shard} lacks tensor {name!r}, which {_INDEX} puts there: fetch it again")
    return MappingProxyType(tensors)


def _read_shard(path: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(path, framework="np") as shard:
            slices = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118  not a mapping
            return {
                name: StoredTensor(name=name, shard=path, shape=tuple(part.get_shape()), dtype=part.get_dtype())
                for name, part in slices.items()
            }
    except FileNotFoundError:
        raise ModelFileError(f"{path} does not exist, but {_INDEX} names it: fetch the shard") from None
    except (OSError, SafetensorError) as error:
        raise ModelFileError(f"{path} is no whole safetensors file ({error}): fetch it again") from None


def _chat_metadata(path: Path) -> Mapping[str, Any]:
    """The template and the tokens that it may print, as `render_chat` looks them up."""
    config = read_json(path / "tokenizer_config.json", optional=True)
    template = config.get("chat_template")
    if isinstance(template, list):  # several, each with a name
        named = {row.get("name"): row.get("template") for row in template if isinstance(row, dict)}
        template = named.get("default")
    file = path / "chat_template.jinja"
    if file.exists():
        try:
            template = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelFileError(f"{file} cannot be read ({error}): fetch it again") from None
    metadata: dict[str, Any] = {} if template is None else {"tokenizer.chat_template": template}
    tokens = []
    for name in ("bos", "eos"):
        token = config.get(f"{name}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            metadata[f"tokenizer.ggml.{name}_token_id"] = len(tokens)
            tokens.append(token)
    return MappingProxyType(metadata | {"tokenizer.ggml.tokens": tokens})
