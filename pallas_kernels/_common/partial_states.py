"""Partial states of attention, [parts, ...]: what they are where nothing is seen, and those that nobody makes.

(0, -inf) is the neutral state: merged with another, it leaves that one as it is.
"""

import math

import jax
import jax.numpy as jnp


def nothing(rows: tuple[int, ...], v_dim: int, dtype, num_splits: int = 1) -> tuple[jax.Array, jax.Array]:
    """Neutral out [rows..., v_dim] and lse f32[rows...]; with num_splits > 1, f32 [num_splits, ...] of each."""
    lead, dtype = ((num_splits,), jnp.float32) if num_splits > 1 else ((), dtype)
    return jnp.zeros((*lead, *rows, v_dim), dtype), jnp.full((*lead, *rows), -jnp.inf, jnp.float32)


def in_parts(out: jax.Array, lse: jax.Array, num_splits: int) -> tuple[jax.Array, jax.Array]:
    """What a caller who asked for `num_splits` parts gets of a kernel that cuts keys itself.

    Args: out: [tokens, heads, v_dim], f32 if there are several parts. lse: f32[tokens, heads].
    Returns: both as they are for one part; else [num_splits, ...], everything in the first part, the others neutral.
    """
    if num_splits == 1:
        return out, lse
    more = [(0, num_splits - 1)]
    return jnp.pad(out[None], more + [(0, 0)] * 3), jnp.pad(lse[None], more + [(0, 0)] * 2, constant_values=-jnp.inf)


def flat(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Parts [splits, ..., v_dim] and f32[splits, ...] as [splits, rows, v_dim] and f32[splits, rows].

    Raises: ValueError if the shapes disagree.
    """
    check(out, lse)
    splits, rows = out.shape[0], math.prod(out.shape[1:-1])
    return out.reshape(splits, rows, out.shape[-1]), lse.astype(jnp.float32).reshape(splits, rows)


def check(out: jax.Array, lse: jax.Array) -> None:
    """Raise ValueError if these are no parts [splits, ..., v_dim] and their log-sums [splits, ...]."""
    if out.shape[:-1] != lse.shape:
        raise ValueError(f"out.shape={out.shape} but lse.shape={lse.shape}: want out to have one more axis, v_dim")
