"""What a user asks for, checked before anything is queued."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from jattn.sampling import SamplerConfig, SamplingParams

MAX_BIAS = 100.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and how to continue it.

    Args: prompt_ids: at least one token. max_new_tokens: at least 1. temperature: 0 is greedy. top_k: 0 is off.
      top_p: (0, 1]. min_p: [0, 1). seed: any integer, taken modulo 2**32. stop_ids: tokens that end the text, kept in
      the output ids.
      repetition_penalty: (0, 2], of tokens in prompt and answer, 1 is off. presence_penalty, frequency_penalty:
      [-2, 2], of tokens in the answer, 0 is off. logit_bias: token -> what its logit gains, [-100, 100].
      accept_threshold_single, accept_threshold_acc: [0, 1]; below 1 random requests accept more drafts than the
      target's distribution allows (`jattn.sampling.accept`).
    Raises: ValueError with the value and the rule.
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    accept_threshold_single: float = 1.0
    accept_threshold_acc: float = 1.0
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
        if not 0 < self.repetition_penalty <= 2:
            raise ValueError(f"repetition_penalty={self.repetition_penalty}: want more than 0 and at most 2 (1 is off)")
        for field in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, field) <= 2:
                raise ValueError(f"{field}={getattr(self, field)}: want -2 to 2 (0 is off)")
        for token, value in self.logit_bias.items():
            if not -MAX_BIAS <= value <= MAX_BIAS:
                raise ValueError(f"logit_bias of token {token} is {value}: want {-MAX_BIAS:g} to {MAX_BIAS:g}")
        for field in ("accept_threshold_single", "accept_threshold_acc"):
            if not 0 <= getattr(self, field) <= 1:
                raise ValueError(f"{field}={getattr(self, field)}: want 0 to 1 (1 keeps the target's distribution)")

    @property
    def needs(self) -> SamplerConfig:
        """What a program must hold for this request."""
        random = self.temperature > 0
        return SamplerConfig(
            random=random,
            thresholds=random and min(self.accept_threshold_single, self.accept_threshold_acc) < 1,
            penalties=self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0,
            num_biases=len(self.logit_bias),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Natural log-probability of a token, of the logits as the model gave them, and of the likeliest tokens there."""

    logprob: float
    top: list[tuple[int, float]]  # (token, log-probability), likeliest first


def check_offered(request: Request, sampler: SamplerConfig, vocab_size: int) -> None:
    """Refuse a request that the programs of `sampler` cannot serve; ValueError names the first reason."""
    needs = request.needs
    if needs.random and not sampler.random:
        raise ValueError(f"temperature={request.temperature}: this engine was built with SamplerConfig(random=False)")
    if needs.thresholds and not sampler.thresholds:
        raise ValueError(
            f"accept_threshold_single={request.accept_threshold_single}, accept_threshold_acc="
            f"{request.accept_threshold_acc}: this engine was built with SamplerConfig(thresholds=False)"
        )
    if needs.penalties and not sampler.penalties:
        raise ValueError("a penalty is set: this engine was built with SamplerConfig(penalties=False)")
    if needs.num_biases > sampler.num_biases:
        raise ValueError(
            f"{needs.num_biases} logit biases: this engine was built with SamplerConfig(num_biases="
            f"{sampler.num_biases})"
        )
    for token in request.logit_bias:
        if not 0 <= token < vocab_size:
            raise ValueError(f"logit_bias of token {token}: this model's ids are 0 to {vocab_size - 1}")


def params_of(request: Request, *, num_biases: int) -> SamplingParams:
    """The sampling parameters of one request, as NumPy scalars and arrays i32[num_biases], f32[num_biases]."""
    ids, values = np.full(num_biases, -1, np.int32), np.zeros(num_biases, np.float32)
    ids[: len(request.logit_bias)] = list(request.logit_bias)
    values[: len(request.logit_bias)] = list(request.logit_bias.values())
    fields = {
        name: np.float32(getattr(request, name))
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "accept_threshold_single",
            "accept_threshold_acc",
        )
    }
    arrays: dict = dict(
        fields,
        top_k=np.int32(min(request.top_k, np.iinfo(np.int32).max)),
        seed=np.uint32(request.seed % 2**32),
        bias_ids=ids,
        bias_values=values,
    )
    return SamplingParams(**arrays)


def check_ids(prompt_ids: Sequence[int], vocab_size: int) -> None:
    """Refuse ids that the model has no embedding for; ValueError names the first."""
    for at, token in enumerate(prompt_ids):
        if not 0 <= token < vocab_size:
            raise ValueError(f"prompt id {token} at index {at}: this model's ids are 0 to {vocab_size - 1}")
