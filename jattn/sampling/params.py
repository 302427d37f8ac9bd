"""How a request samples, as arrays; and which parts of sampling a program holds, as static facts."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplerConfig:
    """What a compiled program can do beyond taking the likeliest token. What is left out costs nothing.

    Args:
      random: some request has a temperature. thresholds: some request accepts drafts by thresholds below 1.
      rejection: chains of a draft model are sampled from it, and accepted by rejection sampling.
      penalties: some request has a repetition, presence or frequency penalty.
      num_biases: logit biases that a request may have.
      num_logprobs: None reports no log-probabilities; n reports the token's own and those of the n likeliest.
    Raises: ValueError for thresholds or rejection without randomness, or for both.
    """

    random: bool = True
    thresholds: bool = False
    rejection: bool = False
    penalties: bool = False
    num_biases: int = 0
    num_logprobs: int | None = None

    def __post_init__(self):
        if self.thresholds and self.rejection:
            raise ValueError(
                "accept thresholds below 1 and rejection sampling are two rules for one draft: want one of them"
            )
        if self.rejection and not self.random:
            raise ValueError("rejection sampling with random=False: greedy requests need no draft probabilities")


TEMPERATURES = SamplerConfig()
"""Greedy and random requests, and nothing more."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of each request, or of each row after `at`. Shapes for n requests; without n, of one."""

    temperature: jax.Array  # f32[n]; 0 is greedy
    top_k: jax.Array  # i32[n]; 0 is off
    top_p: jax.Array  # f32[n]; 1 is off
    min_p: jax.Array  # f32[n]; 0 is off
    repetition_penalty: jax.Array  # f32[n]; 1 is off
    presence_penalty: jax.Array  # f32[n]; 0 is off
    frequency_penalty: jax.Array  # f32[n]; 0 is off
    accept_threshold_single: jax.Array  # f32[n]; 1 is lossless
    accept_threshold_acc: jax.Array  # f32[n]; 1 is lossless
    seed: jax.Array  # u32[n]
    bias_ids: jax.Array  # i32[n, num_biases], -1 unused
    bias_values: jax.Array  # f32[n, num_biases]

    @classmethod
    def greedy(cls, n: int, *, num_biases: int = 0) -> "SamplingParams":
        """Parameters of n greedy requests."""

        def floats(value: float) -> jax.Array:
            return jnp.full(n, value, jnp.float32)

        return cls(
            temperature=floats(0),
            top_k=jnp.zeros(n, jnp.int32),
            top_p=floats(1),
            min_p=floats(0),
            repetition_penalty=floats(1),
            presence_penalty=floats(0),
            frequency_penalty=floats(0),
            accept_threshold_single=floats(1),
            accept_threshold_acc=floats(1),
            seed=jnp.zeros(n, jnp.uint32),
            bias_ids=jnp.full((n, num_biases), -1, jnp.int32),
            bias_values=jnp.zeros((n, num_biases), jnp.float32),
        )

    def at(self, idx: jax.Array) -> "SamplingParams":
        """The parameters of the requests that own rows `idx`, i32[rows]."""
        return jax.tree.map(lambda x: x[idx], self)

    @property
    def is_greedy(self) -> jax.Array:
        """bool[n]: requests whose every token is the likeliest one."""
        # a subnormal temperature divides as 0 where they are flushed
        return (self.temperature < jnp.finfo(jnp.float32).tiny) | (self.top_k == 1)

    @property
    def is_lossy(self) -> jax.Array:
        """bool[n]: requests that accept drafts by thresholds below 1."""
        return ((self.accept_threshold_single < 1) | (self.accept_threshold_acc < 1)) & ~self.is_greedy
