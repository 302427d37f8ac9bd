"""The tensors of a model file, checked against the table of its architecture, then yielded one at a time."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import DTypeLike

from jattn.loaders.arches import Arch, TensorRow
from jattn.loaders.errors import ModelFileError
from jattn.loaders.hparams import HParams
from jattn.loaders.tokenizer import Tokenizer

OnTensor = Callable[[str, int, int], None]  # (our name, tensors done, tensors in all)


class Stored(Protocol):
    """A tensor in a file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Row-major, [out, in]."""
        ...


class ModelFile(Protocol):
    """A model on disk, its hyperparameters read, its tensors not: a GGUF file or a Hugging Face folder."""

    @property
    def path(self) -> Path:
        """The file or the folder."""
        ...

    @property
    def table(self) -> Arch:
        """The row of the architecture."""
        ...

    @property
    def hparams(self) -> HParams:
        """Sizes and options."""
        ...

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What `render_chat` reads, under GGUF's names."""
        ...

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """By the file's names."""
        ...

    def check_type(self, name: str) -> None:
        """Raises ModelFileError if the tensor's packing cannot be read."""
        ...

    def tensor(self, name: str, dtype: DTypeLike = np.float32) -> np.ndarray:
        """A fresh array, by the file's name."""
        ...

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that comes with the model."""
        ...


def load_arrays(
    model: ModelFile, *, dtype: DTypeLike = np.float32, on_tensor: OnTensor | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (our name, array [out, in]) for every weight of the model, one at a time.

    Names: `embed`, `lm_head` (absent when tied), `layers.{i}.{attn_norm,q,k,v,o,ffn_norm,gate,up,down}` and what else
    the architecture's table has, `final_norm`. Rows of q and k are in half-split rope order: feature j of a head is
    paired with j + head_dim / 2. Norm weights multiply as they are. Every tensor is checked before the first is read.
    `on_tensor` is called when a tensor is ready.
    Raises: ModelFileError naming the tensor that is missing, unexpected, of a wrong shape or an unsupported type.
    """
    return _load(model, _checked(model), np.dtype(dtype), on_tensor)


def load_next_arrays(
    model: ModelFile, index: int = 0, *, dtype: DTypeLike = np.float32, on_tensor: OnTensor | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """As `load_arrays`, the weights of a layer behind the last that predicts further ahead (MTP).

    Names: `token_norm`, `hidden_norm`, `project`, `final_norm`, and `block.{...}` with a layer's names. Copies of the
    embedding and the head that a file keeps there are not read: they are the model's.
    Raises: ModelFileError as `load_arrays`, and where the model has no such layer.
    """
    hparams, count = model.hparams, model.hparams.num_next_layers if model.table.next_tensors else 0
    if not 0 <= index < count:
        raise ModelFileError(f"{model.path} has {count} layers that predict further ahead: there is no index {index}")
    layer, wanted = hparams.num_layers + index, []
    own, front = f"model.layers.{layer}.", _next_front(model, index)
    for row in (*(row for row in model.table.tensors if row.per_layer), *model.table.next_tensors):
        if names := tuple(name.replace(own, front, 1) for name in row.names(hparams, layer)):
            for name in names:
                _check_tensor(model, name, row)
            wanted.append(_Wanted(row.ours.replace("layers.{i}.", "block."), names, row))
    return _load(model, wanted, np.dtype(dtype), on_tensor)


def _next_front(model: ModelFile, index: int) -> str:
    return model.table.next_front.format(behind=model.hparams.num_layers + index, index=index)


class _Wanted(NamedTuple):
    ours: str
    theirs: tuple[str, ...]  # several where the file keeps one an expert
    row: TensorRow


def _wanted(model: ModelFile) -> Iterator[_Wanted]:
    hparams, rows = model.hparams, model.table.tensors
    for row in rows:
        if not row.per_layer and not (row.untied and hparams.tied_embeddings):
            yield _Wanted(row.ours, (row.theirs,), row)
    for i in range(hparams.num_layers):
        for row in rows:
            if row.per_layer and (names := row.names(hparams, i)):
                yield _Wanted(row.ours.format(i=i), names, row)


def _checked(model: ModelFile) -> list[_Wanted]:
    wanted, extra = [], set(model.tensors)
    for item in _wanted(model):  # lazily: a damaged layer count ends at the first tensor that is not there
        for name in item.theirs:
            _check_tensor(model, name, item.row)
            extra.discard(name)
        wanted.append(item)
    extra -= {name.format(i=i) for name in model.table.ignored for i in range(model.hparams.num_layers)}
    if model.hparams.tied_embeddings:
        extra -= {row.theirs for row in model.table.tensors if row.untied}  # a second copy of the embedding
    if model.table.next_tensors:  # read by `load_next_arrays`
        behind = tuple(_next_front(model, index) for index in range(model.hparams.num_next_layers))
        extra = {name for name in extra if not name.startswith(behind)}
    if extra:  # a bias or an adapter that is left out makes wrong text, not an error
        raise ModelFileError(
            f"{model.path}: {len(extra)} tensors are not part of architecture {model.table.name!r} as known here: "
            f"{', '.join(sorted(extra)[:4])}{', ...' if len(extra) > 4 else ''}; this variant is not supported"
        )
    return wanted


def _check_tensor(model: ModelFile, theirs: str, row: TensorRow) -> None:
    want = tuple(getattr(model.hparams, dim) for dim in row.shape)
    info = model.tensors.get(theirs)
    if info is None:
        raise ModelFileError(f"{model.path} lacks tensor {theirs!r}: want shape {want}; fetch or convert it again")
    if info.shape != want:
        raise ModelFileError(
            f"{model.path}: tensor {theirs!r} has shape {info.shape}, but the metadata wants {want} "
            f"({' x '.join(row.shape)}); convert the model again"
        )
    model.check_type(theirs)


def _load(
    model: ModelFile, wanted: list[_Wanted], dtype: np.dtype, on_tensor: OnTensor | None
) -> Iterator[tuple[str, np.ndarray]]:
    for done, (ours, theirs, row) in enumerate(wanted, 1):
        array = model.tensor(theirs[0], dtype)
        if "{e}" in row.theirs:
            array = _stacked(model, theirs, array)
        if row.reorder is not None:
            array = row.reorder(array, model.hparams)
        if on_tensor is not None:
            on_tensor(ours, done, len(wanted))
        yield ours, array
        del array  # the caller owns it now; keeping it would overlap with the next


def _stacked(model: ModelFile, names: tuple[str, ...], first: np.ndarray) -> np.ndarray:
    whole = np.empty((len(names), *first.shape), first.dtype)
    whole[0] = first
    for place, name in zip(whole[1:], names[1:], strict=True):
        place[...] = model.tensor(name, first.dtype)
    return whole
