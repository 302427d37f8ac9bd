"""Drafts from a head with a layer a step (multi-layer MTP): layer j predicts one token further than layer j - 1.

In row i layer j reads token i + 1 + j beside what layer j - 1 made of row i (or the target's hidden state), so all
layers run over the same rows, and drafting appends none. In the newest rows a layer reads drafts of the layers before
it: these rows are computed again once their tokens are known. Source: arXiv:2412.19437, section 2.2.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jattn.combinators.drafter import Drafter, behind_plan, offer
from jattn.combinators.state import DecodeState, DraftState
from jattn.combinators.tree import ROOT, Candidates
from jattn.plan import rows_of
from jattn.sampling import SamplerConfig


def check_layers(num_layers: int, *, topk: int, num_steps: int) -> None:
    """Raise ValueError unless a head of so many layers, one a step, can draft so.

    >>> check_layers(2, topk=1, num_steps=3)
    Traceback (most recent call last):
    ValueError: num_steps=3, topk=1 with a head of 2 layers, one a step: it drafts a chain of 2 (topk 1)
    """
    if (topk, num_steps) != (1, num_layers):
        raise ValueError(
            f"num_steps={num_steps}, topk={topk} with a head of {num_layers} layers, one a step: it drafts a chain of "
            f"{num_layers} (topk 1)"
        )


def propose_by_layers(
    drafter: Drafter, state: DecodeState, *, max_behind: int, sampler: SamplerConfig
) -> tuple[DraftState, Candidates, jax.Array | None]:
    """Run each layer once over the rows whose tokens it has not all seen: a chain of `drafter.ahead` drafts.

    Args: state: `draft.cached` counts the rows whose tokens are all known and read, by every layer; `draft.features`
      [seqs, at least max_behind + ahead - 1, width] are of the rows behind. max_behind: rows since the last round.
    Returns: as `model_drafts.propose`; the first ahead - 1 rows of `draft.features` are those to be read again.
    """
    layers, seqs = drafter.ahead, state.seq_lens.shape[0]
    cache, cached, _ = state.draft.of_model
    held = state.draft.features
    assert held is not None
    max_rows = max_behind + layers - 1
    behind = jnp.where(state.decoding, state.seq_lens - cached, 0)
    plan = behind_plan(state, state.seq_lens, behind, cache.page_size, seqs * max_rows, max_rows)
    seq, idx, valid = rows_of(plan.cu_q_lens, plan.num_tokens)
    last = jnp.clip(plan.cu_q_lens[1:] - 1, 0, plan.num_tokens - 1)
    features = drafter.features(held[seq, jnp.clip(idx, 0, max_rows - 1)])
    newest = state.seq_lens[seq]
    drafts, reached, scores, drawn_from = jnp.zeros((seqs, 0), jnp.int32), jnp.ones((seqs, 1)), [], []
    for level in range(layers):
        place = plan.positions + 1 + level
        ids = state.tokens[seq, place]
        if level:
            draft = drafts[seq, jnp.clip(place - newest - 1, 0, level - 1)]
            ids = jnp.where(place > newest, draft, ids)
        hidden, cache = drafter(jnp.where(valid, ids, 0), features, cache, plan, level=level)
        probs, ids, drawn = offer(drafter, drafter.logits(hidden[last])[:, None], state, level, 1, sampler)
        drafts = jnp.concatenate([drafts, ids[:, 0]], axis=1)
        reached = reached * jnp.minimum(probs[:, 0], 1.0)
        scores.append(reached)
        drawn_from.append(drawn)
        features = hidden if drafter.chained else features
    settled = jnp.where(state.decoding, jnp.maximum(state.seq_lens + 1 - layers, 0), cached)
    again = jnp.clip((settled - cached)[:, None] + jnp.arange(layers - 1, dtype=jnp.int32)[None], 0, held.shape[1] - 1)
    draft = dataclasses.replace(
        state.draft,
        cache=cache,
        cached=settled,
        features=held.at[:, : layers - 1].set(jnp.take_along_axis(held, again[..., None], axis=1)),
    )
    parents = jnp.broadcast_to(jnp.arange(layers, dtype=jnp.int32)[None] + ROOT, drafts.shape)
    candidates = Candidates(scores=jnp.concatenate(scores, axis=1), tokens=drafts, parents=parents)
    return draft, candidates, jnp.stack(drawn_from, axis=1) if sampler.rejection else None
