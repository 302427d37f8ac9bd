"""Drafts from the request's own text: find the newest earlier place that ends like the text does, and copy on.

Runs on the device, inside the round, over the request's token buffer. Source: prompt lookup decoding (2023), here with
the longest match up to MAX_MATCH tokens and with wrap-around, so that a text that repeats is continued past its end.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jattn.combinators.draft import draft

MAX_MATCH = 4  # longer matches count as this long
NUM_CLASSES = MAX_MATCH + 1  # match lengths 0 .. MAX_MATCH


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """Where the next draft token is read from."""

    tokens: jax.Array  # i32[seqs, max_context]
    start: jax.Array  # i32[seqs], first token after the match
    end: jax.Array  # i32[seqs], number of known tokens
    at: jax.Array  # i32[seqs], next token to copy


def find(tokens: jax.Array, num_known: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Longest match of each request's last tokens at an earlier place; of equals, the newest.

    Args: tokens: i32[seqs, max_context]. num_known: i32[seqs], tokens in use.
    Returns: start i32[seqs], index after the match; length i32[seqs], matched tokens, 0 to MAX_MATCH.

    >>> start, length = find(jnp.array([[5, 6, 7, 9, 5, 6, 0, 0]]), jnp.array([6]))
    >>> start.tolist(), length.tolist()
    ([2], [2])
    """
    width = tokens.shape[1]
    ends = jnp.arange(width, dtype=jnp.int32)[None, :]  # candidate: the match ends at this index
    matched = jnp.zeros(tokens.shape, jnp.int32)
    alive = ends < num_known[:, None] - 1
    for back in range(MAX_MATCH):
        last = jnp.take_along_axis(tokens, num_known[:, None] - 1 - back, axis=1, mode="clip")
        shifted = jnp.pad(tokens, ((0, 0), (back, 0)), constant_values=-1)[:, :width]
        alive &= shifted == last  # what lies before the text is -1, which no token is
        matched += alive.astype(jnp.int32)
    score = jnp.where(matched > 0, matched * width + ends, -1)
    best = jnp.argmax(score, axis=1).astype(jnp.int32)
    length = jnp.take_along_axis(matched, best[:, None], axis=1)[:, 0]
    return best + 1, length


def ngram_draft(tokens: jax.Array, num_known: jax.Array, *, num_steps: int) -> tuple[jax.Array, jax.Array]:
    """Draft tokens i32[seqs, num_steps] and match length i32[seqs]; with length 0 the drafts mean nothing."""
    start, length = find(tokens, num_known)

    def step(pointer: Pointer) -> tuple[Pointer, jax.Array]:
        token = jnp.take_along_axis(pointer.tokens, pointer.at[:, None], axis=1, mode="clip")[:, 0]
        at = jnp.where(pointer.at + 1 < pointer.end, pointer.at + 1, pointer.start)
        return dataclasses.replace(pointer, at=at), token

    pointer = Pointer(tokens=tokens, start=start, end=num_known, at=start)
    return draft(step, pointer, num_steps=num_steps)[1], length
