"""From logits to a token, for greedy and random requests in one batch. One rule serves decoding and verification.

The token at sequence index t of a request depends on its logits, its parameters and a coin made from (seed, t) alone.
A draft is accepted iff it equals that token, so speculation changes neither the distribution nor the text of a seed:
the draft is deterministic, so it is accepted with the target's probability, which is what rejection sampling gives
(arXiv:2211.17192).
"""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of each request, or of each row after `at`."""

    temperature: jax.Array  # f32[n]; 0 is greedy
    top_k: jax.Array  # i32[n]; 0 is off
    top_p: jax.Array  # f32[n]; 1 is off
    min_p: jax.Array  # f32[n]; 0 is off
    seed: jax.Array  # u32[n]

    @classmethod
    def greedy(cls, n: int) -> "SamplingParams":
        """Parameters of n greedy requests."""
        return cls(
            temperature=jnp.zeros(n, jnp.float32),
            top_k=jnp.zeros(n, jnp.int32),
            top_p=jnp.ones(n, jnp.float32),
            min_p=jnp.zeros(n, jnp.float32),
            seed=jnp.zeros(n, jnp.uint32),
        )

    def at(self, idx: jax.Array) -> "SamplingParams":
        """The parameters of the requests that own rows `idx`, i32[rows]."""
        return jax.tree.map(lambda x: x[idx], self)


def greedy(logits: jax.Array, vocab_size: int | None = None) -> jax.Array:
    """First maximum of each row; columns past `vocab_size` never win. f32[rows, width] -> i32[rows].

    >>> greedy(jnp.array([[1.0, 3.0, 3.0], [-0.0, 0.0, -1.0]])).tolist()
    [1, 0]
    """
    return jnp.argmax(_within(logits, vocab_size), axis=-1).astype(jnp.int32)


def token_probs(logits: jax.Array, params: SamplingParams, vocab_size: int | None = None) -> jax.Array:
    """Distribution that each row is drawn from, f32[rows, width].

    Order: temperature; top_k; top_p on what is left, the smallest leading set reaching it, at least one token; min_p
    times the largest probability. Equal probabilities rank by token id. Temperature 0, or top_k 1: all mass on the
    first maximum.
    """
    logits = _within(logits, vocab_size)
    one_hot = jax.nn.one_hot(greedy(logits), logits.shape[-1], dtype=jnp.float32)
    is_greedy = _is_greedy(params)
    # the maximum moves to 0 first, so that a tiny temperature sends the others to -inf and nothing to inf - inf
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    probs = jax.nn.softmax(logits / jnp.where(is_greedy, 1.0, params.temperature)[:, None], axis=-1)
    filtered = ((params.top_k > 0) | (params.top_p < 1) | (params.min_p > 0)) & ~is_greedy

    def filter_some(probs):  # the others keep their bits, so that no row depends on its neighbours
        return jnp.where(filtered[:, None], _filter(probs, params), probs)

    probs = jax.lax.cond(jnp.any(filtered), filter_some, lambda probs: probs, probs)
    return jnp.where(is_greedy[:, None], one_hot, probs)


def sample(logits: jax.Array, params: SamplingParams, positions: jax.Array, vocab_size: int | None = None) -> jax.Array:
    """Token of each row. positions: i32[rows], sequence index that the token will have. Returns i32[rows]."""

    def draw(logits):
        probs = token_probs(logits, params, vocab_size)
        return _pick(probs, jax.vmap(_coin)(params.seed, positions))

    return jax.lax.cond(jnp.all(_is_greedy(params)), lambda x: greedy(x, vocab_size), draw, logits)


def _is_greedy(params: SamplingParams) -> jax.Array:
    # a subnormal temperature divides as 0 where they are flushed
    return (params.temperature < jnp.finfo(jnp.float32).tiny) | (params.top_k == 1)


def _pick(probs: jax.Array, coins: jax.Array) -> jax.Array:
    """First token whose cumulative mass passes `coins`, f32[rows] in [0, 1), of the total. i32[rows].

    A float32 prefix sum may rise or dip by an ulp over tokens without mass, so those are passed over by name.
    """
    cdf = jnp.cumsum(probs, axis=-1)
    ids = jnp.arange(probs.shape[-1], dtype=jnp.int32)[None, :]
    has_mass = probs > 0
    last = jnp.max(jnp.where(has_mass, ids, 0), axis=-1, keepdims=True)  # rounding may leave the coin past it
    return jnp.min(jnp.where(has_mass & (cdf > coins[:, None] * cdf[:, -1:]), ids, last), axis=-1)


def next_tokens(logits: jax.Array, params: SamplingParams, positions: jax.Array, *, sampled: bool) -> jax.Array:
    """`sample`, or `greedy` alone where it is known while tracing that no request is random."""
    return sample(logits, params, positions) if sampled else greedy(logits)


def _coin(seed: jax.Array, position: jax.Array) -> jax.Array:
    return jax.random.uniform(jax.random.fold_in(jax.random.key(seed), position), (), jnp.float32)


def _within(logits: jax.Array, vocab_size: int | None) -> jax.Array:
    if vocab_size is None or vocab_size == logits.shape[-1]:
        return logits
    return jnp.where(jnp.arange(logits.shape[-1])[None, :] < vocab_size, logits, -jnp.inf)


def _filter(probs: jax.Array, params: SamplingParams) -> jax.Array:
    width = probs.shape[-1]
    top_k = jnp.where(params.top_k > 0, params.top_k, width).astype(jnp.float32)
    probs = _normalise(jnp.where(_leading(probs, jnp.ones_like(probs), top_k), probs, 0.0))
    top_p = jnp.where(params.top_p < 1, params.top_p, 2.0)  # 2: more than the whole mass, so off
    probs = _normalise(jnp.where(_leading(probs, probs, top_p), probs, 0.0))
    floor = params.min_p[:, None] * jnp.max(probs, axis=-1, keepdims=True)
    return _normalise(jnp.where(probs >= floor, probs, 0.0))


def _normalise(probs: jax.Array) -> jax.Array:
    return probs / jnp.sum(probs, axis=-1, keepdims=True)


def _leading(probs: jax.Array, amount: jax.Array, target: jax.Array) -> jax.Array:
    """bool[rows, width]: in order of falling probability (ties by id), keep while the amount before is below target.

    A bisection over the bits of the threshold, exact: 30 sums over a row, where sorting 49152 pairs takes milliseconds.
    """
    bits = jax.lax.bitcast_convert_type(probs, jnp.int32)  # monotone for values >= 0
    target = jnp.maximum(target, jnp.finfo(jnp.float32).tiny)  # top_p 0 still keeps one

    def halve(_, bounds):
        low, high = bounds  # the amount at or above `low` reaches the target; above `high` it does not
        middle = (low + high) // 2
        reached = jnp.sum(jnp.where(bits >= middle[:, None], amount, 0.0), axis=-1) >= target
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle)

    rows = probs.shape[0]
    low, _ = jax.lax.fori_loop(0, 30, halve, (jnp.zeros(rows, jnp.int32), jnp.full(rows, 1 << 30, jnp.int32)))
    above, equal = bits > low[:, None], bits == low[:, None]
    tied = jnp.where(equal, amount, 0.0)
    before = jnp.sum(jnp.where(above, amount, 0.0), axis=-1, keepdims=True) + jnp.cumsum(tied, axis=-1) - tied
    return above | (equal & (before < target[:, None]))
