"""Drafts of a layer a step, against the layers run over the whole text in float64, without a cache."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draft_heads import layer_head
from float64_decoder import array, hidden_of, through_next
from tiny_model import tiny

from jattn.combinators.costs import Variant
from jattn.combinators.extend import extend
from jattn.combinators.layer_drafts import check_layers
from jattn.combinators.model_drafts import propose
from jattn.combinators.round import model_round
from jattn.combinators.state import DecodeState, Status
from jattn.sampling import SamplerConfig

TEXTS, ROOM = [[5, 9, 7, 5, 9, 3, 11, 2], [4], [8, 1, 1, 6, 2]], 40
CHUNKS = [(3, 0, 1), (1, 1, 2), (4, 0, 2)]  # rows of each text in a prefill step: the first has fewer than layers
quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def rollout(model, head, known):
    """The drafts behind known tokens, and the probability of each path."""
    rows, drafts, scores = hidden_of(model, known[:-1]), [], []
    states, table, ids = rows, array(head.embed), np.asarray(head.token_ids())
    for layer in head.body.layers:
        text = [*known, *drafts]
        given = states if head.chained else rows
        states = through_next(layer, table[text[len(text) - len(rows) :]], given)
        logits = array(head.rows) @ states[-1]
        probs = np.exp(logits - logits.max())
        probs /= probs.sum()
        drafts.append(int(ids[probs.argmax()]))
        scores.append(probs.max() * (scores[-1] if scores else 1.0))
    return drafts, scores


def started(model, head):
    """A state whose requests wait for their prefill; of the first every draft is right, the others are greedy."""
    pool = dict(num_pages=31, page_size=4, dtype=jnp.float32)
    state = DecodeState.create(
        model.new_cache(**pool),
        num_seqs=3,
        max_context=ROOM,
        max_stops=1,
        num_classes=5,
        draft_cache=head.new_cache(**pool),
        draft_features=jnp.full((3, 2 * head.ahead, head.feature_dim), jnp.nan),  # as num_steps + ahead
    )
    tokens, table = np.zeros((3, ROOM), np.int32), np.random.default_rng(1).permutation(30).reshape(3, 10) + 1
    for row, text in zip(tokens, TEXTS, strict=True):
        row[: len(text)] = text
    return dataclasses.replace(
        state,
        tokens=jnp.asarray(tokens),
        prompt_lens=jnp.asarray([len(text) for text in TEXTS]),
        limits=jnp.full(3, ROOM),
        page_table=jnp.asarray(table),
        status=jnp.full(3, int(Status.PREFILL)),
        sampling=dataclasses.replace(
            state.sampling,
            temperature=jnp.asarray([1.0, 0.0, 0.0]),
            accept_threshold_single=jnp.asarray([0.0, 1.0, 1.0]),
        ),
    )


@pytest.mark.parametrize(
    ("layers", "chained"),
    [(2, True), pytest.param(3, True, marks=pytest.mark.long), pytest.param(3, False, marks=pytest.mark.long)],
)
def test_drafts_are_those_of_the_layers_run_over_the_whole_text(layers, chained):
    model = tiny(num_layers=1)
    drafted = np.random.default_rng(3).permutation(model.config.vocab_size)[:40].tolist()
    head = layer_head(model, layers, chained=chained, token_ids=drafted)
    sampler = SamplerConfig(thresholds=True)
    shapes = (Variant(rows=3 * (layers + 1), max_q_len=layers + 1, cost=1.0),)
    chunk = quick(
        lambda state, q_lens: extend(model, state, q_lens, rows=8, report_width=1, drafter=head, sampler=sampler)[0]
    )
    options: dict[str, Any] = dict(topk=1, num_steps=layers)
    more: dict[str, Any] = dict(num_nodes=layers + 1, shapes=shapes, sampler=sampler, may_skip=False)
    turn = quick(
        lambda state: (propose(head, state, **options)[1], *model_round(model, head, state, **options, **more))
    )
    state, counts = started(model, head), []
    for q_lens in CHUNKS:
        state = chunk(state, jnp.asarray(q_lens))
    for _ in range(4):
        before, (seen, state, report) = state, turn(state)
        for at, length in enumerate(before.seq_lens.tolist()):
            drafts, scores = rollout(model, head, np.asarray(before.tokens)[at, : length + 1].tolist())
            assert seen.tokens[at].tolist() == drafts
            np.testing.assert_allclose(np.asarray(seen.scores)[at], scores, rtol=1e-4)
            assert seen.parents[at].tolist() == [*range(-1, layers - 1)]
        counts.append(report.counts.tolist())
    # all drafts of a request kept, of others none: rows that were read beside drafts were read again
    assert max(max(row) for row in counts) == layers + 1 and min(min(row) for row in counts) == 1


@pytest.mark.parametrize(("topk", "num_steps"), [(1, 2), (1, 4), (2, 3)])
def test_a_head_of_a_layer_a_step_drafts_a_chain_of_its_layers(topk, num_steps):
    with pytest.raises(ValueError, match="with a head of 3 layers, one a step: it drafts a chain of 3"):
        check_layers(3, topk=topk, num_steps=num_steps)
