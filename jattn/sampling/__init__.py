"""From logits to tokens, for greedy and random requests in one batch. One rule serves decoding and verification.

The token at sequence index t of a request depends on its logits, its parameters and coins made from (seed, t) alone.
A draft is accepted iff it equals that token, so speculation changes neither the distribution nor the text of a seed:
the draft is deterministic, so it is accepted with the target's probability, which is what rejection sampling gives
(arXiv:2211.17192). Two ways to accept more drafts give that equality of text up: thresholds below 1, which move the
distribution towards the drafts, and rejection sampling with a draft model's probabilities, which does not.
"""

from jattn.sampling.choose import Chosen, Logprobs, next_tokens
from jattn.sampling.distribution import greedy, token_probs
from jattn.sampling.draw import sample
from jattn.sampling.params import TEMPERATURES, SamplerConfig, SamplingParams

__all__ = [
    "TEMPERATURES",
    "Chosen",
    "Logprobs",
    "SamplerConfig",
    "SamplingParams",
    "greedy",
    "next_tokens",
    "sample",
    "token_probs",
]
