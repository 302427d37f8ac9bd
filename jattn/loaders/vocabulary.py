"""The vocabulary that a GGUF file carries, checked, as a plain record."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jattn.loaders.errors import ModelFileError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Entries of a vocabulary, byte-level BPE's or SentencePiece's. An entry's index is its id."""

    tokens: tuple[str, ...] = dataclasses.field(repr=False)
    types: tuple[int, ...] = dataclasses.field(repr=False)  # 1 normal, 3 control, 4 user-defined, 5 unused
    merges: tuple[tuple[str, str], ...] = dataclasses.field(repr=False)  # first is merged first
    scores: tuple[float, ...] | None = dataclasses.field(repr=False)  # SentencePiece's, which has no merges
    unknown_id: int | None
    space_prefix: bool  # SentencePiece: a space is put before the text
    bos_id: int | None
    eos_id: int | None
    end_ids: tuple[int, ...]  # eos, end of turn and end of message, those that the file names
    add_bos: bool | None  # None: the file does not say


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary in keys `tokenizer.ggml.*`.

    Raises: ModelFileError for another kind of tokenizer, or for a key that is missing or does not fit the others.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ModelFileError(
            f"tokenizer.ggml.model is {kind!r}: only 'gpt2' (byte-level BPE) and 'llama' (SentencePiece) are read; "
            "pass token ids"
        )
    is_bpe = kind == "gpt2"
    tokens = _texts(metadata, "tokens")
    merges, scores = (_texts(metadata, "merges"), None) if is_bpe else ((), _scores(metadata, len(tokens)))
    types = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        count = len(types) if isinstance(types, list) else repr(types)
        raise ModelFileError(f"{count} token types for {len(tokens)} tokens: want one each; convert the file again")
    ids = {name: _special_id(metadata, name, len(tokens)) for name in ("bos", "eos", "eot", "eom", "unknown")}
    return Vocabulary(
        tokens=tokens,
        types=tuple(types),
        merges=tuple(_pair(merge) for merge in merges),
        scores=scores,
        unknown_id=ids["unknown"],
        space_prefix=metadata.get("tokenizer.ggml.add_space_prefix", not is_bpe),
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        end_ids=tuple(dict.fromkeys(i for name, i in ids.items() if name[0] == "e" and i is not None)),
        add_bos=metadata.get("tokenizer.ggml.add_bos_token"),
    )


def _texts(metadata: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ModelFileError(f"the file has no list of texts tokenizer.ggml.{name}: want a whole model; pass token ids")
    return tuple(value)


def _scores(metadata: Mapping[str, Any], count: int) -> tuple[float, ...]:
    value = metadata.get("tokenizer.ggml.scores")
    if not isinstance(value, list) or len(value) != count or not all(isinstance(item, float) for item in value):
        raise ModelFileError(
            f"the file has no score for each of {count} tokens (tokenizer.ggml.scores); convert it again"
        )
    return tuple(value)


def _pair(merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise ModelFileError(f"merge {merge!r} is not two parts with a space between; convert the file again")
    return left, right


def _special_id(metadata: Mapping[str, Any], name: str, vocab_size: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is not None and not (isinstance(value, int) and 0 <= value < vocab_size):
        raise ModelFileError(f"tokenizer.ggml.{name}_token_id is {value!r}: want 0 to {vocab_size - 1}")
    return value
