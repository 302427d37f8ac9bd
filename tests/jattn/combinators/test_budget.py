"""How many drafts to verify: against every threshold and shape tried by hand, over drawn batches in one call."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.combinators import budget
from jattn.combinators.budget import accept_chance, record
from jattn.combinators.costs import Variant, variants
from jattn.combinators.ngram import MAX_MATCH, NUM_CLASSES
from jattn.combinators.state import DraftState

SIZES = [(1, 7), (3, 7), (8, 3), (4, 0), (2, 15)]


@functools.cache
def chosen(num_seqs, num_steps, kind="cpu"):
    """800 drawn batches, and what the combinator chose for each."""
    rng = np.random.default_rng(num_seqs * 100 + num_steps)
    shapes = variants(num_seqs=num_seqs, num_steps=num_steps, kind=kind)
    chance = (rng.random((800, num_seqs)) ** rng.choice([0.2, 1, 3], (800, 1))).astype(np.float32)
    room = rng.integers(0, num_steps + 1, (800, num_seqs)).astype(np.int32)
    room[::2] = num_steps
    active = rng.random((800, num_seqs)) < rng.choice([0.0, 0.3, 0.9, 1.0], (800, 1))
    choose = functools.partial(budget.choose, num_steps=num_steps, shapes=shapes)
    take, index = jax.jit(jax.vmap(choose))(chance, room, active)
    return shapes, chance, room, active, np.asarray(take), np.asarray(index)


def wishes(chance, room, active, num_steps):
    """Drafts of each request under each threshold: those whose chance to be reached and right is at least it."""
    for threshold in budget._THRESHOLDS:
        take = []
        for p, most, on in zip(chance, room, active, strict=True):
            n = 0
            while n < num_steps and p ** np.float32(n + 1) >= threshold:
                n += 1
            take.append(int(min(n, most)) if on else 0)
        yield take


def gain(take, chance, active):
    """Expected tokens of a round: one a request, and each draft with the chance that it is kept."""
    drafts = sum(float(p) ** i for n, p in zip(take, chance, strict=True) for i in range(1, n + 1))
    return float(np.sum(active)) + drafts


def price(take, active, shapes):
    """Cheapest shape that holds the rows, and its index; infinite where none does."""
    rows, width = sum(take) + int(np.sum(active)), 1 + max(take)
    fits = [(s.cost, i) for i, s in enumerate(shapes) if s.rows >= rows and s.max_q_len >= width]
    return min(fits, default=(np.inf, None))


@pytest.mark.parametrize(("num_seqs", "num_steps"), SIZES)
def test_the_choice_is_the_best_of_all_thresholds_and_shapes(num_seqs, num_steps):
    shapes, chance, room, active, takes, indices = chosen(num_seqs, num_steps)
    for c, r, a, take, index in zip(chance, room, active, takes, indices, strict=True):
        if not a.any():
            assert index == len(shapes) and not take.any()
            continue
        options = list(wishes(c, r, a, num_steps))
        best = max(gain(option, c, a) / price(option, a, shapes)[0] for option in options)
        assert take.tolist() in options
        cost, at = price(take.tolist(), a, shapes)
        assert index == at
        assert gain(take.tolist(), c, a) / cost == pytest.approx(best, rel=1e-5)
    assert set(indices) == set(range(len(shapes) + 1))  # every shape is chosen by some batch


@pytest.mark.parametrize(("num_seqs", "num_steps"), SIZES)
def test_the_shape_holds_the_rows_and_nobody_exceeds_their_room(num_seqs, num_steps):
    shapes, _, room, active, takes, indices = chosen(num_seqs, num_steps)
    sizes = np.array([(s.rows, s.max_q_len) for s in shapes] + [(0, 1)])
    assert (takes.sum(1) + active.sum(1) <= sizes[indices, 0]).all()
    assert (1 + takes.max(1) <= sizes[indices, 1]).all()
    assert (takes <= np.where(active, room, 0)).all() and (takes >= 0).all()


def test_a_tight_set_of_shapes_is_respected():
    """Twelve rows are worth it, but the largest shape has five: the choice must still hold its rows."""
    shapes = (Variant(rows=3, max_q_len=1, cost=1.0), Variant(rows=5, max_q_len=4, cost=1.01))
    choose = functools.partial(budget.choose, num_steps=3, shapes=shapes)
    for chances in ([0.99, 0.99, 0.99], [0.99, 0.1, 0.1], [0.9, 0.6, 0.1]):
        take, index = choose(jnp.array(chances), jnp.full(3, 3, jnp.int32), jnp.ones(3, bool))
        assert int(take.sum()) + 3 <= shapes[int(index)].rows
        assert 1 + int(take.max()) <= shapes[int(index)].max_q_len


def belief(accepted=0.0, rejected=0.0, seqs=1):
    fill = functools.partial(jnp.full, (seqs, NUM_CLASSES), dtype=jnp.float32)
    return DraftState(accepted=fill(accepted), rejected=fill(rejected))


def lens(*values):
    return jnp.array(values, jnp.int32)


def test_without_evidence_the_chance_grows_with_the_match():
    chance = np.asarray(accept_chance(belief(seqs=NUM_CLASSES), lens(*range(NUM_CLASSES))))
    np.testing.assert_allclose(chance, budget._PRIOR)
    assert (np.diff(chance) > 0).all() and chance[0] == 0 and chance[-1] < 1
    assert len(budget._PRIOR) == NUM_CLASSES == MAX_MATCH + 1


def test_the_chance_approaches_what_happens_and_stays_within_0_and_1():
    for right, wrong in [(0, 1000), (1000, 0), (300, 100), (1e6, 1e6), (0, 0)]:
        chance = np.asarray(accept_chance(belief(right, wrong, seqs=NUM_CLASSES), lens(*range(NUM_CLASSES))))
        assert ((chance >= 0) & (chance <= 1)).all()
        if right + wrong:
            np.testing.assert_allclose(chance, right / (right + wrong), atol=2.1 / (right + wrong))


def test_a_round_is_noted_under_its_match_length_and_fades():
    state = DraftState(accepted=jnp.full((3, NUM_CLASSES), 2.0), rejected=jnp.full((3, NUM_CLASSES), 4.0))
    after = record(state, lens(1, 4, 2), tried=lens(5, 3, 0), accepted=lens(2, 3, 0))
    right, wrong = np.full((3, NUM_CLASSES), 2 * 0.95), np.full((3, NUM_CLASSES), 4 * 0.95)
    right[0, 1] += 2
    wrong[0, 1] += 1  # the third draft failed; those behind it were never reached
    right[1, 4] += 3  # all that were tried were right: no evidence of a failure
    np.testing.assert_allclose(after.accepted, right, rtol=1e-6)
    np.testing.assert_allclose(after.rejected, wrong, rtol=1e-6)


@pytest.mark.parametrize(("accepted", "limit"), [(7, 1.0), (0, 0.0)])
def test_evidence_is_bounded_and_settles(accepted, limit):
    note: Any = jax.jit(lambda state: record(state, lens(3), lens(7), lens(accepted)))
    state, chances = belief(), []
    for _ in range(200):
        state = note(state)
        chances.append(float(accept_chance(state, lens(3))[0]))
    assert float(state.accepted.max()) <= 7 / (1 - 0.95) + 1e-3
    assert float(state.rejected.max()) <= 1 / (1 - 0.95) + 1e-3
    steps = np.diff(chances)
    assert (steps >= -1e-6).all() if limit else (steps <= 1e-6).all()
    assert abs(chances[-1] - limit) < 0.08


def test_a_request_that_starts_to_repeat_is_tried_again():
    note: Any = jax.jit(record)
    state = belief()
    for _ in range(60):
        state = note(state, lens(4), lens(7), lens(0))
    assert accept_chance(state, lens(4))[0] < 0.15
    for _ in range(6):
        state = note(state, lens(4), lens(7), lens(7))
    assert accept_chance(state, lens(4))[0] > 0.6


def test_where_the_only_shape_has_a_row_for_each_draft_all_are_tried():
    (shape,) = variants(num_seqs=3, num_steps=3, kind="cpu", standalone=True)
    choose = functools.partial(budget.choose, num_steps=3, shapes=(shape,))
    take, index = choose(jnp.array([0.99, 0.5, 0.02]), lens(3, 2, 3), jnp.ones(3, bool))
    assert take.tolist() == [3, 2, 3] and int(index) == 0
