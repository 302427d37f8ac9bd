"""Drafts from a smaller language model with the target's vocabulary: it catches up, then grows a tree level by level.

The drafter keeps a cache of its own over the target's page table. Nodes of every level are appended behind the known
tokens and read through rectangular ancestor bits, so no page is copied for a branch.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from jattn.cache import Cache
from jattn.combinators.state import Decoder, DecodeState, DraftState
from jattn.combinators.tree import Candidates, grow
from jattn.combinators.verify import by_request, owners_of
from jattn.modes import ForwardMode
from jattn.plan import Tree, make_plan, rows_of
from jattn.sampling import TEMPERATURES, SamplerConfig, token_probs
from jattn.sampling.draw import Stream, coins, pick

Lineage = Literal["parent", "slot"]


def rows_ahead(*, topk: int, num_steps: int) -> int:
    """Rows behind the newest token that drafting may write: the nodes of every level but the last."""
    return (num_steps - 1) * topk


def propose(
    drafter: Decoder,
    state: DecodeState,
    *,
    topk: int,
    num_steps: int,
    lineage: Lineage = "parent",
    sampler: SamplerConfig = TEMPERATURES,
) -> tuple[DraftState, Candidates, jax.Array | None]:
    """Run the drafter num_steps times: once over the tokens that it has not seen, then once a level.

    Args:
      state: with `draft.cache` and `draft.cached`.
      lineage: "parent" lets a node see its own ancestors. "slot" lets it see the nodes of its own branch number, as the
        original does after a beam changes branches: drafts are worse, and verification accepts fewer.
      sampler: with `rejection`, drafts are drawn as the request samples instead of being the likeliest; topk is 1.
    Returns: the draft state, with its cache written up to the newest token; every candidate; and, with rejection,
      f32[seqs, num_steps, vocab]: the distribution that each draft was drawn from.
    """
    if sampler.rejection and topk > 1:
        raise ValueError(f"topk={topk} with rejection sampling: its drafts are chains, so want topk=1")
    cache, cached = state.draft.of_model
    cache, logits = _catch_up(drafter, state, cache, state.seq_lens + 1 - cached, max_rows=num_steps + 1)
    probs, ids, first = _propose(logits[:, None], state, 0, topk, sampler)
    probs, ids = probs[:, 0], ids[:, 0]
    seqs, nodes = ids.shape[0], max(rows_ahead(topk=topk, num_steps=num_steps), 1)
    words = -(-nodes // 32)
    branch = jnp.arange(topk, dtype=jnp.int32)

    def step(carry, level, tokens, beams):
        cache, bits, drawn_from = carry
        above = jnp.take_along_axis(bits, beams[..., None], axis=1) if lineage == "parent" else bits
        node = level * topk + branch
        word = jnp.arange(words, dtype=jnp.int32)[None]
        own = jnp.where(word == (node // 32)[:, None], jnp.uint32(1) << (node % 32).astype(jnp.uint32)[:, None], 0)
        bits = above | own[None].astype(jnp.uint32)
        plan, seq, idx = _level_plan(state, bits, level, topk, nodes, cache.page_size)
        hidden, cache = drafter(tokens[seq, idx], cache, plan)
        logits = by_request(drafter.logits(hidden), plan, topk)
        probs, ids, drawn = _propose(logits, state, level + 1, topk, sampler)
        if drawn is not None:
            drawn_from = drawn_from.at[:, level + 1].set(drawn)
        return (cache, bits, drawn_from), probs, ids

    drawn_from = None if first is None else jnp.repeat(first[:, None], num_steps, axis=1)
    start = (cache, jnp.zeros((seqs, topk, words), jnp.uint32), drawn_from)
    (cache, _, drawn_from), candidates = grow(step, start, probs, ids, num_steps=num_steps)
    cached = jnp.where(state.decoding, state.seq_lens + 1, cached)
    return dataclasses.replace(state.draft, cache=cache, cached=cached), candidates, drawn_from


def _catch_up(
    drafter: Decoder, state: DecodeState, cache: Cache, behind: jax.Array, *, max_rows: int
) -> tuple[Cache, jax.Array]:
    # the known tokens that the drafter has not cached, the newest included; logits f32[seqs, vocab] behind the newest
    active, seqs = state.decoding, state.seq_lens.shape[0]
    lens = jnp.where(active, state.seq_lens + 1, 0)
    q_lens = jnp.where(active, behind, 0)
    plan = make_plan(
        ForwardMode.DRAFT_EXTEND_V2,
        lens,
        q_lens,
        state.page_table,
        page_size=cache.page_size,
        num_tokens=seqs * max_rows,
        max_q_len=max_rows,
    )
    seq, _, valid = rows_of(plan.cu_q_lens, plan.num_tokens)
    ids = jnp.where(valid, state.tokens[seq, plan.positions], 0)
    hidden, cache = drafter(ids, cache, plan)
    last = jnp.clip(plan.cu_q_lens[1:] - 1, 0, plan.num_tokens - 1)
    return cache, drafter.logits(hidden[last])


def _level_plan(state: DecodeState, bits, level, topk: int, nodes: int, page_size: int):
    # The plan, and the request and branch of each row. A request has topk rows, nodes level * topk and on; node j lies
    # at sequence index start + j.
    active, seqs = state.decoding, state.seq_lens.shape[0]
    start = state.seq_lens + 1
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


def _propose(logits, state: DecodeState, level, topk: int, sampler: SamplerConfig):
    # logits f32[seqs, branches, vocab] -> probs and ids [seqs, branches, topk] of the likeliest tokens; or of one that
    # is drawn, with the distribution f32[seqs, vocab] it comes from
    if not sampler.rejection:
        return *jax.lax.top_k(jax.nn.softmax(logits, axis=-1), topk), None
    probs = token_probs(logits[:, 0], state.sampling)
    token = pick(probs, coins(state.sampling.seed, state.seq_lens + 1 + level, Stream.DRAFT))[:, None]
    return jnp.take_along_axis(probs, token, axis=1)[:, None], token[:, None], probs
