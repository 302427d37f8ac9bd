"""The record that a jitted round carries, and what it reports. Donate the state; read the report one round late."""

import dataclasses
import enum
from typing import Protocol

import jax
import jax.numpy as jnp

from jattn.cache import Cache
from jattn.plan import Plan
from jattn.sampling import Logprobs, SamplerConfig, SamplingParams
from jattn.sampling.penalties import History


class Decoder(Protocol):
    """What the combinators ask of a model; an NNX module with these two methods."""

    def __call__[C: Cache](self, tokens: jax.Array, cache: C, plan: Plan, /) -> tuple[jax.Array, C]:
        """i32[rows] -> hidden states [rows, d_model], and the cache with the step written."""
        ...

    def logits(self, hidden: jax.Array, /) -> jax.Array:
        """[rows, d_model] -> f32[rows, vocab_size]."""
        ...


class Status(enum.IntEnum):
    """Phase of a slot, as stored on the device."""

    FREE = 0
    PREFILL = 1
    DECODE = 2
    STOPPED = 3  # ended by a stop token
    LENGTH = 4  # ended by its length limit


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftState:
    """What a drafter carries between rounds. n-gram drafts use the counts; the rest is for drafters with a model."""

    accepted: jax.Array  # f32[seqs, match classes], decayed count of accepted drafts
    rejected: jax.Array  # f32[seqs, match classes], decayed count of rejections
    cache: Cache | None = None  # of a draft model, over the target's page table
    cached: jax.Array | None = None  # i32[seqs], tokens in it
    missed: jax.Array | None = None  # i32[seqs], tokens that it never reads: rounds without drafts passed them
    features: jax.Array | None = None  # [seqs, rows, width], kept of the rows behind those, for a head on hidden states

    @property
    def of_model(self) -> tuple[Cache, jax.Array, jax.Array]:
        """`cache`, `cached` and `missed` of a draft model; ValueError without them."""
        if self.cache is None or self.cached is None or self.missed is None:
            raise ValueError("state.draft has no cache: create the state with draft_cache= for a draft model")
        return self.cache, self.cached, self.missed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecodeState:
    """Every slot's requests, on the device between rounds.

    While a slot decodes, tokens[b, seq_lens[b]] is its newest token: known, not cached yet.
    """

    cache: Cache
    tokens: jax.Array  # i32[seqs, max_context], prompt and generated tokens
    seq_lens: jax.Array  # i32[seqs], tokens whose keys and values are cached
    prompt_lens: jax.Array  # i32[seqs], tokens to prefill
    generated_from: jax.Array  # i32[seqs], index of the first generated token; below prompt_lens after a preemption
    limits: jax.Array  # i32[seqs], most tokens (prompt included) that the request may have
    page_table: jax.Array  # i32[seqs, max_pages]
    stop_ids: jax.Array  # i32[seqs, max_stops], -1 unused
    status: jax.Array  # i32[seqs], a Status
    sampling: SamplingParams
    draft: DraftState

    @classmethod
    def create(
        cls,
        cache: Cache,
        *,
        num_seqs: int,
        max_context: int,
        max_stops: int,
        num_classes: int,
        num_biases: int = 0,
        draft_cache: Cache | None = None,
        draft_features: jax.Array | None = None,
    ) -> "DecodeState":
        """All slots free. num_biases: logit biases of a request. draft_cache: of a draft model; pages as in `cache`.

        draft_features: [num_seqs, num_steps + ahead, width], what a head keeps of the target's hidden states; ahead as
          in `drafter.Drafter`.
        """
        max_pages = -(-max_context // cache.page_size)

        def ints(*shape: int, fill: int = 0) -> jax.Array:
            return jnp.full((num_seqs, *shape), fill, jnp.int32)

        return cls(
            cache=cache,
            tokens=ints(max_context),
            seq_lens=ints(),
            prompt_lens=ints(),
            generated_from=ints(),
            limits=ints(),
            page_table=ints(max_pages),
            stop_ids=ints(max_stops, fill=-1),
            status=ints(),
            sampling=SamplingParams.greedy(num_seqs, num_biases=num_biases),
            draft=DraftState(
                accepted=jnp.zeros((num_seqs, num_classes), jnp.float32),
                rejected=jnp.zeros((num_seqs, num_classes), jnp.float32),
                cache=draft_cache,
                cached=None if draft_cache is None else ints(),
                missed=None if draft_cache is None else ints(),
                features=draft_features,
            ),
        )

    @property
    def decoding(self) -> jax.Array:
        """bool[seqs]: slots that take part in a decode round."""
        return self.status == Status.DECODE

    @property
    def newest(self) -> jax.Array:
        """i32[seqs]: the known token that is not cached yet."""
        return jnp.take_along_axis(self.tokens, self.seq_lens[:, None], axis=1, mode="clip")[:, 0]

    def history(self, num_known: jax.Array, vocab_size: int, config: SamplerConfig) -> History | None:
        """What the first `num_known` i32[seqs] tokens of each request are, where the program has penalties."""
        if not config.penalties:
            return None
        return History.of(self.tokens, num_known, self.generated_from, vocab_size)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """What one round did, small enough to copy to the host behind the next round."""

    tokens: jax.Array  # i32[seqs, max_new], tokens added, -1 past the count
    counts: jax.Array  # i32[seqs]
    drafted: jax.Array  # i32[seqs], draft rows verified
    status: jax.Array  # i32[seqs], after the round
    rows: jax.Array  # i32[], rows that the program computed; 0 when nobody decoded
    logprobs: Logprobs | None = None  # of `tokens`, where the program reports them; past the count they mean nothing
