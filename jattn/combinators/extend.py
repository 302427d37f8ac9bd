"""Prefill in fixed-size chunks: a new prompt length is no new program."""

import dataclasses

import jax
import jax.numpy as jnp

from jattn.combinators.accept import append, finish
from jattn.combinators.drafter import Drafter
from jattn.combinators.model_drafts import read_prompt
from jattn.combinators.state import Decoder, DecodeState, RoundReport, Status
from jattn.modes import ForwardMode
from jattn.plan import make_plan, rows_of
from jattn.sampling import TEMPERATURES, SamplerConfig, SamplingParams, next_tokens


def extend(
    model: Decoder,
    state: DecodeState,
    q_lens: jax.Array,
    *,
    rows: int,
    report_width: int,
    sampler: SamplerConfig = TEMPERATURES,
    drafter: Drafter | None = None,
) -> tuple[DecodeState, RoundReport]:
    """Compute the next `q_lens` prompt tokens of each slot, packed; a slot whose prompt ends gets its first token.

    Args: q_lens: i32[seqs], 0 for a slot that is not prefilling; their sum is at most `rows`.
      sampler: what the program's requests may ask for. drafter: a draft model, which reads the same tokens.
    Returns: the state, and a report with at most one token a slot.
    """
    lens = jnp.where(q_lens > 0, state.seq_lens + q_lens, 0)
    plan = make_plan(
        ForwardMode.EXTEND,
        lens,
        q_lens,
        state.page_table,
        page_size=state.cache.page_size,
        num_tokens=rows,
        max_q_len=rows,
    )
    seq, _, valid = rows_of(plan.cu_q_lens, rows)
    ids = jnp.where(valid, state.tokens[seq, plan.positions], 0)
    hidden, cache = model(ids, state.cache, plan)
    draft = state.draft if drafter is None else read_prompt(drafter, state, hidden, ids, plan, q_lens)
    last = jnp.clip(plan.cu_q_lens[1:] - 1, 0, rows - 1)
    logits = model.logits(hidden[last])
    chosen = next_tokens(
        logits, state.sampling, lens, config=sampler, history=state.history(lens, logits.shape[1], sampler)
    )
    first = chosen.tokens[:, None]
    ends = (q_lens > 0) & (lens == state.prompt_lens)
    counts, status = finish(first, ends.astype(jnp.int32), state.prompt_lens, state.limits, state.stop_ids)
    status = jnp.where(ends, status, state.status)
    reported = jax.tree.map(lambda x: jnp.repeat(x[:, None], report_width, axis=1), chosen)
    new = jnp.where(jnp.arange(report_width)[None] < counts[:, None], reported.tokens, -1)
    state = dataclasses.replace(
        state,
        cache=cache,
        tokens=append(state.tokens, state.prompt_lens, first, counts),
        seq_lens=jnp.where(q_lens > 0, lens, state.seq_lens),
        status=status,
        draft=draft,
    )
    return state, RoundReport(
        tokens=new,
        counts=counts,
        drafted=jnp.zeros_like(counts),
        status=status,
        rows=jnp.int32(rows),
        logprobs=reported.logprobs,
    )


def admit(
    state: DecodeState,
    slot: jax.Array,
    tokens: jax.Array,
    lens: jax.Array,
    stop_ids: jax.Array,
    sampling: SamplingParams,
) -> DecodeState:
    """Put a request into a slot.

    Args: slot: i32[]. tokens: i32[max_context], what is known of it. lens: i32[3], how many that is, how many of them
      are the prompt, and the token limit. stop_ids: i32[max_stops]. sampling: of one request.
    """
    counts = {name: getattr(state.draft, name) for name in ("accepted", "rejected", "cached", "missed")}
    draft = dataclasses.replace(
        state.draft, **{name: held.at[slot].set(0) for name, held in counts.items() if held is not None}
    )
    return dataclasses.replace(
        state,
        tokens=state.tokens.at[slot].set(tokens),
        seq_lens=state.seq_lens.at[slot].set(0),
        prompt_lens=state.prompt_lens.at[slot].set(lens[0]),
        generated_from=state.generated_from.at[slot].set(lens[1]),
        limits=state.limits.at[slot].set(lens[2]),
        stop_ids=state.stop_ids.at[slot].set(stop_ids),
        status=state.status.at[slot].set(jnp.int32(Status.PREFILL)),
        sampling=jax.tree.map(lambda every, one: every.at[slot].set(one), state.sampling, sampling),
        draft=draft,
    )


def release(state: DecodeState, slot: jax.Array) -> DecodeState:
    """Free a slot: later rounds pass it over. slot: i32[]."""
    return dataclasses.replace(state, status=state.status.at[slot].set(jnp.int32(Status.FREE)))
