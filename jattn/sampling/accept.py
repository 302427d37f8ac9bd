"""Which of the drafts offered behind a row is taken, or which token comes in their place. Rows are independent."""

import jax
import jax.numpy as jnp

from jattn.sampling.draw import pick

_LEAST_THRESHOLD = 1e-9  # of accumulated mass, so that 0 accepts every draft with mass and divides by none


def accept_by_thresholds(
    probs: jax.Array,
    offered: jax.Array,
    *,
    coins: jax.Array,
    final_coins: jax.Array,
    threshold_single: jax.Array,
    threshold_acc: jax.Array,
) -> jax.Array:
    """Target-only sampling: the first draft whose accumulated mass passes the coin, or one that is likely enough.

    Args:
      probs: f32[rows, vocab], the target's distribution behind each row.
      offered: i32[rows, drafts], tokens of the row's children in order, -1 unused. A token named twice counts once.
      coins, final_coins: f32[rows] in [0, 1): for the drafts, and for the token that comes if none is taken.
      threshold_single, threshold_acc: f32[rows] in [0, 1]. A draft x with mass is taken when probs[x] >=
        threshold_single, or when the coin lies below the mass of the drafts up to x, divided by threshold_acc. At 1 and
        1 every token comes with exactly its probability.
    Returns: i32[rows], the draft, or a token drawn from what the drafts leave.

    >>> probs = jnp.array([[.5, .2, .3, 0.]])
    >>> one = dict(threshold_single=jnp.ones(1), threshold_acc=jnp.ones(1), final_coins=jnp.zeros(1))
    >>> [accept_by_thresholds(probs, jnp.array([[1, 2]]), coins=jnp.array([c]), **one).tolist() for c in (.1, .4, .6)]
    [[1], [2], [0]]
    """
    vocab, width = probs.shape[1], offered.shape[1]
    used = offered >= 0
    mass = jnp.where(used, jnp.take_along_axis(probs, jnp.maximum(offered, 0), axis=1), 0.0)
    earlier = jnp.tril(jnp.ones((width, width), bool), -1)[None]
    again = jnp.any((offered[:, :, None] == offered[:, None, :]) & earlier, axis=-1)
    mass = jnp.where(again, 0.0, mass)
    reached = coins[:, None] * jnp.maximum(threshold_acc, _LEAST_THRESHOLD)[:, None] < jnp.cumsum(mass, axis=1)
    taken = (mass > 0) & (reached | (mass >= threshold_single[:, None]))
    at = jnp.argmax(taken, axis=1)  # the first
    rows = jnp.arange(probs.shape[0], dtype=jnp.int32)[:, None]
    rest = probs.at[rows, jnp.where(used, offered, vocab)].set(0.0, mode="drop")
    rest = _or_all(rest, probs)
    accepted = jnp.take_along_axis(offered, at[:, None], axis=1)[:, 0]
    return jnp.where(jnp.any(taken, axis=1), accepted, pick(rest, final_coins))


def accept_by_rejection(
    probs: jax.Array, draft: jax.Array, draft_probs: jax.Array, *, coins: jax.Array, final_coins: jax.Array
) -> jax.Array:
    """Rejection sampling of one draft a row, itself drawn from `draft_probs`: exact, and likelier than any other rule.

    Args:
      probs, draft_probs: f32[rows, vocab], the target's distribution behind the row and the one that drew the draft.
      draft: i32[rows], -1 for none: the token then comes from `probs`.
      coins, final_coins: f32[rows] in [0, 1): accepted iff coin * q < p; else a token from the positive part of p - q.
    Returns: i32[rows]. Source: arXiv:2211.17192, algorithm 1.

    >>> p, q = jnp.array([[.5, .5, 0.]]), jnp.array([[1., 0., 0.]])
    >>> [accept_by_rejection(p, jnp.array([0]), q, coins=jnp.array([c]), final_coins=jnp.zeros(1)).tolist()
    ...  for c in (.4, .6)]
    [[0], [1]]
    """
    has_draft = draft >= 0
    at = jnp.maximum(draft, 0)[:, None]
    p, q = (jnp.take_along_axis(x, at, axis=1)[:, 0] for x in (probs, draft_probs))
    accepted = has_draft & (q > 0) & (coins * q < p)
    rest = _or_all(jnp.maximum(probs - draft_probs, 0.0), probs)
    rest = jnp.where(has_draft[:, None], rest, probs)
    return jnp.where(accepted, draft, pick(rest, final_coins))


def _or_all(rest: jax.Array, probs: jax.Array) -> jax.Array:
    # where the drafts left no mass a rejection is rounding's alone
    return jnp.where(jnp.sum(rest, axis=-1, keepdims=True) > 0, rest, probs)
