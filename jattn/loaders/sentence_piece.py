"""SentencePiece vocabularies as GGUF files carry them: entries with scores, merged best first.

The merge is the BPE of SentencePiece (arXiv:1808.06226): of all adjacent pairs whose join is an entry, the one with the
highest score is joined first, the leftmost of several; a character that is no entry falls back to its bytes.
"""

import heapq
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
SPACE = "\u2581"  # written for a space


def piece_bytes(text: str) -> bytes:
    """The bytes that an entry stands for.

    >>> piece_bytes("\u2581Paris"), piece_bytes("<0xC3>")
    (b' Paris', b'\\xc3')
    """
    byte = _BYTE.fullmatch(text)
    return bytes((int(byte[1], 16),)) if byte else text.replace(SPACE, " ").encode()


class SentencePiece:
    """Ids of texts.

    Args:
      tokens, scores: of each id. unknown_id: for bytes that no entry stands for; None drops them.
      whole: ids whose text is found first, and never merged. space_prefix: a space is put before the text, and after
        each of `whole`.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        scores: Sequence[float],
        *,
        whole: Iterable[int],
        space_prefix: bool,
        unknown_id: int | None,
    ):
        self._ids: Mapping[str, int] = {token: i for i, token in enumerate(tokens)}
        self._scores, self._prefix, self._unknown = scores, space_prefix, unknown_id
        self._whole = {tokens[i]: i for i in whole if tokens[i]}
        longest_first = sorted(self._whole, key=len, reverse=True)
        self._cut = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None

    def __call__(self, text: str) -> list[int]:
        """Raises UnicodeEncodeError if `text` holds lone surrogates."""
        ids: list[int] = []
        parts = [text] if self._cut is None else self._cut.split(text)
        for at, part in enumerate(parts):
            if at % 2:  # what the expression caught
                ids.append(self._whole[part])
            elif part:
                ids.extend(self._merge((" " if self._prefix else "") + part))
        return ids

    def _merge(self, text: str) -> Iterator[int]:
        pieces: list[str] = list(text.replace(" ", SPACE))
        before = list(range(-1, len(pieces) - 1))
        after = [*range(1, len(pieces)), -1]
        queue: list[tuple[float, int, int, str]] = []

        def offer(left: int, right: int) -> None:
            if left >= 0 and right >= 0:
                joined = pieces[left] + pieces[right]
                i = self._ids.get(joined)
                if i is not None:
                    heapq.heappush(queue, (-self._scores[i], left, right, joined))

        for left in range(len(pieces) - 1):
            offer(left, left + 1)
        while queue:
            _, left, right, joined = heapq.heappop(queue)
            if not pieces[left] or after[left] != right or pieces[left] + pieces[right] != joined:
                continue  # one of the two has been joined with another since
            pieces[left], pieces[right] = joined, ""
            after[left] = after[right]
            if after[left] >= 0:
                before[after[left]] = left
            offer(before[left], left)
            offer(left, after[left])
        for piece in pieces:
            if piece:
                yield from self._ids_of(piece)

    def _ids_of(self, piece: str) -> Iterator[int]:
        if piece in self._ids:
            yield self._ids[piece]
            return
        for byte in piece.encode():
            i = self._ids.get(f"<0x{byte:02X}>", self._unknown)
            if i is not None:
                yield i
