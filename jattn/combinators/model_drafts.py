"""Drafts from a model: a smaller one, or a head on the target's hidden states. It catches up, then grows a tree.

The drafter keeps a cache of its own over the target's page table. Nodes of every level are appended behind the known
tokens and read through rectangular ancestor bits, so no page is copied for a branch. Tokens that rounds without drafts
passed are missing in its cache, and the rows behind them stand one after another: drafts are worse for a while, and
rounds without drafts cost nothing but their features' copy.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from jattn.cache import Cache
from jattn.combinators.drafter import Drafter, behind_plan, offer
from jattn.combinators.layer_drafts import check_layers, propose_by_layers
from jattn.combinators.state import DecodeState, DraftState
from jattn.combinators.tree import Candidates, grow
from jattn.combinators.verify import by_request, owners_of
from jattn.modes import ForwardMode
from jattn.plan import Plan, Tree, make_plan, rows_of
from jattn.sampling import TEMPERATURES, SamplerConfig

Lineage = Literal["parent", "slot"]


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
    if drafter.ahead > 1:
        check_layers(drafter.ahead, topk=topk, num_steps=num_steps)
        return propose_by_layers(drafter, state, max_behind=max_behind or num_steps + 1, sampler=sampler)
    cache, cached, missed = state.draft.of_model
    start = state.seq_lens + 1 - drafter.ahead - missed  # the row of the first node
    cache, hidden, logits = _catch_up(drafter, state, cache, start, max_rows=max_behind or num_steps + 1)
    probs, ids, first = offer(drafter, logits[:, None], state, 0, topk, sampler)
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
        probs, ids, drawn = offer(drafter, logits, state, level + 1, topk, sampler)
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
    return dataclasses.replace(state.draft, missed=missed, features=keep(drafter, state, kept))


def keep(drafter: Drafter, state: DecodeState, kept: jax.Array | None) -> jax.Array | None:
    """`DraftState.features` behind a round: kept [seqs, n, width] of its newest token and what was accepted behind.

    Args: state: from before the round's tokens. With ahead > 1, ahead - 1 rows that `propose` left stand before.
    """
    held = state.draft.features
    if held is None or kept is None:
        return held
    num_kept = kept.shape[1]
    if drafter.ahead <= 1:
        return held.at[:, :num_kept].set(jnp.where(state.decoding[:, None, None], kept, held[:, :num_kept]))
    before = jnp.minimum(state.seq_lens, drafter.ahead - 1)
    at = jnp.arange(held.shape[1], dtype=jnp.int32)[None] - before[:, None]
    new = jnp.take_along_axis(kept, jnp.clip(at, 0, num_kept - 1)[..., None], axis=1)
    return jnp.where((state.decoding[:, None] & (at >= 0) & (at < num_kept))[..., None], new, held)


def read_prompt(
    drafter: Drafter, state: DecodeState, hidden: jax.Array, ids: jax.Array, plan: Plan, q_lens: jax.Array
) -> DraftState:
    """The drafter reads a prefill chunk that the target has just computed.

    Args: state: from before the chunk. hidden: of the target, [rows, width]. ids, plan: the chunk's. q_lens: i32[seqs].
    Returns: the draft state. The chunk's last `ahead` rows are kept for later: their next tokens are not known yet.
    """
    cache, cached, _ = state.draft.of_model
    if not drafter.ahead:
        _, cache = drafter(ids, None, cache, plan)
        return dataclasses.replace(state.draft, cache=cache, cached=jnp.where(q_lens > 0, plan.seq_lens, cached))
    kept, held = drafter.kept(hidden), state.draft.features
    assert held is not None

    def rows_at(seq, place):
        # what was kept of rows at `place` in a request: of this chunk, or from the last one
        at = place - state.seq_lens[seq]
        here = kept[jnp.clip(plan.cu_q_lens[seq] + at, 0, kept.shape[0] - 1)]
        before = held[seq, jnp.clip(place - cached[seq], 0, held.shape[1] - 1)]
        return jnp.where((at >= 0)[..., None], here, before)

    ends = jnp.maximum(plan.seq_lens - drafter.ahead, 0)
    behind = behind_plan(state, ends, jnp.where(q_lens > 0, ends - cached, 0), cache.page_size, hidden.shape[0])
    seq, _, valid = rows_of(behind.cu_q_lens, behind.num_tokens)
    features = drafter.features(rows_at(seq, behind.positions))
    for level in range(drafter.ahead):
        ids = jnp.where(valid, state.tokens[seq, behind.positions + 1 + level], 0)
        out, cache = drafter(ids, features, cache, behind, level=level)
        features = out if drafter.chained else features
    last = ends[:, None] + jnp.arange(drafter.ahead, dtype=jnp.int32)[None]
    seq = jnp.broadcast_to(jnp.arange(last.shape[0], dtype=jnp.int32)[:, None], last.shape)
    waiting = jnp.where((q_lens > 0)[:, None, None], rows_at(seq, last), held[:, : drafter.ahead])
    return dataclasses.replace(
        state.draft,
        cache=cache,
        cached=jnp.where(q_lens > 0, ends, cached),
        features=held.at[:, : drafter.ahead].set(waiting),
    )


def _catch_up(drafter: Drafter, state: DecodeState, cache: Cache, start: jax.Array, *, max_rows: int):
    # the known tokens that the drafter has not cached, the newest included: its cache, and behind the newest its hidden
    # states [seqs, d] and logits f32[seqs, n]
    _, cached, missed = state.draft.of_model
    behind = jnp.where(state.decoding, start - cached, 0)
    plan = behind_plan(state, start, behind, cache.page_size, start.shape[0] * max_rows, max_rows)
    seq, idx, valid = rows_of(plan.cu_q_lens, plan.num_tokens)
    ids = jnp.where(valid, state.tokens[seq, plan.positions + drafter.ahead + missed[seq]], 0)
    features = None
    if drafter.ahead:
        assert state.draft.features is not None
        features = drafter.features(state.draft.features[seq, jnp.clip(idx, 0, max_rows - 1)])
    hidden, cache = drafter(ids, features, cache, plan)
    hidden = hidden[jnp.clip(plan.cu_q_lens[1:] - 1, 0, plan.num_tokens - 1)]
    return cache, hidden, drafter.logits(hidden)


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
