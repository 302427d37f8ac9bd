"""From verified rows to tokens kept: the accepted chain, then stop tokens and limits, exact within the chain."""

import jax
import jax.numpy as jnp

from jattn.combinators.state import Status


def accepted_lens(drafts: jax.Array, num_drafts: jax.Array, targets: jax.Array) -> jax.Array:
    """How many leading drafts the target agrees with. i32[seqs].

    Args: drafts: i32[seqs, steps]. num_drafts: i32[seqs], rows verified. targets: i32[seqs, steps + 1], the target's
      token after row i (row 0 is the newest known token, row i draft i - 1).

    >>> accepted_lens(jnp.array([[7, 8, 9]]), jnp.array([3]), jnp.array([[7, 8, 1, 0]])).tolist()
    [2]
    """
    steps = drafts.shape[1]
    tried = jnp.arange(steps, dtype=jnp.int32)[None, :] < num_drafts[:, None]
    agrees = (drafts == targets[:, :steps]) & tried
    return jnp.sum(jnp.cumprod(agrees.astype(jnp.int32), axis=1), axis=1).astype(jnp.int32)


def finish(
    new: jax.Array, counts: jax.Array, num_known: jax.Array, limits: jax.Array, stop_ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Cut accepted tokens at the first stop token or at the length limit, as if they had come one by one.

    Args: new: i32[seqs, n]. counts: i32[seqs], tokens offered. num_known: i32[seqs], tokens before. limits: i32[seqs].
      stop_ids: i32[seqs, stops], -1 unused.
    Returns: counts i32[seqs] kept, the stop token included; status i32[seqs], DECODE, STOPPED or LENGTH.
      A stop token that is also the last allowed one counts as STOPPED.

    >>> kept, status = finish(jnp.array([[5, 2, 6]]), jnp.array([3]), jnp.array([4]), jnp.array([20]), jnp.array([[2]]))
    >>> kept.tolist(), Status(int(status[0])).name
    ([2], 'STOPPED')
    """
    width = new.shape[1]
    idx = jnp.arange(width, dtype=jnp.int32)[None, :]
    room = jnp.maximum(limits - num_known, 0)
    counts = jnp.minimum(counts, room)
    is_stop = jnp.any((new[:, :, None] == stop_ids[:, None, :]) & (stop_ids[:, None, :] >= 0), axis=-1)
    is_stop &= idx < counts[:, None]
    first = jnp.min(jnp.where(is_stop, idx, width), axis=1)
    stopped = first < width
    counts = jnp.where(stopped, first + 1, counts).astype(jnp.int32)
    full = num_known + counts >= limits
    status = jnp.where(stopped, Status.STOPPED, jnp.where(full, Status.LENGTH, Status.DECODE))
    return counts, status.astype(jnp.int32)


def append(tokens: jax.Array, at: jax.Array, new: jax.Array, counts: jax.Array) -> jax.Array:
    """Write `counts` new tokens of each request behind index `at`. i32[seqs, max_context]; nothing else changes."""
    width = new.shape[1]
    idx = jnp.arange(width, dtype=jnp.int32)[None, :]
    columns = jnp.where(idx < counts[:, None], at[:, None] + idx, tokens.shape[1])
    rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
    return tokens.at[rows, columns].set(new, mode="drop")
