"""Logits moved by what a request has said already, and by biases of its own."""

import dataclasses

import jax
import jax.numpy as jnp

from jattn.sampling.params import SamplingParams


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Which tokens are behind each request, or behind each row after `at`."""

    in_prompt: jax.Array  # bool[n, vocab]
    generated: jax.Array  # i32[n, vocab], how often

    @classmethod
    def of(cls, tokens: jax.Array, num_known: jax.Array, generated_from: jax.Array, vocab_size: int) -> "History":
        """Count tokens[b, : num_known[b]], i32[n, max_context]; those from index generated_from[b] on are generated.

        >>> history = History.of(jnp.array([[3, 1, 1, 2]]), jnp.array([3]), jnp.array([1]), 4)
        >>> history.in_prompt.tolist(), history.generated.tolist()
        ([[False, False, False, True]], [[0, 2, 0, 0]])
        """
        idx = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        is_generated = idx >= generated_from[:, None]
        ids = jnp.where(idx < num_known[:, None], tokens, vocab_size)
        rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
        shape = (tokens.shape[0], vocab_size)
        return cls(
            in_prompt=jnp.zeros(shape, bool).at[rows, jnp.where(is_generated, vocab_size, ids)].set(True, mode="drop"),
            generated=jnp.zeros(shape, jnp.int32)
            .at[rows, jnp.where(is_generated, ids, vocab_size)]
            .add(1, mode="drop"),
        )

    def at(self, idx: jax.Array, path: jax.Array | None) -> "History":
        """Of rows, i32[rows] the request of each; path i32[rows, n], -1 unused: drafts above it, which count, too."""
        generated = self.generated[idx]
        if path is not None:
            rows = jnp.arange(idx.shape[0], dtype=jnp.int32)[:, None]
            columns = jnp.where(path >= 0, path, generated.shape[1])
            generated = generated.at[rows, columns].add(1, mode="drop")
        return History(in_prompt=self.in_prompt[idx], generated=generated)


def penalised(logits: jax.Array, params: SamplingParams, history: History) -> jax.Array:
    """Logits f32[rows, vocab] after the penalties.

    repetition_penalty r divides positive logits of tokens in the prompt or generated, and multiplies negative ones
    (arXiv:1909.05858, section 4.1). Then each generated token loses frequency_penalty times its count, and
    presence_penalty once.
    """
    count = history.generated
    factor = params.repetition_penalty[:, None]
    scaled = jnp.where(logits > 0, logits / factor, logits * factor)
    # a factor of 1 keeps every bit
    logits = jnp.where((history.in_prompt | (count > 0)) & (factor != 1), scaled, logits)
    off = params.frequency_penalty[:, None] * count.astype(jnp.float32) + jnp.where(
        count > 0, params.presence_penalty[:, None], 0.0
    )
    return logits - off


def biased(logits: jax.Array, params: SamplingParams) -> jax.Array:
    """Logits f32[rows, vocab] with each row's biases added."""
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    columns = jnp.where(params.bias_ids >= 0, params.bias_ids, logits.shape[1])
    return logits.at[rows, columns].add(params.bias_values, mode="drop")
