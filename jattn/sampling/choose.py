"""The token behind each row, by whatever a program's requests ask for, and its log-probability."""

import dataclasses

import jax
import jax.numpy as jnp

from jattn.sampling.accept import accept_by_rejection, accept_by_thresholds
from jattn.sampling.distribution import greedy, token_probs
from jattn.sampling.draw import Stream, coins, pick, sample
from jattn.sampling.params import SamplerConfig, SamplingParams
from jattn.sampling.penalties import History, biased, penalised


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Natural logarithms of probabilities, of the logits as the model gave them.

    That is before penalties, biases, temperature and filters.
    """

    own: jax.Array  # f32[...], of the token that came
    top_ids: jax.Array  # i32[..., num_logprobs], likeliest first, of equals the lowest id
    top: jax.Array  # f32[..., num_logprobs]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Tokens i32[...], and their log-probabilities where the program reports them."""

    tokens: jax.Array
    logprobs: Logprobs | None = None

    @classmethod
    def none(cls, shape: tuple[int, ...], config: SamplerConfig) -> "Chosen":
        """Zeros of any shape, for rows that are not computed."""
        tokens = jnp.zeros(shape, jnp.int32)
        if config.num_logprobs is None:
            return cls(tokens=tokens)
        top = (*shape, config.num_logprobs)
        logprobs = Logprobs(
            own=jnp.zeros(shape, jnp.float32), top_ids=jnp.zeros(top, jnp.int32), top=jnp.zeros(top, jnp.float32)
        )
        return cls(tokens=tokens, logprobs=logprobs)


def next_tokens(
    logits: jax.Array,
    params: SamplingParams,
    positions: jax.Array,
    *,
    config: SamplerConfig,
    history: History | None = None,
    offered: jax.Array | None = None,
    draft_probs: jax.Array | None = None,
) -> Chosen:
    """The token behind each row: the draft that is accepted, or the one that comes in its place.

    Args:
      logits: f32[rows, vocab]. params: of each row. positions: i32[rows], sequence index that the token will have.
      history: of each row, read when `config.penalties`.
      offered: i32[rows, n], drafts behind the row, -1 unused; read by thresholds and by rejection sampling (n is 1).
      draft_probs: f32[rows, vocab], what the offered draft was drawn from, for rejection sampling.
    """
    moved = logits
    if config.penalties:
        if history is None:
            raise ValueError("config.penalties without history: count the tokens with History.of")
        moved = penalised(moved, params, history)
    if config.num_biases:
        moved = biased(moved, params)
    if not config.random:
        tokens = greedy(moved)
    elif offered is None or not (config.thresholds or config.rejection):
        tokens = sample(moved, params, positions)
    else:
        tokens = _accept(moved, params, positions, offered, draft_probs)
    return _scored(logits, tokens, config.num_logprobs)


def _accept(logits, params: SamplingParams, positions, offered, draft_probs) -> jax.Array:
    probs = token_probs(logits, params)
    final = coins(params.seed, positions)
    accept = coins(params.seed, positions, Stream.ACCEPT)
    if draft_probs is not None:
        return accept_by_rejection(probs, offered[:, 0], draft_probs, coins=accept, final_coins=final)
    lossy = accept_by_thresholds(
        probs,
        offered,
        coins=accept,
        final_coins=final,
        threshold_single=params.accept_threshold_single,
        threshold_acc=params.accept_threshold_acc,
    )
    return jnp.where(params.is_lossy, lossy, pick(probs, final))  # others keep the text that they have without drafts


def _scored(logits: jax.Array, tokens: jax.Array, num_logprobs: int | None) -> Chosen:
    if num_logprobs is None:
        return Chosen(tokens=tokens)
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    top, ids = jax.lax.top_k(logprobs, num_logprobs)
    own = jnp.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0]
    return Chosen(tokens=tokens, logprobs=Logprobs(own=own, top_ids=ids, top=top))
