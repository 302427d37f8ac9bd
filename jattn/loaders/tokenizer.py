"""Text to ids and back, with the `tokenizers` package doing the merging; here built from GGUF metadata.

Decoding is done here, on bytes, because a stream must know which bytes are final.
"""

import codecs
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import normalizers, pre_tokenizers
from tokenizers.models import BPE

from jattn.loaders.byte_level import join, token_bytes
from jattn.loaders.errors import ModelFileError
from jattn.loaders.sentence_piece import SentencePiece, piece_bytes
from jattn.loaders.stop import StopTexts
from jattn.loaders.vocabulary import Vocabulary, read_vocabulary

__all__ = ["PRE_TOKENIZERS", "PreTokenizerRow", "StopTexts", "StreamDecoder", "Tokenizer"]

_CONTROL, _USER_DEFINED = 3, 4  # token types of the format
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")  # where no key names the id
# One expression, but for how many digits stay together. Source: tokenizer.json of Llama 3 and of Qwen2.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# Words end where capitals begin. Source: o200k_base of https://github.com/openai/tiktoken
_CASED_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
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
    "gpt-4o": PreTokenizerRow(name="gpt-4o", words=_CASED_WORDS),  # gpt-oss
}


class Tokenizer:
    """Text to ids and back. Build it with `from_metadata`, or with `jattn.loaders.hf_tokenizer.read_tokenizer`.

    `eos_ids` are the ids that end an answer: the end token, and the end-of-turn token where it is another one.
    """

    def __init__(
        self,
        ids_of: Callable[[str], list[int]],
        pieces: Sequence[bytes],
        *,
        special_ids: frozenset[int],
        bos_id: int | None,
        eos_id: int | None,
        eos_ids: tuple[int, ...],
        add_bos: bool,
    ):
        """ids_of: merges, without begin tokens. pieces: the bytes of each id. add_bos: where `encode` is not told."""
        self.vocab_size = len(pieces)
        self.special_ids = special_ids
        self.bos_id, self.eos_id, self.eos_ids, self.add_bos = bos_id, eos_id, eos_ids, add_bos
        self._bytes, self._ids_of = pieces, ids_of

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """Build from the metadata of a GGUF file (`GgufModel.metadata`).

        Raises: ModelFileError if the file's vocabulary is neither byte-level BPE with a pre-tokenizer of the table, nor
          SentencePiece's.
        """
        vocabulary = read_vocabulary(metadata)
        tokens, types = vocabulary.tokens, vocabulary.types
        special_ids = frozenset(i for i, kind in enumerate(types) if kind == _CONTROL)
        if vocabulary.scores is None:
            row = _pre_tokenizer(metadata.get("tokenizer.ggml.pre"))
            bpe, spell, default = _build(vocabulary, row), token_bytes, row.add_bos
            plain = (_CONTROL, _USER_DEFINED)
            ids_of = functools.partial(_encode, bpe)
        else:
            spell, default, plain = piece_bytes, True, (_CONTROL,)  # user-defined ones spell spaces, too
            ids_of = SentencePiece(
                tokens,
                vocabulary.scores,
                whole=[i for i, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED)],
                space_prefix=vocabulary.space_prefix,
                unknown_id=vocabulary.unknown_id,
            )
        add_bos = default if vocabulary.add_bos is None else vocabulary.add_bos
        return cls(
            ids_of,
            [token.encode() if kind in plain else spell(token) for token, kind in zip(tokens, types, strict=True)],
            special_ids=special_ids,
            bos_id=vocabulary.bos_id,
            eos_id=vocabulary.eos_id,
            eos_ids=tuple(dict.fromkeys((*vocabulary.end_ids, *ends_of_turn(tokens, special_ids)))),
            add_bos=vocabulary.bos_id is not None and add_bos,
        )

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """Ids of `text`. The names of special tokens inside it, such as <|im_end|>, become those tokens.

        A byte that the vocabulary lacks is dropped, as other engines do; SmolLM2 lacks six control characters.
        Args: add_bos: None does as the model says, and never doubles a begin token that the text already has.
        Raises: ValueError if `text` holds lone surrogates, which no UTF-8 text has, or no begin token can be added.
        """
        try:
            ids = self._ids_of(text)
        except (TypeError, UnicodeEncodeError):
            raise ValueError(f"text is {text!r:.60}: want a str without lone surrogates") from None
        if add_bos and self.bos_id is None:
            raise ValueError("add_bos=True, but the model names no begin token: want add_bos=None or False")
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


def _pre_tokenizer(name: Any) -> PreTokenizerRow:
    if name not in PRE_TOKENIZERS:
        raise ModelFileError(
            f"tokenizer.ggml.pre is {name!r}: want one of {', '.join(sorted(PRE_TOKENIZERS))}; words cut another "
            "way would make other ids, so pass token ids"
        )
    return PRE_TOKENIZERS[name]


def _encode(bpe: tokenizers.Tokenizer, text: str) -> list[int]:
    return bpe.encode(text, add_special_tokens=False).ids


def ends_of_turn(tokens: Sequence[str | None], special_ids: Iterable[int]) -> tuple[int, ...]:
    """Special ids whose text is known to end a turn, for files where no key names them."""
    return tuple(i for i in sorted(special_ids) if tokens[i] in _END_OF_TURN)


def _build(vocabulary: Vocabulary, row: PreTokenizerRow) -> tokenizers.Tokenizer:
    vocab = {token: i for i, token in enumerate(vocabulary.tokens)}
    try:
        bpe = tokenizers.Tokenizer(BPE(vocab, list(vocabulary.merges), ignore_merges=row.ignore_merges))
    except Exception as error:  # the package raises a bare Exception for a merge that is not in the vocabulary
        raise ModelFileError(f"the merges do not fit the vocabulary ({error}); convert the file again") from None
    if row.nfc:
        bpe.normalizer = normalizers.NFC()
    if row.words is None:
        cut = pre_tokenizers.Digits(individual_digits=True)
    else:
        cut = pre_tokenizers.Split(tokenizers.Regex(row.words), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=row.words is None)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([cut, byte_level])
    added = zip(vocabulary.tokens, vocabulary.types, strict=True)
    bpe.add_tokens(
        [
            tokenizers.AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in added
            if kind in (_CONTROL, _USER_DEFINED) and token
        ]
    )
    return bpe
