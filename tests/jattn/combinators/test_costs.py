"""The cost table and the shapes compiled from it."""

import itertools

import pytest

from jattn.combinators.costs import _MEASURED, branches_wait, step_cost, variants

KINDS = ("cpu", "cuda", "tpu")
SIZES = list(itertools.product((1, 2, 3, 8, 16), (0, 1, 3, 7, 15, 63)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_costs_what_was_measured_and_a_line_between(kind):
    table = _MEASURED.get(kind, _MEASURED["accelerator"])
    for rows, cost in table:
        assert step_cost(rows, kind=kind) == cost
    for (n0, c0), (n1, c1) in itertools.pairwise(table):
        for rows in range(n0, n1 + 1):
            assert step_cost(rows, kind=kind) == pytest.approx(c0 + (c1 - c0) * (rows - n0) / (n1 - n0))
    last_rows, last_cost = table[-1]
    assert step_cost(3 * last_rows, kind=kind) == pytest.approx(3 * last_cost)


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_are_free_one_is_the_unit_and_more_cost_more(kind):
    assert (step_cost(0, kind=kind), step_cost(1, kind=kind)) == (0.0, 1.0)
    costs = [step_cost(rows, kind=kind) for rows in range(0, 1025)]
    assert all(a < b for a, b in itertools.pairwise(costs))
    assert all(cost <= rows for rows, cost in enumerate(costs))  # a step of n is never worse than n steps


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_seqs", "num_steps"), SIZES)
def test_shapes_hold_every_batch_and_grow_in_cost(num_seqs, num_steps, kind):
    shapes = variants(num_seqs=num_seqs, num_steps=num_steps, kind=kind)
    assert 1 <= len(shapes) <= 3  # each takes seconds to compile
    assert all(a.rows < b.rows and a.cost < b.cost for a, b in itertools.pairwise(shapes))
    assert all(shape.cost == step_cost(shape.rows, kind=kind) for shape in shapes)
    assert all(1 <= shape.rows <= num_seqs * shape.max_q_len for shape in shapes)
    assert (shapes[-1].rows, shapes[-1].max_q_len) == (num_seqs * (num_steps + 1), num_steps + 1)  # all draft all
    if branches_wait(kind):
        assert all(a.cost <= 0.8 * b.cost for a, b in itertools.pairwise(shapes))
        return
    plain = [shape for shape in shapes if shape.max_q_len == 1]
    assert plain and max(shape.rows for shape in plain) == num_seqs  # nobody drafts, everybody decodes
    assert {shape.max_q_len for shape in shapes} == {1, num_steps + 1}


def test_without_drafts_only_plain_shapes_are_compiled():
    assert [(v.rows, v.max_q_len) for v in variants(num_seqs=8, num_steps=0, kind="cpu")] == [(2, 1), (8, 1)]
    assert [(v.rows, v.max_q_len) for v in variants(num_seqs=1, num_steps=0, kind="cpu")] == [(1, 1)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_seqs", "num_steps"), [size for size in SIZES if size[1]])
def test_drafts_of_a_model_have_one_shape_with_a_row_for_each(num_seqs, num_steps, kind):
    (shape,) = variants(num_seqs=num_seqs, num_steps=num_steps, kind=kind, standalone=True)
    assert (shape.rows, shape.max_q_len) == (num_seqs * (num_steps + 1), num_steps + 1)
