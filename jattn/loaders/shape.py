"""The shape of a model without its weights: a config.json, with the tokenizer beside it where there is one."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jattn.loaders.hf_folder import read_without_tensors
from jattn.loaders.hparams import HParams
from jattn.loaders.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What `--random-weights` needs of a model."""

    hparams: HParams
    metadata: Mapping[str, Any]
    words: Tokenizer

    def tokenizer(self) -> Tokenizer:
        """The tokenizer beside the config, or `id_tokenizer`."""
        return self.words


def read_shape(path: str | os.PathLike[str]) -> ModelShape:
    """Read a config.json, or the one in a folder. Without a tokenizer.json beside it, texts are token ids.

    Raises: ModelFileError as `read_folder`.
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    model = read_without_tensors(folder, "config.json" if path.is_dir() else path.name)
    has_tokenizer = (folder / "tokenizer.json").exists()
    tokenizer = model.tokenizer() if has_tokenizer else id_tokenizer(model.hparams.vocab_size, model.end_ids)
    return ModelShape(hparams=model.hparams, words=tokenizer, metadata=model.metadata)


def id_tokenizer(vocab_size: int, end_ids: tuple[int, ...] = ()) -> Tokenizer:
    """A tokenizer of a model that has none: a text is its token ids, as "17 4 230", and is printed so.

    >>> tokenizer = id_tokenizer(300)
    >>> tokenizer.encode("17 4 230"), tokenizer.decode([5, 6])
    ([17, 4, 230], ' 5 6')
    """

    def ids_of(text: str) -> list[int]:
        try:
            return [int(word) for word in text.split()]
        except ValueError:
            raise ValueError(
                f"the prompt is {text!r:.60}, but this model has no tokenizer: give token ids, as '17 4 230'"
            ) from None

    return Tokenizer(
        ids_of,
        [f" {i}".encode() for i in range(vocab_size)],
        special_ids=frozenset(),
        bos_id=None,
        eos_id=next(iter(end_ids), None),
        eos_ids=end_ids,
        add_bos=False,
    )
