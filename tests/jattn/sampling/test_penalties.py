"""Penalties and biases against plain NumPy in float64, over drawn texts."""

import dataclasses

import cases
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.sampling import SamplerConfig, SamplingParams, next_tokens
from jattn.sampling.penalties import History, biased, penalised

VOCAB, SEQS, CONTEXT = 24, 6, 20
ROWS = np.array([0, 0, 1, 2, 3, 3, 4, 5])


def drawn(seed):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, (SEQS, CONTEXT)).astype(np.int32)
    known = rng.integers(1, CONTEXT + 1, SEQS).astype(np.int32)
    start = np.minimum(rng.integers(1, CONTEXT + 1, SEQS), known).astype(np.int32)
    path = np.where(rng.random((len(ROWS), 5)) < 0.5, rng.integers(0, VOCAB, (len(ROWS), 5)), -1).astype(np.int32)
    return tokens, known, start, path


def oracle(logits, *, text, generated, repetition, presence, frequency):
    logits = logits.astype(np.float64).copy()
    for token in set(text) | set(generated):
        logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
    for token in set(generated):
        logits[token] -= presence + frequency * generated.count(token)
    return logits


@pytest.mark.parametrize("seed", range(4))
def test_penalties_count_prompt_answer_and_the_drafts_on_the_path(seed):
    tokens, known, start, path = drawn(seed)
    rng = np.random.default_rng(seed)
    params = dataclasses.replace(
        SamplingParams.greedy(SEQS),
        repetition_penalty=jnp.asarray([1.0, 1.3, 0.7, 2.0, 1.0, 1.1], jnp.float32),
        presence_penalty=jnp.asarray([0.0, 0.5, -1.5, 0.0, 2.0, 1.0], jnp.float32),
        frequency_penalty=jnp.asarray([0.0, 0.25, 0.0, -2.0, 1.0, 0.5], jnp.float32),
    )
    logits = rng.normal(size=(len(ROWS), VOCAB)).astype(np.float32) * 3
    text_of = History.of(jnp.asarray(tokens), jnp.asarray(known), jnp.asarray(start), VOCAB)
    history = text_of.at(jnp.asarray(ROWS), jnp.asarray(path))
    got = np.asarray(penalised(jnp.asarray(logits), params.at(jnp.asarray(ROWS)), history))
    for row, seq in enumerate(ROWS):
        text = tokens[seq, : known[seq]].tolist()
        generated = text[start[seq] :] + [token for token in path[row].tolist() if token >= 0]
        knobs = [float(x[seq]) for x in (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)]
        want = oracle(
            logits[row], text=text, generated=generated, repetition=knobs[0], presence=knobs[1], frequency=knobs[2]
        )
        np.testing.assert_allclose(got[row], want, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(got[:2], logits[:2])  # bit by bit: a request without penalties


def test_biases_are_added_to_their_own_request():
    params = dataclasses.replace(
        SamplingParams.greedy(3, num_biases=2),
        bias_ids=jnp.asarray([[5, -1], [-1, -1], [0, 23]], jnp.int32),
        bias_values=jnp.asarray([[2.5, 9.0], [9.0, 9.0], [-100.0, 1.0]], jnp.float32),
    )
    logits = cases.draw(3, 3, VOCAB)
    want = logits.astype(np.float32).copy()
    want[0, 5] += 2.5
    want[2, 0] -= 100
    want[2, 23] += 1
    np.testing.assert_allclose(np.asarray(biased(jnp.asarray(logits, jnp.float32), params)), want, rtol=1e-6)


def test_log_probabilities_are_of_the_logits_as_they_came():
    logits = cases.draw(4, 3, VOCAB, amp=3).astype(np.float32)
    logits[1, [3, 9]] = 8.0  # a tie: the lower id first
    params = dataclasses.replace(
        SamplingParams.greedy(3, num_biases=1),
        bias_ids=jnp.full((3, 1), 7, jnp.int32),
        bias_values=jnp.full((3, 1), 100.0, jnp.float32),
    )
    config = SamplerConfig(random=False, num_biases=1, num_logprobs=3)
    chosen = next_tokens(jnp.asarray(logits), params, jnp.arange(3, dtype=jnp.int32), config=config)
    assert chosen.tokens.tolist() == [7, 7, 7] and chosen.logprobs is not None
    x = logits.astype(np.float64)
    want = x - np.log(np.exp(x).sum(-1, keepdims=True))
    np.testing.assert_allclose(np.asarray(chosen.logprobs.own), want[:, 7], rtol=1e-5, atol=1e-5)
    order = np.argsort(-want, axis=-1, kind="stable")[:, :3]
    np.testing.assert_array_equal(np.asarray(chosen.logprobs.top_ids), order)
    np.testing.assert_allclose(chosen.logprobs.top, np.take_along_axis(want, order, -1), rtol=1e-5, atol=1e-5)


def test_penalties_without_a_history_are_refused():
    with pytest.raises(ValueError, match="without history"):
        next_tokens(
            jnp.zeros((1, VOCAB)),
            SamplingParams.greedy(1),
            jnp.zeros(1, jnp.int32),
            config=SamplerConfig(penalties=True),
        )
