"""Draft heads on disk, as EAGLE's authors publish them: a folder with config.json and safetensors.

An EAGLE head has `fc` and `layers.{i}`; an EAGLE-3 head `fc`, one `midlayer`, `norm`, and by choice a vocabulary of its
own: `lm_head`, and `d2t`, which added to a row's index gives the target's id. Source of the names:
https://github.com/SafeAILab/EAGLE and https://huggingface.co/yuhuili/EAGLE3-LLaMA3.1-Instruct-8B.
"""

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike
from safetensors.numpy import save_file

from jattn.loaders.errors import ModelFileError
from jattn.loaders.fields import Fields
from jattn.loaders.hf_config import read_config
from jattn.loaders.hf_folder import HfModel, read_json, read_tensors
from jattn.loaders.hparams import HParams

Kind = Literal["eagle", "eagle3"]
# ours -> the file's, of a layer, and the shape in names of `HParams`
_LAYER = {
    "q": ("self_attn.q_proj.weight", ("q_dim", "d_model")),
    "k": ("self_attn.k_proj.weight", ("kv_dim", "d_model")),
    "v": ("self_attn.v_proj.weight", ("kv_dim", "d_model")),
    "o": ("self_attn.o_proj.weight", ("d_model", "q_dim")),
    "attn_norm": ("input_layernorm.weight", ("d_model",)),
    "ffn_norm": ("post_attention_layernorm.weight", ("d_model",)),
    "gate": ("mlp.gate_proj.weight", ("ffn_dim", "d_model")),
    "up": ("mlp.up_proj.weight", ("ffn_dim", "d_model")),
    "down": ("mlp.down_proj.weight", ("d_model", "ffn_dim")),
}
_OF_HEADS = (
    "draft_vocab_size target_hidden_size num_aux_hidden_states eagle_config norm_before_residual bias "
    "has_no_defaults_at_init speculators_model_type speculators_version speculators_config".split()
)
_IGNORED = ("embed_tokens.weight", "t2d")  # the target's; the inverse of d2t


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeadFile:
    """A head whose config and tensor names are read. It holds no tensor data."""

    path: Path
    kind: Kind
    hparams: HParams  # of its own layers
    target_dim: int  # width of the target's hidden states
    num_taps: int  # layers of the target that it reads; 0: the final hidden states
    taps: tuple[int, ...] | None  # of them, the first so many layers each; None: as EAGLE-3 has them
    has_bias: bool  # of `fc`
    drafted: int  # tokens of its vocabulary
    wanted: Mapping[str, tuple[str, tuple[int, ...]]] = dataclasses.field(repr=False)  # ours -> the file's, shape
    files: HfModel = dataclasses.field(repr=False)

    def arrays(self, dtype: DTypeLike = np.float32) -> Iterator[tuple[str, np.ndarray]]:
        """(our name, array) of each weight of its layers, one at a time."""
        for ours, (theirs, _) in self.wanted.items():
            yield ours, self.files.tensor(theirs, dtype)

    def token_ids(self) -> np.ndarray | None:
        """i64[drafted], the target's ids; None where it drafts every token.

        Raises: ModelFileError if one is no token of the target, or stands twice.
        """
        if "d2t" not in self.files.tensors:
            return None
        ids = self.files.integers("d2t") + np.arange(self.drafted)
        if ids.min() < 0 or ids.max() >= self.hparams.vocab_size or len(np.unique(ids)) != len(ids):
            raise ModelFileError(
                f"{self.path}: d2t names {len(np.unique(ids))} tokens from {ids.min()} to {ids.max()}: want "
                f"{self.drafted} different ones of {self.hparams.vocab_size}"
            )
        return ids

    def own(self, name: str, dtype: DTypeLike = np.float32) -> np.ndarray | None:
        """`lm_head` or `embed_tokens` of the file, where it has one."""
        theirs = f"{name}.weight"
        return self.files.tensor(theirs, dtype) if theirs in self.files.tensors else None


