"""Law: whatever is drafted, verifying and accepting give the tokens that decoding one at a time gives."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from started import NEW, PROMPTS, SEQS, decode, started
from tiny_model import CONFIG

from jattn.combinators.accept import accepted_lens, append
from jattn.combinators.verify import verify
from jattn.sampling import SamplerConfig

STEPS = 4


@pytest.fixture(scope="module")
def start():
    """The state behind the prompts, and the round: verify, accept, append."""
    graphdef, params, state = started(page_size=4)

    @jax.jit
    def advance(params, state, drafts, take):
        rows = SEQS * (1 + STEPS)
        cache, targets = verify(
            nnx.merge(graphdef, params),
            state,
            drafts,
            take,
            rows=rows,
            max_q_len=1 + STEPS,
            sampler=SamplerConfig(random=False),
        )
        counts = 1 + accepted_lens(drafts, take, targets.tokens)
        tokens = append(state.tokens, state.seq_lens + 1, targets.tokens, counts)
        return dataclasses.replace(state, cache=cache, tokens=tokens, seq_lens=state.seq_lens + counts), counts

    return state, lambda *args: advance(params, *args)


@pytest.fixture(scope="module")
def greedy(start):
    def nothing(_):
        return np.full((SEQS, STEPS), -1, np.int32), np.zeros(SEQS, np.int32)

    tokens, rounds = decode(start[0], start[1], nothing)
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

    tokens, rounds = decode(start[0], start[1], propose)
    np.testing.assert_array_equal(tokens, greedy)
    kept = {count for counts in rounds for count in counts}
    assert kept == {1} if wrong == 1 else 1 + STEPS in kept
    assert len(rounds) < NEW - 1 or wrong == 1
