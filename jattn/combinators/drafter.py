"""What drafts: a model's interface, a language model behind it, and what both ways of proposing share."""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp

from jattn.cache import Cache
from jattn.combinators.state import Decoder, DecodeState
from jattn.modes import ForwardMode
from jattn.plan import Plan, make_plan
from jattn.sampling import SamplerConfig, token_probs
from jattn.sampling.draw import Stream, coins, pick


class Drafter(Protocol):
    """A model that drafts.

    Row i of its cache reads token i + `ahead`, but for those it missed; with ahead 1, beside the row's features.
    With more, layer `level` of it reads token i + 1 + level in row i (`layer_drafts`).
    """

    @property
    def ahead(self) -> int:
        """0: a language model; 1: a head on the target's hidden states; more: of so many layers, a layer a step."""
        ...

    @property
    def chained(self) -> bool:
        """Whether a layer of those reads the hidden states of the layer before, not the target's."""
        ...

    @property
    def vocab_size(self) -> int:
        """Of the target."""
        ...

    def __call__(
        self, tokens: jax.Array, features: jax.Array | None, cache: Cache, plan: Plan, /, *, level: int = 0
    ) -> tuple[jax.Array, Cache]:
        """i32[rows], and [rows, d] or None -> hidden states [rows, d], which are the features a level below."""
        ...

    def logits(self, hidden: jax.Array, /) -> jax.Array:
        """[rows, d] -> f32[rows, n], n tokens of the drafter's vocabulary."""
        ...

    def kept(self, hidden: jax.Array, /) -> jax.Array:
        """The target's hidden states [..., all] -> what must be kept of them until a row reads it, [..., width]."""
        ...

    def features(self, kept: jax.Array, /) -> jax.Array:
        """What was kept [..., width] -> what a row reads, [..., d]."""
        ...

    def token_ids(self) -> jax.Array | None:
        """i32[n]: the target's ids of the drafter's vocabulary; None where they are the same."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class LanguageModel:
    """A language model with the target's vocabulary as a drafter: it reads tokens alone."""

    model: Decoder
    vocab_size: int
    ahead: int = 0
    chained: bool = True

    def __call__(self, tokens, features, cache, plan, /, *, level=0):
        """As the model; features are None."""
        return self.model(tokens, cache, plan)

    def logits(self, hidden, /):
        """As the model."""
        return self.model.logits(hidden)

    def kept(self, hidden, /):
        """As `features`."""
        return self.features(hidden)

    def features(self, kept, /):
        """It reads none: refused, since a state with room for them belongs to another drafter."""
        raise TypeError("a language model reads no features of the target")

    def token_ids(self):
        """The same."""
        return None


def behind_plan(
    state: DecodeState,
    ends: jax.Array,
    q_lens: jax.Array,
    page_size: int,
    num_tokens: int,
    max_q_len: int | None = None,
) -> Plan:
    """Plan in which each request has the newest q_lens i32[seqs] rows of its first `ends`."""
    return make_plan(
        ForwardMode.DRAFT_EXTEND_V2,
        jnp.where(q_lens > 0, ends, 0),
        q_lens,
        state.page_table,
        page_size=page_size,
        num_tokens=num_tokens,
        max_q_len=max_q_len or num_tokens,
    )


def offer(drafter: Drafter, logits: jax.Array, state: DecodeState, level, topk: int, sampler: SamplerConfig):
    """Drafts behind f32[seqs, branches, n]: the likeliest tokens, or with rejection sampling one that is drawn.

    Returns: probs and ids [seqs, branches, topk], and the distribution f32[seqs, vocab] of a drawn one, or None.
    """
    known = drafter.token_ids()
    if not sampler.rejection:
        probs, ids = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), topk)
        return probs, ids if known is None else known[ids], None
    probs = token_probs(logits[:, 0], state.sampling)
    token = pick(probs, coins(state.sampling.seed, state.seq_lens + 1 + level, Stream.DRAFT))[:, None]
    drawn = jnp.take_along_axis(probs, token, axis=1)[:, None]
    if known is not None:
        token, probs = known[token], jnp.zeros((probs.shape[0], drafter.vocab_size)).at[:, known].set(probs)
    return drawn, token[:, None], probs
