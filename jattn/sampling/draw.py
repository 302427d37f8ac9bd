"""Coins of a request, and the tokens they pick."""

import enum

import jax
import jax.numpy as jnp

from jattn.sampling.distribution import greedy, token_probs
from jattn.sampling.params import SamplingParams


class Stream(enum.IntEnum):
    """What a coin decides. Coins of one seed and index are independent between streams."""

    TOKEN = 0  # which token comes
    ACCEPT = 1  # whether a draft is accepted
    DRAFT = 2  # what a draft model proposes


def sample(logits: jax.Array, params: SamplingParams, positions: jax.Array, vocab_size: int | None = None) -> jax.Array:
    """Token of each row. positions: i32[rows], sequence index that the token will have. Returns i32[rows]."""

    def draw(logits):
        return pick(token_probs(logits, params, vocab_size), coins(params.seed, positions))

    return jax.lax.cond(jnp.all(params.is_greedy), lambda x: greedy(x, vocab_size), draw, logits)


def coins(seeds: jax.Array, positions: jax.Array, stream: Stream = Stream.TOKEN) -> jax.Array:
    """f32[rows] in [0, 1), from u32[rows] and i32[rows] alone."""

    def coin(seed, position):
        key = jax.random.fold_in(jax.random.key(seed), position)
        key = key if stream == Stream.TOKEN else jax.random.fold_in(key, int(stream))
        return jax.random.uniform(key, (), jnp.float32)

    return jax.vmap(coin)(seeds, positions)


def pick(probs: jax.Array, coins: jax.Array) -> jax.Array:
    """First token whose cumulative mass passes `coins`, f32[rows] in [0, 1), of the total. i32[rows].

    A float32 prefix sum may rise or dip by an ulp over tokens without mass, so those are passed over by name.
    """
    cdf = jnp.cumsum(probs, axis=-1)
    ids = jnp.arange(probs.shape[-1], dtype=jnp.int32)[None, :]
    has_mass = probs > 0
    last = jnp.max(jnp.where(has_mass, ids, 0), axis=-1, keepdims=True)  # rounding may leave the coin past it
    return jnp.min(jnp.where(has_mass & (cdf > coins[:, None] * cdf[:, -1:]), ids, last), axis=-1)
