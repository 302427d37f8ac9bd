"""Penalties, biases and log-probabilities in served requests: the same with and without drafts, and as a loop says."""

import jax.numpy as jnp
import numpy as np
import pytest
from engines import BRANCHING, serve, tiny_engine
from tiny_model import tiny

from jattn.modes import ForwardMode
from jattn.plan import make_plan
from jattn.sampling import SamplerConfig

EVERYTHING = SamplerConfig(penalties=True, num_biases=3, num_logprobs=2)
PENALTIES = dict(repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2)
BIAS = {9: 1.5, 4: 0.75, 77: -100.0}
OPTIONS = dict(max_new_tokens=24, seed=3, top_p=0.95, logit_bias=BIAS, **PENALTIES)
TEMPERATURES = (0.0, 0.05)


def engine(**kwargs):
    # 160 tokens of pages: the requests cannot all stay, so some are taken back with what they had generated
    return tiny_engine(**{"page_size": 4, "num_pages": 40, "sampler": EVERYTHING, **kwargs})


def answers(engine):
    return {t: serve(engine, BRANCHING, temperature=t, **OPTIONS) for t in TEMPERATURES}


@pytest.fixture(scope="module")
def plain():
    return answers(engine(num_steps=0))


def logits_of(ids):
    """The model's logits behind each token of a text, float64."""
    model = tiny()
    cache = model.new_cache(num_pages=1, page_size=128)
    n = np.array([len(ids)])
    plan = make_plan(ForwardMode.EXTEND, n, n, np.array([[0]]), page_size=128)
    hidden, _ = model(jnp.asarray(ids, jnp.int32), cache, plan)
    return np.asarray(model.logits(hidden), np.float64)


def moved(logits, prompt, generated):
    logits = logits.copy()
    for token in set(prompt) | set(generated):
        logits[token] *= 1 / 1.2 if logits[token] > 0 else 1.2
    for token in set(generated):
        logits[token] -= 0.3 + 0.2 * generated.count(token)
    for token, value in BIAS.items():
        logits[token] += value
    return logits


def test_greedy_tokens_and_log_probabilities_are_those_of_a_loop(plain):
    changed = False
    for prompt, sequence in zip(BRANCHING, plain[0.0], strict=True):
        logits = logits_of([*prompt, *sequence.new_ids])[len(prompt) - 1 : -1]
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        for at, (token, row) in enumerate(zip(sequence.new_ids, logits, strict=True)):
            assert token == moved(row, prompt, sequence.new_ids[:at]).argmax()
            changed |= token != row.argmax()
            assert sequence.logprobs[at].logprob == pytest.approx(logprobs[at, token], abs=2e-4)
            order = np.argsort(-logprobs[at])[:2]
            assert [token for token, _ in sequence.logprobs[at].top] == order.tolist()
            np.testing.assert_allclose([p for _, p in sequence.logprobs[at].top], logprobs[at, order], atol=2e-4)
        assert len(sequence.logprobs) == len(sequence.new_ids)
    assert changed  # the penalties did something


@pytest.mark.parametrize(
    "draft",
    [
        pytest.param(dict(num_steps=5, topk=3, num_nodes=12), marks=pytest.mark.long),
        dict(num_steps=2, topk=2, num_nodes=6, drafter=tiny()),
        pytest.param(dict(num_steps=7), marks=pytest.mark.long),
        pytest.param(dict(num_steps=3, drafter=tiny()), marks=pytest.mark.long),
    ],
    ids=["n-gram tree", "model tree", "n-gram chain", "model chain"],
)
def test_drafts_change_neither_tokens_nor_log_probabilities(plain, draft):
    drafted = answers(engine(**draft))
    for t in TEMPERATURES:
        assert any(sequence.num_round_tokens > sequence.num_rounds for sequence in drafted[t])  # some were accepted
        for ours, theirs in zip(drafted[t], plain[t], strict=True):
            assert ours.new_ids == theirs.new_ids
            np.testing.assert_allclose(
                [p.logprob for p in ours.logprobs], [p.logprob for p in theirs.logprobs], atol=1e-4
            )


def test_a_model_that_drafts_for_itself_is_almost_never_rejected():
    sampler = SamplerConfig(rejection=True)
    drafting = engine(num_steps=3, drafter=tiny(), sampler=sampler, num_pages=200)
    sequences = serve(drafting, BRANCHING, temperature=1.0, max_new_tokens=24, seed=3)
    kept = sum(s.num_round_tokens for s in sequences) / sum(s.num_rounds for s in sequences)
    assert kept > 3.6  # of 4; the last round of a request has room for fewer
