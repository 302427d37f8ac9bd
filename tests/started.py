"""Requests of a tiny model in the middle of decoding, for tests of rounds."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tiny_model import tiny

from jattn.combinators.extend import extend
from jattn.combinators.state import DecodeState, Status

PROMPTS = ([5], [9, 4, 9, 4, 9], list(range(17, 30)))
SEQS, CONTEXT, PREFILL = len(PROMPTS), 96, 32
NEW = 24  # tokens a request that `decode` waits for


def started(page_size: int, kv_dtype: str | None = None):
    """(graphdef, params, state): the prompts prefilled over shuffled pages, each request's first token known."""
    model = tiny(kv_dtype)
    graphdef, params = nnx.split(model)
    pages = np.random.default_rng(0).permutation(SEQS * -(-CONTEXT // page_size))
    cache = model.new_cache(num_pages=len(pages), page_size=page_size)
    state = DecodeState.create(cache, num_seqs=SEQS, max_context=CONTEXT, max_stops=1, num_classes=1)
    lens = np.asarray([len(prompt) for prompt in PROMPTS], np.int32)
    tokens = np.zeros((SEQS, CONTEXT), np.int32)
    for row, prompt in zip(tokens, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    state = dataclasses.replace(
        state,
        tokens=jnp.asarray(tokens),
        prompt_lens=jnp.asarray(lens),
        limits=jnp.full(SEQS, CONTEXT),
        page_table=jnp.asarray(pages.reshape(SEQS, -1)),
        status=jnp.full(SEQS, Status.PREFILL, jnp.int32),
    )
    prefill = jax.jit(lambda params, *args: extend(nnx.merge(graphdef, params), *args, rows=PREFILL, report_width=1))
    state, report = prefill(params, state, jnp.asarray(lens))
    assert report.counts.tolist() == [1] * SEQS and state.decoding.all()
    return graphdef, params, state


def decode(state: DecodeState, advance, propose):
    """Rounds until every request has NEW tokens. Returns i32[seqs, NEW], and the counts of each round.

    Args: advance: (state, *drafts) -> state, counts. propose: seq_lens -> drafts, a tuple of arrays.
    """
    rounds = []
    while (state.seq_lens + 1 - state.prompt_lens).min() < NEW:
        state, counts = advance(state, *map(jnp.asarray, propose(np.asarray(state.seq_lens))))
        rounds.append(counts.tolist())
    tokens = np.asarray(state.tokens)
    return np.stack([row[len(prompt) :][:NEW] for row, prompt in zip(tokens, PROMPTS, strict=True)]), rounds
