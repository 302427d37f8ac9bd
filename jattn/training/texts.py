"""Texts that a target has written, as token ids: kept in files, cut to one length, counted."""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

_LOOK_AHEAD = 64  # texts that may take the place of one that does not fit


@dataclasses.dataclass(frozen=True, slots=True)
class Texts:
    """Prompts with their answers."""

    ids: list[np.ndarray]  # i32[n] each, prompt and answer
    prompt_lens: list[int]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one .npz."""
        offsets = np.cumsum([0, *map(len, self.ids)])
        flat = np.concatenate(self.ids) if self.ids else np.zeros(0, np.int32)
        np.savez_compressed(path, ids=flat, offsets=offsets, prompt_lens=np.asarray(self.prompt_lens, np.int64))

    @classmethod
    def load(cls, paths: Sequence[str | os.PathLike[str]]) -> "Texts":
        """Read files that `save` wrote, in order. Raises ValueError naming one that is none."""
        ids: list[np.ndarray] = []
        prompt_lens: list[int] = []
        for path in paths:
            try:
                with np.load(path) as file:
                    ends, flat = file["offsets"].tolist(), file["ids"].astype(np.int32)
                    ids += [flat[a:b] for a, b in zip(ends, ends[1:], strict=False)]
                    prompt_lens += file["prompt_lens"].tolist()
            except (OSError, ValueError, KeyError) as error:
                raise ValueError(f"{Path(path)} holds no texts ({error}): write it with `answers`") from None
        return cls(ids, prompt_lens)

    def split(self, share: float) -> tuple["Texts", "Texts"]:
        """(all but every n-th, every n-th): texts to learn from, and about `share` of them, at least one, to judge by.

        Raises: ValueError for fewer than two texts.
        """
        if len(self.ids) < 2:
            raise ValueError(f"{len(self.ids)} texts: want two at least, one to learn from and one to judge by")
        every = min(max(round(1 / share), 2), len(self.ids))
        held = [i for i in range(len(self.ids)) if i % every == every - 1]
        rest = [i for i in range(len(self.ids)) if i % every != every - 1]
        return self._some(rest), self._some(held)

    def _some(self, at: Sequence[int]) -> "Texts":
        return Texts([self.ids[i] for i in at], [self.prompt_lens[i] for i in at])

    def common(self, count: int, vocab_size: int) -> tuple[np.ndarray, float]:
        """i32[count], ids of the tokens that answers have most often, the commonest first, ties by id; and their share.

        >>> Texts([np.array([9, 5, 7, 7], np.int32)], [1]).common(2, 10)[0].tolist()
        [7, 5]
        """
        if not 1 <= count <= vocab_size:
            raise ValueError(f"count={count} of {vocab_size} tokens: want 1 to all of them")
        answers = [text[start:] for text, start in zip(self.ids, self.prompt_lens, strict=True)]
        seen = np.bincount(np.concatenate([*answers, np.zeros(0, np.int32)]), minlength=vocab_size)
        ids = np.argsort(-seen, kind="stable")[:count].astype(np.int32)
        return ids, float(seen[ids].sum() / max(seen.sum(), 1))

    def packed(self, size: int, length: int, *, seed: int) -> Iterator["Packed"]:
        """Rows of whole texts without end, in a drawn order each time round; longer texts are cut.

        A text that does not fit is put off, and one of the next that does is taken instead.
        """
        if not self.ids:
            raise ValueError("no texts: write some with `answers` first")
        draw = np.random.default_rng(seed)
        queue: list[int] = []
        while True:
            rows = Packed(*(np.zeros((size, length), kind) for kind in (np.int32, np.int32, bool)))
            for row in range(size):
                at, segment = 0, 0
                while True:
                    if len(queue) < _LOOK_AHEAD:
                        queue = draw.permutation(len(self.ids)).tolist() + queue
                    near = range(len(queue) - 1, max(len(queue) - 1 - _LOOK_AHEAD, -1), -1)
                    fits = (i for i in near if min(len(self.ids[queue[i]]), length) <= length - at)
                    found = next(fits, None)
                    if found is None or segment == len(self.ids):
                        break
                    text = queue.pop(found)
                    ids, segment = self.ids[text][:length], segment + 1
                    place = slice(at, at + len(ids))
                    rows.tokens[row, place], rows.segments[row, place] = ids, segment
                    rows.learn[row, at + self.prompt_lens[text] : at + len(ids)] = True
                    at += len(ids)
            yield rows


class Packed(NamedTuple):
    """Texts behind each other, [size, length] each."""

    tokens: np.ndarray  # i32
    segments: np.ndarray  # i32, 1 and on for the texts of a row, 0 behind the last
    learn: np.ndarray  # bool, tokens that a draft should have predicted: the answers'
