"""Sampled answers with trees of a draft head, through the engine: the target's distribution, by the exact law."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draft_heads import draft_head
from engines import tiny_engine
from tiny_model import tiny

from jattn.combinators.draft_shapes import NO_DRAFTS, DraftShape
from jattn.models.draft_head import DraftHead
from jattn.serving.request import Request
from jattn.training.dense import read

PROMPT, NEW, REQUESTS = [3, 4, 5], 4, 300
MORE = 8  # tokens behind those that are looked at: near its end a request has no room for a whole tree
TEMPERATURE = 0.05  # at 1 a random model's two best tokens are alike, and few faults would be seen
DENSE = jax.jit(read)
CHI_SQUARE = 44.3  # of 15 degrees of freedom: exceeded with probability 1e-4


@functools.cache
def next_probs(model, known):
    """The two likeliest tokens behind a text, and their probabilities among themselves, by a dense forward."""
    ids = jnp.zeros((1, len(PROMPT) + NEW), jnp.int32).at[0, : len(known)].set(jnp.asarray(known))
    hidden, _ = DENSE(model, ids, jnp.ones_like(ids))
    logits, tokens = jax.lax.top_k(model.logits(hidden[0, len(known) - 1][None])[0], 2)
    return tokens.tolist(), np.asarray(jax.nn.softmax(logits / TEMPERATURE), np.float64)


def law(model):
    """Every answer that top_k=2 can give, with its probability."""
    found = {}
    for path in itertools.product((0, 1), repeat=NEW):
        known, probability = tuple(PROMPT), 1.0
        for branch in path:
            tokens, probs = next_probs(model, known)
            known, probability = (*known, tokens[branch]), probability * probs[branch]
        found[known[len(PROMPT) :]] = probability
    return found


@pytest.mark.long
def test_answers_drawn_with_a_tree_follow_the_exact_law_of_the_target():
    model = tiny()
    want = law(model)
    assert len(want) == 2**NEW and abs(sum(want.values()) - 1) < 1e-6
    body = draft_head(model, "eagle3").body
    drafted = sorted({token for answer in want for token in answer[1:]})  # so that a random head is often right
    head = DraftHead(body, model, token_ids=jnp.asarray(drafted, jnp.int32), taps=(0, 2, 3))
    tree = DraftShape(num_steps=2, topk=8, num_nodes=16)
    engine = tiny_engine(model=model, drafter=head, num_steps=0, draft_shapes=(NO_DRAFTS, tree))
    engine.adaptive.choose = lambda num_active: 1 if engine.num_rounds % 5 else 0  # now and then a plain round
    kept = rounds = 0
    counts = dict.fromkeys(want, 0)
    for first in range(0, REQUESTS, 3):
        options: dict[str, Any] = dict(prompt_ids=PROMPT, temperature=TEMPERATURE, top_k=2, max_new_tokens=NEW + MORE)
        sequences = [engine.submit(Request(**options, seed=seed)) for seed in range(first, first + 3)]
        for _ in engine.run():
            pass
        for sequence in sequences:
            counts[tuple(sequence.new_ids[:NEW])] += 1  # another answer has probability 0: KeyError
            kept, rounds = kept + sequence.num_round_tokens, rounds + sequence.num_rounds
    assert kept / rounds > 1.1  # some of these tokens were drafts
    expected = REQUESTS * np.asarray([want[answer] for answer in want])
    seen = np.asarray([counts[answer] for answer in want])
    assert ((seen - expected) ** 2 / expected).sum() < CHI_SQUARE
    even = np.full_like(expected, expected.mean())  # a fault of such a size would be seen
    assert ((seen - even) ** 2 / even).sum() > CHI_SQUARE