def read_head(path: str | os.PathLike[str]) -> HeadFile:
    """Read the config and the shard headers of a head.

    Raises: ModelFileError for a file that is missing or malformed, a tensor that is missing, unknown or of another
      shape, or a variant that is not known; the message names it.
    """
    path = Path(path)
    config = read_json(path / "config.json")
    own = Fields({name: config[name] for name in _OF_HEADS if name in config})
    inner = config.get("transformer_layer_config")
    try:
        _, hparams = read_config({"model_type": "llama", **inner} if isinstance(inner, Mapping) else _plain(config))
        own.expect("norm_before_residual", False, "the features themselves are added to")
        target_dim = own.count("target_hidden_size", hparams.d_model)
        taps = _taps(own)
    except ModelFileError as error:
        raise ModelFileError(f"{path / 'config.json'}: {error}") from None
    tensors = {name.removeprefix("model."): info for name, info in read_tensors(path).items()}
    files = HfModel(
        path=path,
        arch="llama",
        hparams=hparams,
        metadata=MappingProxyType({}),
        tensors=MappingProxyType(tensors),
        scales=MappingProxyType({}),
        end_ids=(),
    )
    kind: Kind = "eagle3" if any(name.startswith("midlayer.") for name in tensors) else "eagle"
    drafted = own.count("draft_vocab_size", hparams.vocab_size) if kind == "eagle3" else hparams.vocab_size
    has_bias = "fc.bias" in tensors
    num_taps = (own.count("num_aux_hidden_states", len(taps) if taps else 3)) if kind == "eagle3" else 0
    wanted = _eagle3(hparams, num_taps * target_dim) if kind == "eagle3" else _eagle(hparams, has_bias)
    optional = {"lm_head.weight": (drafted, hparams.d_model), "d2t": (drafted,)}
    _check(path, tensors, {**dict(wanted.values()), **{n: s for n, s in optional.items() if n in tensors}})
    for name in wanted.values():
        files.check_type(name[0])
    if drafted < hparams.vocab_size and "d2t" not in tensors:
        raise ModelFileError(f"{path} drafts {drafted} of {hparams.vocab_size} tokens but lacks tensor 'd2t': want it")
    return HeadFile(
        path=path,
        kind=kind,
        hparams=hparams,
        target_dim=target_dim,
        num_taps=num_taps,
        taps=taps,
        has_bias=has_bias,
        drafted=drafted,
        wanted=MappingProxyType(wanted),
        files=files,
    )


def _taps(own: Fields) -> tuple[int, ...] | None:
    # the file counts layers from 0 and means the stream behind each
    inner = own.get("eagle_config", {})
    given = inner.get("eagle_aux_hidden_state_layer_ids") if isinstance(inner, Mapping) else None
    if given is None:
        return None
    if not isinstance(given, list) or not all(type(i) is int and i >= 0 for i in given) or not given:
        raise own.error("eagle_config", inner, "want eagle_aux_hidden_state_layer_ids as a list of layers")
    return tuple(i + 1 for i in given)


def _sizes(hparams: HParams, names: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(getattr(hparams, name) for name in names)


def _eagle(hparams: HParams, has_bias: bool) -> dict[str, tuple[str, tuple[int, ...]]]:
    d = hparams.d_model
    found = {"fc": ("fc.weight", (d, 2 * d)), **({"fc_bias": ("fc.bias", (d,))} if has_bias else {})}
    for i in range(hparams.num_layers):
        for ours, (theirs, dims) in _LAYER.items():
            if i or ours != "attn_norm":  # the first layer has none
                found[f"layers.{i}.{ours}"] = (f"layers.{i}.{theirs}", _sizes(hparams, dims))
    return found


def _eagle3(hparams: HParams, feature_dim: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    d = hparams.d_model
    names = {"attn_norm": "token_norm"}
    found = {"fc": ("fc.weight", (d, feature_dim)), "hidden_norm": ("midlayer.hidden_norm.weight", (d,))}
    for ours, (theirs, dims) in _LAYER.items():
        shape = _sizes(hparams, dims)
        shape = (shape[0], 2 * d) if ours in ("q", "k", "v") else shape
        found[names.get(ours, ours)] = (f"midlayer.{theirs}", shape)
    return {**found, "final_norm": ("norm.weight", (d,))}


def _check(path: Path, tensors, wanted: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in wanted.items():
        info = tensors.get(name)
        if info is None:
            raise ModelFileError(f"{path} lacks tensor {name!r}: want shape {shape}; fetch the head again")
        if info.shape != shape:
            raise ModelFileError(
                f"{path}: tensor {name!r} has shape {info.shape}, but the config wants {shape}; fetch the head again"
            )
    extra = sorted(set(tensors) - set(wanted) - set(_IGNORED))
    if extra:
        raise ModelFileError(
            f"{path}: {len(extra)} tensors are not part of a draft head as known here: {', '.join(extra[:4])}"
            f"{', ...' if len(extra) > 4 else ''}; this variant is not supported"
        )


def write_head(
    path: str | os.PathLike[str],
    config: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    *,
    token_ids: np.ndarray | None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write an EAGLE-3 head that `read_head` reads: config.json and model.safetensors in the folder `path`.

    Args: config: of the head's layer, as a Hugging Face Llama has it, with what belongs to heads. arrays: by our names,
      as `HeadFile.arrays` yields them, in the dtype to store. token_ids: the target's ids of its vocabulary.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    names = {ours: theirs for ours, (theirs, _) in _eagle3(read_config(_plain(config))[1], 0).items()}
    tensors = {names[ours]: np.ascontiguousarray(array) for ours, array in arrays.items()}
    if token_ids is not None:
        tensors["d2t"] = token_ids.astype(np.int64) - np.arange(len(token_ids))
    save_file(tensors, path / "model.safetensors", dict(metadata or {}))
    (path / "config.json").write_text(json.dumps(dict(config), indent=1) + "\n", encoding="utf-8")


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"model_type": "llama", **{name: value for name, value in config.items() if name not in _OF_HEADS}}
