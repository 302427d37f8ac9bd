"""What a user asks for, checked before anything is queued."""

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and how to continue it.

    Args: prompt_ids: at least one token. max_new_tokens: at least 1. temperature: 0 is greedy. top_k: 0 is off.
      top_p: (0, 1]. min_p: [0, 1). seed: any integer, taken modulo 2**32. stop_ids: tokens that end the text, kept in
      the output ids.
    Raises: ValueError with the value and the rule.
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self):
        if len(self.prompt_ids) == 0:
            raise ValueError("the prompt is empty: give at least one token")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}: want at least 1")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature={self.temperature}: want a finite number >= 0 (0 is greedy)")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}: want at least 1, or 0 for off")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: want more than 0 and at most 1 (1 is off)")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min_p={self.min_p}: want at least 0 (off) and less than 1")


def check_ids(prompt_ids: Sequence[int], vocab_size: int) -> None:
    """Refuse ids that the model has no embedding for; ValueError names the first."""
    for at, token in enumerate(prompt_ids):
        if not 0 <= token < vocab_size:
            raise ValueError(f"prompt id {token} at index {at}: this model's ids are 0 to {vocab_size - 1}")
