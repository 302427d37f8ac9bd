"""A whole decode round as one function: draft, choose the rows, verify, accept. Jit it once, donate the state."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jattn.combinators import budget
from jattn.combinators.accept import accepted_lens, append, finish
from jattn.combinators.costs import Variant
from jattn.combinators.ngram import ngram_draft
from jattn.combinators.state import Decoder, DecodeState, RoundReport
from jattn.combinators.verify import verify


def decode_round(
    model: Decoder, state: DecodeState, *, num_steps: int, shapes: tuple[Variant, ...], sampled: bool = True
) -> tuple[DecodeState, RoundReport]:
    """Advance every decoding slot by one token or more; the tokens equal plain decoding's.

    Args: num_steps: most drafts a request; 0 decodes plainly. shapes: static programs of the target step, from
      `variants`. When no draft is worth its cost the round runs a plain decode shape, and nothing when nobody decodes.
      sampled: False when every request is greedy, which leaves random sampling out of the program.
    """
    active = state.decoding
    num_known = state.seq_lens + 1
    drafts, match_len, take, index = _propose(state, active, num_known, num_steps, shapes)
    branches = [functools.partial(verify, model, rows=v.rows, max_q_len=v.max_q_len, sampled=sampled) for v in shapes]
    cache, targets = jax.lax.switch(index, [*branches, _idle], state, drafts, take)
    accepted = accepted_lens(drafts, take, targets)
    counts, status = finish(targets, jnp.where(active, accepted + 1, 0), num_known, state.limits, state.stop_ids)
    counts = jnp.where(active, counts, 0)
    width = targets.shape[1]
    state = dataclasses.replace(
        state,
        cache=cache,
        tokens=append(state.tokens, num_known, targets, counts),
        seq_lens=state.seq_lens + counts,
        status=jnp.where(active, status, state.status),
        draft=budget.record(state.draft, match_len, take, accepted) if num_steps else state.draft,
    )
    return state, RoundReport(
        tokens=jnp.where(jnp.arange(width)[None] < counts[:, None], targets, -1),
        counts=counts,
        drafted=take,
        status=state.status,
        rows=jnp.asarray([*(v.rows for v in shapes), 0], jnp.int32)[index],
    )


def _propose(state: DecodeState, active, num_known, num_steps: int, shapes):
    if num_steps == 0:
        drafts = jnp.zeros((active.shape[0], 0), jnp.int32)
        none = jnp.zeros(active.shape, jnp.int32)
        take, index = budget.choose(none.astype(jnp.float32), none, active, num_steps=0, shapes=shapes)
        return drafts, none, take, index
    drafts, match_len = ngram_draft(state.tokens, num_known, num_steps=num_steps)
    # the last allowed token needs no draft behind it
    room = jnp.where(match_len > 0, jnp.clip(state.limits - num_known - 1, 0, num_steps), 0)
    chance = budget.accept_chance(state.draft, match_len)
    take, index = budget.choose(chance, room, active, num_steps=num_steps, shapes=shapes)
    return drafts, match_len, take, index


def _idle(state, drafts, take):
    return state.cache, jnp.zeros((drafts.shape[0], drafts.shape[1] + 1), jnp.int32)
