"""Accepting and finishing against adding tokens one at a time, over drawn rounds; appending writes nothing else."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.combinators import accept
from jattn.combinators.state import Status

REASON = {"stop": Status.STOPPED, "length": Status.LENGTH, "None": Status.DECODE}
accepted_lens, finish, append = jax.jit(accept.accepted_lens), jax.jit(accept.finish), jax.jit(accept.append)


def ints(values):
    return jnp.asarray(np.asarray(values, np.int32))


def test_tokens_are_cut_as_if_they_had_come_one_by_one():
    case = cases.build("C21")
    rows, stops = case.inputs["rows"], case.inputs["stop_ids"]
    width = max(len(row["accepted"]) for row in rows)
    new = np.full((len(rows), width), stops[0])  # past the count: stop tokens that must not be seen
    for row, tokens in zip(new, (row["accepted"] for row in rows), strict=True):
        row[: len(tokens)] = tokens
    prompt = 11  # limits and counts include it
    counts, status = finish(
        ints(new),
        ints([len(row["accepted"]) for row in rows]),
        ints([prompt + row["already"] for row in rows]),
        ints([prompt + row["max_new"] for row in rows]),
        ints([[-1, *stops, -1]] * len(rows)),
    )
    names = {int(status): name for name, status in REASON.items()}
    got = [
        {"kept": np.array(new[b, :n], int), "reason": names[s]}
        for b, (n, s) in enumerate(zip(counts.tolist(), status.tolist(), strict=True))
    ]
    assert case.check({"rows": got}) == []


def test_drawn_rounds_end_where_a_loop_over_tokens_ends():
    rng = np.random.default_rng(0)
    rows, width = 4000, 9
    new = rng.integers(0, 12, (rows, width))
    counts = rng.integers(0, width + 1, rows)
    known = rng.integers(1, 20, rows)
    limits = known + rng.integers(-1, 12, rows)  # at the limit, or even past it: nothing more is kept
    stops = rng.integers(-1, 30, (rows, 3))  # many unused, some never drawn
    kept, status = map(np.asarray, finish(*map(ints, (new, counts, known, limits, stops))))
    seen = set()
    for b in range(rows):
        used = {s for s in stops[b].tolist() if s >= 0}
        tokens, reason = cases.finish(known[b], new[b, : counts[b]].tolist(), used, limits[b])
        at_limit = known[b] + len(tokens) >= limits[b]
        assert (kept[b], status[b]) == (len(tokens), REASON[str(reason)]), b
        seen.add((reason, len(tokens) < counts[b], at_limit))
    assert {("stop", True, False), ("stop", False, True), ("stop", True, True)} <= seen
    assert {("length", True, True), ("length", False, True), (None, False, False)} <= seen


def test_minus_one_is_no_stop_token():
    counts, status = finish(ints([[-1, -1]]), ints([2]), ints([3]), ints([9]), ints([[-1, -1]]))
    assert (counts.tolist(), status.tolist()) == ([2], [Status.DECODE])


def test_a_stop_token_that_is_also_the_last_allowed_one_counts_as_stopped():
    counts, status = finish(ints([[4, 7, 4]]), ints([3]), ints([3]), ints([5]), ints([[7]]))
    assert (counts.tolist(), status.tolist()) == ([2], [Status.STOPPED])


def test_drafts_are_accepted_up_to_the_first_that_differs():
    rng = np.random.default_rng(1)
    rows, steps = 2000, 6
    drafts, targets = rng.integers(0, 3, (rows, steps)), rng.integers(0, 3, (rows, steps + 1))
    agree = rng.random(rows) < 0.5
    targets[agree, :steps] = drafts[agree]  # so that all lengths occur
    tried = rng.integers(0, steps + 1, rows)
    got = accepted_lens(ints(drafts), ints(tried), ints(targets)).tolist()
    for b in range(rows):
        want = 0
        while want < tried[b] and drafts[b, want] == targets[b, want]:
            want += 1
        assert got[b] == want
    assert set(got) == set(range(steps + 1))


def test_a_round_without_drafts_accepts_none():
    assert accepted_lens(jnp.zeros((3, 0), jnp.int32), ints([0, 0, 0]), ints([[5], [6], [7]])).tolist() == [0, 0, 0]


@pytest.mark.parametrize("width", [1, 5])
def test_appending_writes_the_counted_tokens_and_nothing_else(width):
    rng = np.random.default_rng(2)
    rows, context = 200, 12
    tokens = rng.integers(100, 200, (rows, context))
    new = rng.integers(0, 100, (rows, width))
    at, counts = rng.integers(0, context + 3, rows), rng.integers(0, width + 1, rows)
    got = np.asarray(append(*map(ints, (tokens, at, new, counts))))
    want = tokens.copy()
    for b in range(rows):
        for i in range(counts[b]):
            if at[b] + i < context:  # what does not fit is dropped, never wrapped or clamped
                want[b, at[b] + i] = new[b, i]
    np.testing.assert_array_equal(got, want)
    assert (at + counts > context).any() and (counts == 0).any()
