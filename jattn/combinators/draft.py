"""Drafting as a scan: a step function over one carried record. Any drafter is a step."""

from collections.abc import Callable

import jax


def draft[State](
    step: Callable[[State], tuple[State, jax.Array]], state: State, *, num_steps: int
) -> tuple[State, jax.Array]:
    """Run `step` num_steps times. step: state -> (state, tokens i32[seqs]). Returns the state and i32[seqs, num_steps].

    >>> import jax.numpy as jnp
    >>> draft(lambda n: (n + 1, n * 10), jnp.array([1, 5]), num_steps=3)[1].tolist()
    [[10, 20, 30], [50, 60, 70]]
    """
    state, tokens = jax.lax.scan(lambda carry, _: step(carry), state, length=num_steps)
    return state, tokens.T
