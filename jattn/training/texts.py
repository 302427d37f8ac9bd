"""Texts that a target has written, as token ids: kept in files, cut to one length, counted."""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np


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
                    ends = file["offsets"].tolist()
                    ids += [file["ids"][a:b].astype(np.int32) for a, b in zip(ends, ends[1:], strict=False)]
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

    def common(self, count: int, vocab_size: int) -> np.ndarray:
        """i32[count], ids of the tokens that answers have most often, in order of id; ties by id.

        >>> Texts([np.array([9, 5, 5, 7], np.int32)], [1]).common(2, 10).tolist()
        [5, 7]
        """
        if not 1 <= count <= vocab_size:
            raise ValueError(f"count={count} of {vocab_size} tokens: want 1 to all of them")
        seen = np.zeros(vocab_size, np.int64)
        for text, start in zip(self.ids, self.prompt_lens, strict=True):
            seen += np.bincount(text[start:], minlength=vocab_size)
        return np.sort(np.argsort(-seen, kind="stable")[:count]).astype(np.int32)

    def batches(self, size: int, length: int, *, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(tokens i32[size, length], learn bool[size, length]) without end, texts in a drawn order each time round.

        Longer texts are cut, shorter ones padded; what is learned are answers.
        """
        if not self.ids:
            raise ValueError("no texts: write some with `answers` first")
        draw = np.random.default_rng(seed)
        queue: list[int] = []
        while True:
            tokens, learn = np.zeros((size, length), np.int32), np.zeros((size, length), bool)
            for row in range(size):
                if not queue:
                    queue = draw.permutation(len(self.ids)).tolist()
                at = queue.pop()
                text = self.ids[at][:length]
                tokens[row, : len(text)] = text
                learn[row, self.prompt_lens[at] : len(text)] = True
            yield tokens, learn
