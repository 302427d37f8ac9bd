"""A head's tree against the head run over each path anew: which hidden state, token and ancestors a node has."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draft_heads import KINDS, draft_head
from tiny_model import tiny

from jattn.combinators.costs import Variant
from jattn.combinators.extend import extend
from jattn.combinators.model_drafts import propose
from jattn.combinators.round import model_round
from jattn.combinators.state import DecodeState, Status
from jattn.models.draft_head import WithStreams
from jattn.modes import ForwardMode
from jattn.plan import make_plan
from jattn.sampling import SamplerConfig

TEXT, TOPK, STEPS, NODES, ROOM = [5, 9, 7, 5, 9, 3, 11], 3, 3, 8, 24
quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def cache_of(model):
    return model.new_cache(num_pages=8, page_size=4, dtype=jnp.float32)


def run(target, head, ids, drafts, length, num_drafts):
    """Logits behind the last row of the head over `length` known tokens and a path."""
    plan = plan_of(length - 1)
    hidden, _ = target(ids, cache_of(head_target(target)), plan)
    features = head.features(hidden)
    row = jnp.arange(ROOM)
    ahead = jnp.roll(ids, -1)

    def level(at, held):
        features, tokens = held
        out, _ = head(tokens, features, cache_of(head), plan_of(length - 1 + at))
        put = row == length - 1 + at
        return jnp.where(put[:, None], jnp.roll(out, 1, axis=0), features), jnp.where(put, drafts[at], tokens)

    features, tokens = jax.lax.fori_loop(0, num_drafts, level, (features, ahead))
    out, _ = head(tokens, features, cache_of(head), plan_of(length - 1 + num_drafts))
    return head.logits(out[length - 2 + num_drafts][None])[0]


def head_target(model):
    return model.model if isinstance(model, WithStreams) else model


def plan_of(length):
    one = length[None]
    table = jnp.arange(ROOM // 4)[None]
    return make_plan(ForwardMode.EXTEND, one, one, table, page_size=4, num_tokens=ROOM, max_q_len=ROOM)


def scores_of_paths(target, head, known, seen):
    """Probability of each candidate's path, by the head run over it."""
    ids, place = np.zeros(ROOM, np.int32), {token: i for i, token in enumerate(np.asarray(head.token_ids()).tolist())}
    ids[: len(known)] = known
    logits_behind = quick(functools.partial(run, target, head))

    @functools.cache
    def probs_behind(path):
        drafts = jnp.asarray([*path, *[0] * (STEPS - len(path))], jnp.int32)
        logits = logits_behind(jnp.asarray(ids), drafts, jnp.int32(len(known)), jnp.int32(len(path)))
        return np.asarray(jax.nn.softmax(logits), np.float64)

    paths, scores = [], []
    for token, parent in zip(seen.tokens.tolist(), seen.parents.tolist(), strict=True):
        above = () if parent < 0 else paths[parent]
        paths.append((*above, token))
        scores.append(probs_behind(above)[place[token]] * (1.0 if parent < 0 else scores[parent]))
    return np.asarray(scores)


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k == "eagle3" else pytest.mark.long) for k in KINDS])
def test_candidates_are_those_of_the_head_run_over_each_path(kind):
    model = tiny()
    head = draft_head(model, kind, num_ids=40)
    target = WithStreams(model, head.taps) if head.taps else model
    shapes = (Variant(rows=1, max_q_len=1, cost=1.0), Variant(rows=NODES, max_q_len=NODES, cost=1.0))
    state = DecodeState.create(
        cache_of(model),
        num_seqs=1,
        max_context=ROOM,
        max_stops=1,
        num_classes=5,
        draft_cache=cache_of(head),
        draft_features=jnp.zeros((1, STEPS + 1, head.feature_dim)),
    )
    state = dataclasses.replace(
        state,
        tokens=state.tokens.at[0, : len(TEXT)].set(jnp.asarray(TEXT)),
        prompt_lens=jnp.asarray([len(TEXT)]),
        limits=jnp.asarray([ROOM]),
        page_table=jnp.asarray([[2, 0, 5, 3, 1, 4]]),
        status=jnp.asarray([int(Status.PREFILL)]),
        sampling=dataclasses.replace(
            state.sampling, temperature=jnp.ones(1), accept_threshold_single=jnp.zeros(1)
        ),  # the first child is always right
    )
    sampler = SamplerConfig(thresholds=True)
    chunk = quick(
        lambda state, q_lens: extend(target, state, q_lens, rows=4, report_width=1, drafter=head, sampler=sampler)[0]
    )
    for q_len in (3, 1, 3):  # the row at a chunk's end waits for the token behind it
        state = chunk(state, jnp.asarray([q_len]))
    grow = quick(lambda state: propose(head, state, topk=TOPK, num_steps=STEPS)[1])
    turn = quick(
        lambda state: model_round(
            target, head, state, topk=TOPK, num_steps=STEPS, num_nodes=NODES, shapes=shapes, sampler=sampler
        )
    )
    counts = []
    for _ in range(3):
        seen = jax.tree.map(lambda x: np.asarray(x)[0], grow(state))
        known = np.asarray(state.tokens)[0, : int(state.seq_lens[0]) + 1].tolist()
        np.testing.assert_allclose(seen.scores, scores_of_paths(target, head, known, seen), rtol=1e-4)
        state, report = turn(state)
        counts.append(int(report.counts[0]))
    assert max(counts) > 1  # so that the head has caught up over several rows
