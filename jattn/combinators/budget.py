"""How many drafts are worth verifying: expected tokens over measured cost, decided on the device each round."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jattn.combinators.costs import Variant
from jattn.combinators.state import DraftState

# A draft is tried while its chance to be reached and right is at least this; 2 tries none, the last all that there are:
# where the shape has a row for each, they cost nothing.
_THRESHOLDS = (2.0, 0.8, 0.65, 0.5, 0.35, 0.25, 0.15, 0.08, 1e-6)
# Belief before any evidence, by match length, worth _PRIOR_WEIGHT tries. One matching token says little.
_PRIOR = (0.0, 0.25, 0.5, 0.7, 0.85)
_PRIOR_WEIGHT = 2.0
_DECAY = 0.95  # a round; old evidence fades, so that a request that starts to repeat is tried again


def accept_chance(draft: DraftState, match_len: jax.Array) -> jax.Array:
    """Chance that one more draft is right, f32[seqs], from the request's own record at this match length."""
    prior = jnp.asarray(_PRIOR, jnp.float32)[match_len]
    seen_right = jnp.take_along_axis(draft.accepted, match_len[:, None], axis=1)[:, 0]
    seen_wrong = jnp.take_along_axis(draft.rejected, match_len[:, None], axis=1)[:, 0]
    return (seen_right + prior * _PRIOR_WEIGHT) / (seen_right + seen_wrong + _PRIOR_WEIGHT)


def choose(
    chance: jax.Array, room: jax.Array, active: jax.Array, *, num_steps: int, shapes: tuple[Variant, ...]
) -> tuple[jax.Array, jax.Array]:
    """Drafts of each request, and the shape that runs them.

    Args: chance: f32[seqs]. room: i32[seqs], drafts that may be tried. active: bool[seqs].
    Returns: take i32[seqs]; index i32[] into `shapes`, len(shapes) when nobody is active.

    >>> from jattn.combinators.costs import variants
    >>> shapes = variants(num_seqs=1, num_steps=7, kind="cpu")
    >>> take, index = choose(jnp.array([0.95]), jnp.array([7]), jnp.array([True]), num_steps=7, shapes=shapes)
    >>> take.tolist(), int(index)
    ([7], 2)
    >>> take, index = choose(jnp.array([0.1]), jnp.array([7]), jnp.array([True]), num_steps=7, shapes=shapes)
    >>> take.tolist(), int(index)
    ([0], 0)
    """
    steps = jnp.arange(1, num_steps + 1, dtype=jnp.float32)
    return choose_by_reach(chance[:, None] ** steps[None, :], room, active, shapes=shapes)


def choose_by_reach(
    reach: jax.Array, room: jax.Array, active: jax.Array, *, shapes: tuple[Variant, ...]
) -> tuple[jax.Array, jax.Array]:
    """`choose` for drafts in any order of falling worth: reach f32[seqs, drafts] is the chance that each is kept.

    A tree's nodes come so too: a child is never likelier than its parent, so each leading part is a tree.
    """
    num_steps = reach.shape[1]
    thresholds = jnp.asarray(_THRESHOLDS, jnp.float32)
    wanted = jnp.sum(reach[None] >= thresholds[:, None, None], axis=-1).astype(jnp.int32)
    take = jnp.where(active[None], jnp.minimum(wanted, room[None]), 0)  # [thresholds, seqs]
    kept = jnp.where(jnp.arange(num_steps, dtype=jnp.int32)[None, None] < take[..., None], reach[None], 0.0)
    tokens = jnp.sum(active, dtype=jnp.float32) + jnp.sum(kept, axis=(1, 2))
    rows = jnp.sum(active, dtype=jnp.int32) + jnp.sum(take, axis=1)
    width = 1 + jnp.max(take, axis=1)
    costs = np.asarray([v.cost for v in shapes], np.float32)
    sizes = np.asarray([(v.rows, v.max_q_len) for v in shapes], np.int32)
    fits = (sizes[None, :, 0] >= rows[:, None]) & (sizes[None, :, 1] >= width[:, None])
    price = jnp.where(fits, costs[None], jnp.inf)  # [thresholds, shapes]
    best = jnp.argmax(tokens / jnp.min(price, axis=1))
    index = jnp.where(rows[best] > 0, jnp.argmin(price[best]), len(shapes)).astype(jnp.int32)
    return take[best], index


def record(draft: DraftState, match_len: jax.Array, tried: jax.Array, accepted: jax.Array) -> DraftState:
    """Note what a round taught: `accepted` rights, and one wrong where a tried draft failed. i32[seqs] each."""
    seqs = jnp.arange(match_len.shape[0])
    right = draft.accepted * _DECAY
    wrong = draft.rejected * _DECAY
    return dataclasses.replace(
        draft,
        accepted=right.at[seqs, match_len].add(accepted.astype(jnp.float32)),
        rejected=wrong.at[seqs, match_len].add((accepted < tried).astype(jnp.float32)),
    )
