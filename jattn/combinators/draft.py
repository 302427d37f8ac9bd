"""Drafting as a scan: a step function over one carried record. Any drafter is a step. And what a drafter is fed."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def draft[State](
    step: Callable[[State], tuple[State, jax.Array]], state: State, *, num_steps: int
) -> tuple[State, jax.Array]:
    """Run `step` num_steps times. step: state -> (state, tokens i32[seqs]). Returns the state and i32[seqs, num_steps].

    >>> draft(lambda n: (n + 1, n * 10), jnp.array([1, 5]), num_steps=3)[1].tolist()
    [[10, 20, 30], [50, 60, 70]]
    """
    state, tokens = jax.lax.scan(lambda carry, _: step(carry), state, length=num_steps)
    return state, tokens.T


def draft_inputs(tokens: jax.Array, cu_q_lens: jax.Array, new_tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Tokens of a drafter that reads the target's hidden states: row i pairs hidden state i with the token after it.

    Args: tokens: i32[rows], packed, what the target has read. cu_q_lens: i32[seqs + 1], first entry 0. new_tokens:
      i32[seqs], the target's token after each request's last row.
    Returns: i32[rows], each request's tokens moved one to the left with its new token at the end, padding rows as they
      were; and i32[seqs], the last row of each request, from which drafting goes on (-1 for a request without rows).
    Source: arXiv:2401.15077 (the token sequence is one step ahead of the features).

    >>> ids, last = draft_inputs(jnp.array([11, 21, 22]), jnp.array([0, 1, 3]), jnp.array([12, 23]))
    >>> ids.tolist(), last.tolist()
    ([12, 22, 23], [0, 2])
    """
    rows = tokens.shape[0]
    last = jnp.where(cu_q_lens[1:] > cu_q_lens[:-1], cu_q_lens[1:] - 1, -1)
    used = jnp.arange(rows, dtype=cu_q_lens.dtype) < cu_q_lens[-1]
    ids = jnp.where(used, jnp.roll(tokens, -1), tokens)
    return ids.at[jnp.where(last >= 0, last, rows)].set(new_tokens, mode="drop"), last
