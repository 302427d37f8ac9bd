"""What chains of drafts would be accepted on a text that is known, without decoding it again."""

import numpy as np


def accepted_lens(right: np.ndarray, prompt_len: int, length: int) -> list[int]:
    """Tokens that each round of greedy decoding adds to a text, bonus included.

    The text is greedy, so a round that knows it up to token p takes its drafts of tokens p + 1 and on up to the first
    that differs, and the target's own token behind them.

    Args: right: bool[length, steps] of `Trainer.right`, row p - 1 holds the drafts behind token p. prompt_len, length:
      tokens of the prompt, and of the prompt with its answer.

    >>> right = np.array([[0, 0], [1, 0], [1, 1], [0, 0], [0, 0], [0, 0]], bool)
    >>> accepted_lens(right, prompt_len=2, length=6)
    [2, 1]
    """
    found, newest = [], prompt_len  # the prompt's own step has given the first new token
    while newest < length - 1:
        chain = right[newest - 1]
        kept = int(np.argmin(chain)) if not chain.all() else len(chain)
        found.append(min(kept + 1, length - 1 - newest))
        newest += found[-1]
    return found


def mean_accepted(right: list[np.ndarray], prompt_lens: list[int], lengths: list[int]) -> float:
    """Mean of `accepted_lens` over the rounds of several texts; 0.0 where there is none."""
    rounds = [n for args in zip(right, prompt_lens, lengths, strict=True) for n in accepted_lens(*args)]
    return float(np.mean(rounds)) if rounds else 0.0
