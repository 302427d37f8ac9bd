"""Which experts a token uses, and how much of each. Sources: arXiv:2405.04434, section 2.2; arXiv:2412.19437, 2.1.2."""

import jax
import jax.numpy as jnp

from jattn.models.config import ExpertsConfig

_TINY = 1e-20  # what DeepSeek's code adds to a sum of shares before it divides by it


def route(logits: jax.Array, score_bias: jax.Array | None, options: ExpertsConfig) -> tuple[jax.Array, jax.Array]:
    """Experts of each token and their shares.

    Args: logits: f32[rows, num_experts]. score_bias: f32[num_experts], counted in the choice and not in the shares.
    Returns: i32[rows, top_k] and f32[rows, top_k]; of equal scores the lower index wins.

    >>> options = ExpertsConfig(num_experts=4, top_k=2, scoring="sigmoid", num_groups=2, top_groups=1)
    >>> chosen, shares = route(jnp.array([[9.0, 0.0, 8.0, 8.5]]), None, options)
    >>> chosen.tolist(), [round(float(share), 3) for share in shares[0]]
    ([[0, 1]], [0.667, 0.333])
    """
    scores = jax.nn.softmax(logits, axis=-1) if options.scoring == "softmax" else jax.nn.sigmoid(logits)
    ranked = scores if score_bias is None else scores + score_bias[None, :]
    if options.top_groups < options.num_groups:
        ranked = jnp.where(_in_best_groups(ranked, options), ranked, -jnp.inf)
    chosen = jax.lax.top_k(ranked, options.top_k)[1]
    shares = jnp.take_along_axis(scores, chosen, axis=-1)
    if options.norm_topk:
        shares = shares / (jnp.sum(shares, axis=-1, keepdims=True) + _TINY)
    return chosen, shares * options.routed_scale


def _in_best_groups(ranked: jax.Array, options: ExpertsConfig) -> jax.Array:
    # bool[rows, num_experts]
    rows, size = ranked.shape[0], options.num_experts // options.num_groups
    counted = 1 if options.group_score == "max" else min(2, size)
    best = jax.lax.top_k(ranked.reshape(rows, options.num_groups, size), counted)[0]
    groups = jax.lax.top_k(jnp.sum(best, axis=-1), options.top_groups)[1]
    kept = jnp.any(groups[:, :, None] == jnp.arange(options.num_groups)[None, None, :], axis=1)
    return jnp.repeat(kept, size, axis=1)
