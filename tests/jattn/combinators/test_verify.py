"""Law: whatever is drafted, verifying and accepting give the tokens that decoding one at a time gives."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_model import CONFIG, tiny

from jattn.cache import PagedKV
from jattn.combinators.accept import accepted_lens, append
from jattn.combinators.extend import extend
from jattn.combinators.state import DecodeState, Status
from jattn.combinators.verify import verify

PROMPTS = ([5], [9, 4, 9, 4, 9], list(range(17, 30)))
SEQS, STEPS, PAGE, CONTEXT, PREFILL = len(PROMPTS), 4, 4, 96, 32
NEW = 24  # tokens a request


@pytest.fixture(scope="module")
def start():
    """The state behind the prompts, each request's first token known, and the round: verify, accept, append."""
    graphdef, params = nnx.split(tiny())
    pages = np.random.default_rng(0).permutation(SEQS * CONTEXT // PAGE)
    cache = PagedKV.create(tiny().spec, num_layers=CONFIG.num_layers, num_pages=len(pages), page_size=PAGE)
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

    @jax.jit
    def advance(params, state, drafts, take):
        rows = SEQS * (1 + STEPS)
        cache, targets = verify(
            nnx.merge(graphdef, params), state, drafts, take, rows=rows, max_q_len=1 + STEPS, sampled=False
        )
        counts = 1 + accepted_lens(drafts, take, targets)
        tokens = append(state.tokens, state.seq_lens + 1, targets, counts)
        return dataclasses.replace(state, cache=cache, tokens=tokens, seq_lens=state.seq_lens + counts), counts

    return state, lambda *args: advance(params, *args)


def decode(start, propose):
    """Rounds until every request has NEW tokens. Returns i32[seqs, NEW], and the counts of each round."""
    (state, advance), rounds = start, []
    while (state.seq_lens + 1 - state.prompt_lens).min() < NEW:
        state, counts = advance(state, *map(jnp.asarray, propose(np.asarray(state.seq_lens))))
        rounds.append(counts.tolist())
    tokens = np.asarray(state.tokens)
    return np.stack([row[len(prompt) :][:NEW] for row, prompt in zip(tokens, PROMPTS, strict=True)]), rounds


@pytest.fixture(scope="module")
def greedy(start):
    def nothing(_):
        return np.full((SEQS, STEPS), -1, np.int32), np.zeros(SEQS, np.int32)

    tokens, rounds = decode(start, nothing)
    assert rounds == [[1] * SEQS] * (NEW - 1)
    assert len(set(tokens[2].tolist())) > 4  # a text in which a wrong key would show
    return tokens


@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_any_drafts_verified_give_the_greedy_tokens(start, greedy, wrong):
    rng = np.random.default_rng(int(10 * wrong))

    def propose(seq_lens):
        drafts = np.full((SEQS, STEPS), -1, np.int32)
        for b, prompt in enumerate(PROMPTS):
            right = greedy[b, seq_lens[b] + 1 - len(prompt) :][:STEPS]
            drafts[b, : len(right)] = right
        spoiled = rng.random(drafts.shape) < wrong
        drafts = np.where(spoiled, (drafts + rng.integers(1, 100, drafts.shape)) % CONFIG.vocab_size, drafts)
        take = np.full(SEQS, STEPS) if wrong == 0 else rng.integers(0, STEPS + 1, SEQS)
        return drafts.astype(np.int32), take.astype(np.int32)

    tokens, rounds = decode(start, propose)
    np.testing.assert_array_equal(tokens, greedy)
    kept = {count for counts in rounds for count in counts}
    assert kept == {1} if wrong == 1 else 1 + STEPS in kept
    assert len(rounds) < NEW - 1 or wrong == 1
