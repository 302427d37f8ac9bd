"""A draft model's tree against the model itself run over each path: what a node sees."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from tiny_model import tiny

from jattn.combinators.drafter import LanguageModel
from jattn.combinators.model_drafts import propose
from jattn.combinators.state import DecodeState, Status
from jattn.modes import ForwardMode
from jattn.plan import make_plan

TEXT, TOPK, STEPS = [5, 9, 7], 4, 4


def cache_of(num_pages):
    return tiny().new_cache(num_pages=num_pages, page_size=8)


@jax.jit
def last_logits(ids, length):
    hidden, _ = tiny()(ids, cache_of(1), plan_of(length))
    return tiny().logits(hidden)[length - 1]


def plan_of(length):
    one = length[None]
    return make_plan(ForwardMode.EXTEND, one, one, jnp.zeros((1, 1), jnp.int32), page_size=8, num_tokens=8, max_q_len=8)


@functools.cache
def probs_behind(path):
    """The model's next-token probabilities behind the text and a path of drafts, computed anew."""
    ids = [*TEXT, *path]
    padded = jnp.asarray([*ids, *[0] * (8 - len(ids))], jnp.int32)
    return np.asarray(jax.nn.softmax(last_logits(padded, jnp.int32(len(ids)))), np.float64)


def candidates(lineage):
    state = DecodeState.create(
        cache_of(4), num_seqs=1, max_context=32, max_stops=1, num_classes=1, draft_cache=cache_of(4)
    )
    state = dataclasses.replace(
        state,
        tokens=state.tokens.at[0, : len(TEXT)].set(jnp.asarray(TEXT)),
        seq_lens=jnp.asarray([len(TEXT) - 1]),
        limits=jnp.asarray([32]),
        page_table=jnp.asarray([[2, 0, 3, 1]]),
        status=jnp.asarray([int(Status.DECODE)]),
    )
    grow = jax.jit(
        lambda state: propose(LanguageModel(tiny(), 128), state, topk=TOPK, num_steps=STEPS, lineage=lineage)[1]
    )
    return jax.tree.map(lambda x: np.asarray(x)[0], grow(state))


def scores_of_paths(seen):
    """Probability of each candidate's path, by the model run over it."""
    paths, scores = [], []
    for token, parent in zip(seen.tokens.tolist(), seen.parents.tolist(), strict=True):
        above = () if parent < 0 else paths[parent]
        paths.append((*above, token))
        scores.append(probs_behind(above)[token] * (1.0 if parent < 0 else scores[parent]))
    return np.asarray(scores)


def test_a_node_sees_its_own_ancestors_and_by_slot_those_of_another():
    seen = candidates("parent")
    np.testing.assert_allclose(seen.scores, scores_of_paths(seen), rtol=2e-5)
    moved = candidates("slot")
    error = np.abs(moved.scores / scores_of_paths(moved) - 1)
    assert error[: TOPK + TOPK * TOPK].max() < 2e-5  # nothing has changed its slot yet
    assert error.max() > 1e-3
