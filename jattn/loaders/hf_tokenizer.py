"""The tokenizer of a Hugging Face folder: tokenizer.json, read and run by the `tokenizers` package.

Decoding stays here, on bytes (`Tokenizer.pieces`): the file's own decoder only says how vocabulary entries are spelt.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from jattn.loaders.byte_level import token_bytes
from jattn.loaders.errors import ModelFileError
from jattn.loaders.sentence_piece import SPACE, piece_bytes
from jattn.loaders.tokenizer import Tokenizer, ends_of_turn


def read_tokenizer(
    path: Path, spec: Mapping[str, Any], *, vocab_size: int, bos_id: int | None, eos_ids: Iterable[int]
) -> Tokenizer:
    """The tokenizer of the file `path`, whose decoded JSON is `spec`.

    Args: vocab_size: of the model; ids without an entry have no text. bos_id, eos_ids: as the model's configs say.
    Raises: ModelFileError if the file is not what `tokenizers` reads, spells its entries in an unknown way, has more
      entries than the model, or adds more around a text than one begin token.
    """
    try:
        engine = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the package raises a bare Exception for anything that it does not know
        raise ModelFileError(f"{path} cannot be read ({' '.join(str(error).split())}); fetch it again") from None
    added = engine.get_added_tokens_decoder()
    entries = {i: token for token, i in engine.get_vocab(with_added_tokens=True).items()}
    if entries and max(entries) >= vocab_size:
        raise ModelFileError(
            f"{path} has token id {max(entries)}, but the model has {vocab_size} ids: not its tokenizer"
        )
    # a first space is kept, where the file's decoder might strip it: generated text goes on behind a prompt
    spell = token_bytes if _is_byte_level(path, spec) else piece_bytes
    texts = [entries.get(i) for i in range(vocab_size)]
    special_ids = frozenset(i for i, token in added.items() if token.special)
    begin = _begin(path, engine)
    return Tokenizer(
        lambda text: engine.encode(text, add_special_tokens=False).ids,
        [
            b"" if text is None else added[i].content.encode() if i in added else spell(text)
            for i, text in enumerate(texts)
        ],
        special_ids=special_ids,
        bos_id=begin if bos_id is None else bos_id,
        eos_id=next(iter(eos_ids), None),
        eos_ids=tuple(dict.fromkeys((*eos_ids, *ends_of_turn(texts, special_ids)))),
        add_bos=begin is not None,
    )


def _begin(path: Path, engine: tokenizers.Tokenizer) -> int | None:
    """The token that the file's post-processor puts in front of a text."""
    plain, whole = (engine.encode("a", add_special_tokens=special).ids for special in (False, True))
    if whole == plain:
        return None
    if len(whole) == len(plain) + 1 and whole[1:] == plain:
        return whole[0]
    raise ModelFileError(f"{path} makes {whole} of a text whose ids are {plain}: only one begin token may be added")


def _is_byte_level(path: Path, spec: Mapping[str, Any]) -> bool:
    kinds = {node.get("type") for node in _nodes(spec.get("decoder"))}
    if "ByteLevel" in kinds:
        return True
    replaced = any(node.get("pattern") == {"String": SPACE} for node in _nodes(spec.get("decoder")))
    if replaced or "Metaspace" in kinds:
        return False
    shown = ", ".join(sorted(str(kind) for kind in kinds)) or "none"
    raise ModelFileError(f"{path} has decoder {shown}: want ByteLevel, or one that puts spaces for {SPACE!r}")


def _nodes(decoder: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(decoder, Mapping):
        yield decoder
        for part in decoder.get("decoders", ()):
            yield from _nodes(part)
