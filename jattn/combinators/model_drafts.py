"""Drafts from a model: a smaller one, or a head on the target's hidden states. It catches up, then grows a tree.

The drafter keeps a cache of its own over the target's page table. Nodes of every level are appended behind the known
tokens and read through rectangular ancestor bits, so no page is copied for a branch. Tokens that rounds without drafts
passed are missing in its cache, and the rows behind them stand one after another: drafts are worse for a while, and
rounds without drafts cost nothing but their features' copy.
"""

import dataclasses
from typing import Literal, Protocol

import jax
import jax.numpy as jnp

from jattn.cache import Cache
from jattn.combinators.state import Decoder, DecodeState, DraftState
from jattn.combinators.tree import Candidates, grow
from jattn.combinators.verify import by_request, owners_of
from jattn.modes import ForwardMode
from jattn.plan import Plan, Tree, make_plan, rows_of
from jattn.sampling import TEMPERATURES, SamplerConfig, token_probs
from jattn.sampling.draw import Stream, coins, pick

Lineage = Literal["parent", "slot"]


class Drafter(Protocol):
    """A model that drafts.

    Row i of its cache reads token i + `ahead`, but for those it missed; with ahead 1, beside the row's features.
    """

    @property
    def ahead(self) -> int:
        """0: a language model; 1: a head on the target's hidden states."""
        ...

    @property
    def vocab_size(self) -> int:
        """Of the target."""
        ...

    def __call__(
        self, tokens: jax.Array, features: jax.Array | None, cache: Cache, plan: Plan, /
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

    def __call__(self, tokens, features, cache, plan, /):
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


def rows_ahead(*, topk: int, num_steps: int) -> int:
    """Rows behind the newest token that drafting may write: the nodes of every level but the last."""
    return (num_steps - 1) * topk


def propose(
    drafter: Drafter,
    state: DecodeState,
    *,
    topk: int,
    num_steps: int,
    max_behind: int | None = None,
    lineage: Lineage = "parent",
    sampler: SamplerConfig = TEMPERATURES,
    unroll: bool = False,
) -> tuple[DraftState, Candidates, jax.Array | None]:
    """Run the drafter num_steps times: once over the tokens that it has not seen, then once a level.

    Args:
      state: with `draft.cache` and `draft.cached`; with ahead 1 also `draft.features` of the rows it has not read.
      max_behind: rows that it has not read, at most: those of the round before. None: of a round of these steps.
      lineage: "parent" lets a node see its own ancestors. "slot" lets it see the nodes of its own branch number, as the
        original does after a beam changes branches: drafts are worse, and verification accepts fewer.
      sampler: with `rejection`, drafts are drawn as the request samples instead of being the likeliest; topk is 1.
      unroll: levels one after another instead of in a loop, for whose end a host might wait.
    Returns: the draft state, with its cache written up to the newest token; every candidate; and, with rejection,
      f32[seqs, num_steps, vocab]: the distribution that each draft was drawn from.
    """
    if sampler.rejection and topk > 1:
        raise ValueError(f"topk={topk} with rejection sampling: its drafts are chains, so want topk=1")
    cache, cached, missed = state.draft.of_model
    start = state.seq_lens + 1 - drafter.ahead - missed  # the row of the first node
    cache, hidden, logits = _catch_up(drafter, state, cache, start, max_rows=max_behind or num_steps + 1)
    probs, ids, first = _propose(drafter, logits[:, None], state, 0, topk, sampler)
    probs, ids = probs[:, 0], ids[:, 0]
    seqs, nodes = ids.shape[0], max(rows_ahead(topk=topk, num_steps=num_steps), 1)
    words = -(-nodes // 32)
    branch = jnp.arange(topk, dtype=jnp.int32)

    def step(carry, level, tokens, beams):
        cache, bits, features, drawn_from = carry
        above = jnp.take_along_axis(bits, beams[..., None], axis=1) if lineage == "parent" else bits
        node = level * topk + branch
        word = jnp.arange(words, dtype=jnp.int32)[None]
        own = jnp.where(word == (node // 32)[:, None], jnp.uint32(1) << (node % 32).astype(jnp.uint32)[:, None], 0)
        bits = above | own[None].astype(jnp.uint32)
        plan, seq, idx = _level_plan(state, bits, start, level, topk, nodes, cache.page_size)
        read = None if features is None else features[seq, beams[seq, idx]]
        hidden, cache = drafter(tokens[seq, idx], read, cache, plan)
        logits = by_request(drafter.logits(hidden), plan, topk)
        probs, ids, drawn = _propose(drafter, logits, state, level + 1, topk, sampler)
        if drawn is not None:
            drawn_from = drawn_from.at[:, level + 1].set(drawn)
        features = None if features is None else by_request(hidden, plan, topk)
        return (cache, bits, features, drawn_from), probs, ids

    drawn_from = None if first is None else jnp.repeat(first[:, None], num_steps, axis=1)
    features = jnp.repeat(hidden[:, None], topk, axis=1) if drafter.ahead else None
    carry = (cache, jnp.zeros((seqs, topk, words), jnp.uint32), features, drawn_from)
    (cache, _, _, drawn_from), candidates = grow(step, carry, probs, ids, num_steps=num_steps, unroll=unroll)
    cached = jnp.where(state.decoding, start, cached)
    return dataclasses.replace(state.draft, cache=cache, cached=cached), candidates, drawn_from


def pass_over(drafter: Drafter, state: DecodeState, kept: jax.Array | None) -> DraftState:
    """The draft state behind a round without drafts: of its tokens the drafter will read the newest alone.

    Args: state: from after the round. kept: [seqs, 1, width], of the round's row, with ahead 1.
    """
    _, cached, missed = state.draft.of_model
    missed = jnp.where(state.decoding, state.seq_lens - drafter.ahead - cached, missed)
    return dataclasses.replace(state.draft, missed=missed, features=keep(state, kept))


def keep(state: DecodeState, kept: jax.Array | None) -> jax.Array | None:
    """`DraftState.features` behind a round: kept [seqs, n, width] of its newest token and what was accepted behind."""
    held = state.draft.features
    if held is None or kept is None:
        return held
    return held.at[:, : kept.shape[1]].set(jnp.where(state.decoding[:, None, None], kept, held[:, : kept.shape[1]]))


def read_prompt(
    drafter: Drafter, state: DecodeState, hidden: jax.Array, ids: jax.Array, plan: Plan, q_lens: jax.Array
) -> DraftState:
    """The drafter reads a prefill chunk that the target has just computed.

    Args: state: from before the chunk. hidden: of the target, [rows, width]. ids, plan: the chunk's. q_lens: i32[seqs].
    Returns: the draft state. With ahead 1 the chunk's last row is kept for later: its next token is not known yet.
    """
    cache, cached, _ = state.draft.of_model
    if not drafter.ahead:
        _, cache = drafter(ids, None, cache, plan)
        return dataclasses.replace(state.draft, cache=cache, cached=jnp.where(q_lens > 0, plan.seq_lens, cached))
    kept, held = drafter.kept(hidden), state.draft.features
    assert held is not None
    ends = jnp.maximum(plan.seq_lens - 1, 0)
    behind = _behind_plan(state, ends, jnp.where(q_lens > 0, ends - cached, 0), cache.page_size, hidden.shape[0])
    seq, _, valid = rows_of(behind.cu_q_lens, behind.num_tokens)
    ids = jnp.where(valid, state.tokens[seq, behind.positions + 1], 0)
    at = plan.cu_q_lens[seq] + behind.positions - state.seq_lens[seq]  # in the chunk; -1: the row kept from the last
    rows = jnp.where((at >= 0)[:, None], kept[jnp.clip(at, 0, kept.shape[0] - 1)], held[seq, 0])
    _, cache = drafter(ids, drafter.features(rows), cache, behind)
    last = jnp.clip(plan.cu_q_lens[1:] - 1, 0, kept.shape[0] - 1)
    return dataclasses.replace(
        state.draft,
        cache=cache,
        cached=jnp.where(q_lens > 0, ends, cached),
        features=held.at[:, 0].set(jnp.where((q_lens > 0)[:, None], kept[last], held[:, 0])),
    )


def _catch_up(drafter: Drafter, state: DecodeState, cache: Cache, start: jax.Array, *, max_rows: int):
    # the known tokens that the drafter has not cached, the newest included: its cache, and behind the newest its hidden
    # states [seqs, d] and logits f32[seqs, n]
    _, cached, missed = state.draft.of_model
    behind = jnp.where(state.decoding, start - cached, 0)
    plan = _behind_plan(state, start, behind, cache.page_size, start.shape[0] * max_rows, max_rows)
    seq, idx, valid = rows_of(plan.cu_q_lens, plan.num_tokens)
    ids = jnp.where(valid, state.tokens[seq, plan.positions + drafter.ahead + missed[seq]], 0)
    features = None
    if drafter.ahead:
        assert state.draft.features is not None
        features = drafter.features(state.draft.features[seq, jnp.clip(idx, 0, max_rows - 1)])
    hidden, cache = drafter(ids, features, cache, plan)
    hidden = hidden[jnp.clip(plan.cu_q_lens[1:] - 1, 0, plan.num_tokens - 1)]
    return cache, hidden, drafter.logits(hidden)


def _behind_plan(state: DecodeState, ends, q_lens, page_size: int, num_tokens: int, max_q_len: int | None = None):
    # the newest q_lens rows of the first `ends`
    return make_plan(
        ForwardMode.DRAFT_EXTEND_V2,
        jnp.where(q_lens > 0, ends, 0),
        q_lens,
        state.page_table,
        page_size=page_size,
        num_tokens=num_tokens,
        max_q_len=max_q_len or num_tokens,
    )


def _level_plan(state: DecodeState, bits, start, level, topk: int, nodes: int, page_size: int):
    # The plan, and the request and branch of each row. A request has topk rows, nodes level * topk and on; node j lies
    # at sequence index start + j.
    active, seqs = state.decoding, state.seq_lens.shape[0]
    q_lens = jnp.where(active, topk, 0)
    lens = jnp.where(active, start + (level + 1) * topk, 0)
    seq, idx = owners_of(q_lens, seqs * topk)
    depth = jnp.arange(nodes, dtype=jnp.int32) // topk
    plan = make_plan(
        ForwardMode.TARGET_VERIFY,
        lens,
        q_lens,
        state.page_table,
        page_size=page_size,
        tree=Tree(bits=bits[seq, idx], starts=start, kv_positions=start[:, None] + depth[None]),
        num_tokens=seqs * topk,
        max_q_len=topk,
    )
    # past its limit a request owns no page: what lies there is another's
    owned = start[seq] + level * topk + idx < state.limits[seq] - 1
    return dataclasses.replace(plan, write_slots=jnp.where(owned, plan.write_slots, -1)), seq, idx


def _propose(drafter: Drafter, logits, state: DecodeState, level, topk: int, sampler: SamplerConfig):
    # logits f32[seqs, branches, n] -> probs and ids [seqs, branches, topk] of the likeliest tokens; or of one that is
    # drawn, with the distribution f32[seqs, vocab] it comes from
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
