"""A byte-level BPE tokenizer built from GGUF metadata, with the `tokenizers` package doing the merging.

Decoding is done here, on bytes, because a stream must know which bytes are final.
"""

import codecs
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import normalizers, pre_tokenizers

from jattn.loaders.byte_level import join, token_bytes
from jattn.loaders.errors import ModelFileError

_CONTROL, _USER_DEFINED = 3, 4  # token types of the format
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")  # where no key names the id
# One expression, but for how many digits stay together. Source: tokenizer.json of Llama 3 and of Qwen2.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizerRow:
    """How text is cut into words before merging, for one value of `tokenizer.ggml.pre`."""

    name: str
    words: str | None  # a regular expression, or None for GPT-2's own with every digit alone
    nfc: bool = False
    ignore_merges: bool = False  # a word that is a token is taken whole
    add_bos: bool = False  # where the file does not say


PRE_TOKENIZERS: dict[str, PreTokenizerRow] = {
    "smollm": PreTokenizerRow(name="smollm", words=None),
    "qwen2": PreTokenizerRow(name="qwen2", words=_WORDS.format(digits=""), nfc=True),
    "llama-bpe": PreTokenizerRow(
        name="llama-bpe", words=_WORDS.format(digits="{1,3}"), ignore_merges=True, add_bos=True
    ),
}


class Tokenizer:
    """Text to ids and back.

    `eos_ids` are the ids that end an answer: the end token, and the end-of-turn token where it is another one.
    """

    def __init__(self, metadata: Mapping[str, Any]):
        """Build from the metadata of a GGUF file (`GgufModel.metadata`).

        Raises: ModelFileError if the file has no byte-level BPE vocabulary, or its pre-tokenizer is not in the table.
        """
        tokens, types = _vocabulary(metadata)
        row = _pre_tokenizer_row(metadata)
        self.vocab_size = len(tokens)
        self.special_ids = frozenset(i for i, kind in enumerate(types) if kind == _CONTROL)
        self.bos_id = _special_id(metadata, "bos", self.vocab_size)
        self.eos_id = _special_id(metadata, "eos", self.vocab_size)
        self.add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", row.add_bos)) and self.bos_id is not None
        self.eos_ids = _eos_ids(metadata, tokens, self.special_ids, self.eos_id)
        self._tokens = tokens
        whole = {i for i, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED)}
        self._bytes = [token.encode() if i in whole else token_bytes(token) for i, token in enumerate(tokens)]
        self._bpe = _build(row, tokens, types, metadata["tokenizer.ggml.merges"])

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """Ids of `text`. The names of special tokens inside it, such as <|im_end|>, become those tokens.

        Args: add_bos: None does as the file says, and never doubles a begin token that the text already has.
        Raises: ValueError if `text` holds lone surrogates, which no UTF-8 text has.
        """
        try:
            ids = self._bpe.encode(text, add_special_tokens=False).ids
        except (UnicodeEncodeError, TypeError):
            raise ValueError(f"text is no valid Unicode: {text[:40]!r}; want a str without lone surrogates") from None
        if add_bos and self.bos_id is None:
            raise ValueError("add_bos=True, but the file names no begin token; want add_bos=None or False")
        add = add_bos or (add_bos is None and self.add_bos and ids[:1] != [self.bos_id])
        return [self.bos_id, *ids] if add and self.bos_id is not None else ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD. Raises ValueError for an id outside the vocabulary."""
        return join(self.pieces(ids, skip_special=skip_special))

    def pieces(self, ids: Iterable[int], *, skip_special: bool = False) -> Iterable[bytes]:
        """The bytes of each id in turn. Raises ValueError for an id outside the vocabulary."""
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"token id {i} is outside the vocabulary: want 0 to {self.vocab_size - 1}")
            if not (skip_special and i in self.special_ids):
                yield self._bytes[i]

    def token(self, token_id: int) -> str:
        """The vocabulary entry as the file writes it. Raises ValueError for an id outside the vocabulary."""
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"token id {token_id} is outside the vocabulary: want 0 to {self.vocab_size - 1}")
        return self._tokens[token_id]


class StreamDecoder:
    """Decode ids as they come. The pushes and the flush, joined, equal `decode` of all ids."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False):
        self._tokenizer, self._skip = tokenizer, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """Text that is final now; a character whose bytes are not all there is held back."""
        return self._decoder.decode(b"".join(self._tokenizer.pieces(ids, skip_special=self._skip)))

    def flush(self) -> str:
        """What was held back: U+FFFD for a character that stayed incomplete, or nothing."""
        return self._decoder.decode(b"", final=True)


def _vocabulary(metadata: Mapping[str, Any]) -> tuple[list[str], Sequence[int]]:
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelFileError(f"tokenizer.ggml.model is {kind!r}: only 'gpt2' (byte-level BPE) is read; pass token ids")
    for key in ("tokens", "merges"):
        if not isinstance(metadata.get(f"tokenizer.ggml.{key}"), list):
            raise ModelFileError(f"the file has no list tokenizer.ggml.{key}: want a full vocabulary; pass token ids")
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if len(types) != len(tokens):
        raise ModelFileError(
            f"{len(types)} token types for {len(tokens)} tokens: want one each; convert the file again"
        )
    return tokens, types


def _pre_tokenizer_row(metadata: Mapping[str, Any]) -> PreTokenizerRow:
    name = metadata.get("tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        raise ModelFileError(
            f"tokenizer.ggml.pre is {name!r}: want one of {', '.join(sorted(PRE_TOKENIZERS))}; another cut into words "
            "would make other ids"
        )
    return PRE_TOKENIZERS[name]


def _special_id(metadata: Mapping[str, Any], name: str, vocab_size: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is not None and not 0 <= value < vocab_size:
        raise ModelFileError(f"tokenizer.ggml.{name}_token_id is {value}: want 0 to {vocab_size - 1}")
    return value


def _eos_ids(metadata: Mapping[str, Any], tokens, special_ids: frozenset[int], eos_id: int | None) -> tuple[int, ...]:
    named = [eos_id, *(_special_id(metadata, name, len(tokens)) for name in ("eot", "eom"))]
    by_text = [i for i in sorted(special_ids) if tokens[i] in _END_OF_TURN]
    return tuple(dict.fromkeys(i for i in [*named, *by_text] if i is not None))


def _build(row: PreTokenizerRow, tokens: list[str], types: Sequence[int], merges: list[str]) -> tokenizers.Tokenizer:
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    try:
        vocab = {token: i for i, token in enumerate(tokens)}
        bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, pairs, ignore_merges=row.ignore_merges))
    except Exception as error:  # the package raises bare Exception for a merge that is not in the vocabulary
        raise ModelFileError(f"the merges do not fit the vocabulary ({error}); convert the file again") from None
    if row.nfc:
        bpe.normalizer = normalizers.NFC()
    if row.words is None:
        cut = [pre_tokenizers.Digits(individual_digits=True)]
    else:
        cut = [pre_tokenizers.Split(tokenizers.Regex(row.words), behavior="isolated")]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=row.words is None)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([*cut, byte_level])
    for kind in (_CONTROL, _USER_DEFINED):
        names = [token for token, its_kind in zip(tokens, types, strict=True) if its_kind == kind]
        special = [tokenizers.AddedToken(name, special=kind == _CONTROL, normalized=False) for name in names]
        bpe.add_special_tokens(special) if kind == _CONTROL else bpe.add_tokens(special)
    return bpe
