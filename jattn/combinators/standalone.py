"""Drafts from a smaller language model with the target's vocabulary: it catches up, then grows a tree level by level.

The drafter keeps a cache of its own over the target's page table. Nodes of every level are appended behind the known
tokens and read through rectangular ancestor bits, so no page is copied for a branch.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from jattn.cache import PagedKV
from jattn.combinators.state import Decoder, DecodeState, DraftState
from jattn.combinators.tree import Candidates, grow
from jattn.combinators.verify import by_request, owners_of
from jattn.modes import ForwardMode
from jattn.plan import Tree, make_plan, rows_of

Lineage = Literal["parent", "slot"]


def rows_ahead(*, topk: int, num_steps: int) -> int:
    """Rows behind the newest token that drafting may write: the nodes of every level but the last."""
    return (num_steps - 1) * topk


def propose(
    drafter: Decoder, state: DecodeState, *, topk: int, num_steps: int, lineage: Lineage = "parent"
) -> tuple[DraftState, Candidates]:
    """Run the drafter num_steps times: once over the tokens that it has not seen, then once a level.

    Args:
      state: with `draft.cache` and `draft.cached`.
      lineage: "parent" lets a node see its own ancestors. "slot" lets it see the nodes of its own branch number, as the
        original does after a beam changes branches: drafts are worse, and verification accepts fewer.
    Returns: the draft state, with its cache written up to the newest token; every candidate.
    """
    cache, cached = state.draft.of_model
    cache, logits = _catch_up(drafter, state, cache, state.seq_lens + 1 - cached, max_rows=num_steps + 1)
    probs, ids = _best(logits, topk)
    seqs, nodes = ids.shape[0], max(rows_ahead(topk=topk, num_steps=num_steps), 1)
    words = -(-nodes // 32)
    branch = jnp.arange(topk, dtype=jnp.int32)

    def step(carry, level, tokens, beams):
        cache, bits = carry
        above = jnp.take_along_axis(bits, beams[..., None], axis=1) if lineage == "parent" else bits
        node = level * topk + branch
        word = jnp.arange(words, dtype=jnp.int32)[None]
        own = jnp.where(word == (node // 32)[:, None], jnp.uint32(1) << (node % 32).astype(jnp.uint32)[:, None], 0)
        bits = above | own[None].astype(jnp.uint32)
        plan, seq, idx = _level_plan(state, bits, level, topk, nodes, cache.page_size)
        hidden, cache = drafter(tokens[seq, idx], cache, plan)
        logits = by_request(drafter.logits(hidden), plan, topk)
        return (cache, bits), *_best(logits, topk)

    start = (cache, jnp.zeros((seqs, topk, words), jnp.uint32))
    (cache, _), candidates = grow(step, start, probs, ids, num_steps=num_steps)
    cached = jnp.where(state.decoding, state.seq_lens + 1, cached)
    return dataclasses.replace(state.draft, cache=cache, cached=cached), candidates


def _catch_up(
    drafter: Decoder, state: DecodeState, cache: PagedKV, behind: jax.Array, *, max_rows: int
) -> tuple[PagedKV, jax.Array]:
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


def _best(logits, topk: int):
    return jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), topk)
