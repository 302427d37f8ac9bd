"""Which shape a round drafts: against simulated texts, with costs that are made up, and by what the engine is told."""

import random

import pytest

from jattn.combinators.draft_shapes import (
    ACCEPTED,
    NO_DRAFTS,
    DraftShape,
    RoundCosts,
    chain,
    expected,
    odds_of,
    round_costs,
    worth_compiling,
)
from jattn.serving.adaptive import AdaptiveShape
from jattn.serving.loaded import Options

TREE = DraftShape(num_steps=5, topk=4, num_nodes=16)
SHAPES = (NO_DRAFTS, chain(1), chain(3), TREE)
# cheap for few, dear for many: at 16 a round of three drafts costs three plain ones
COSTS = RoundCosts(
    kind="made up",
    evidence="estimated",
    batches=(1, 4, 16),
    over_plain={chain(1): (1.2, 1.3, 1.9), chain(3): (1.5, 1.8, 3.2), TREE: (2.2, 3.0, 7.0)},
)


def serve(policy, costs, *, slots, chance, rounds, lag=1, seed=0):
    """Time over plain decoding's for the same tokens, each draft kept with `chance`; reports come `lag` rounds late."""
    draw, late, time, tokens = random.Random(seed), [], 0.0, 0
    for _ in range(rounds):
        index = policy.choose(slots)
        shape, counts = policy.shapes[index], []
        for _ in range(slots):
            kept = 0
            while kept < shape.num_steps and draw.random() < chance:
                kept += 1
            counts.append(1 + kept)
        time += costs.cost(shape, slots)
        tokens += sum(counts)
        late.append((index, counts))
        if len(late) > lag:
            policy.record(*late.pop(0))
    return time / (tokens / slots)


def started(slots, shapes=SHAPES, costs=COSTS):
    policy = AdaptiveShape(shapes, costs, num_slots=slots)
    policy.admitted(1)
    return policy


@pytest.mark.parametrize("slots", [1, 2, 4, 8, 16, 64])
@pytest.mark.parametrize("chance", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0])
@pytest.mark.parametrize(("rounds", "most"), [(128, 1.055), (600, 1.03)])
def test_it_is_never_slower_than_no_drafts_by_more_than_3_percent(slots, chance, rounds, most):
    # what the first rounds of a hard text cost is more of a short answer
    times = [serve(started(slots), COSTS, slots=slots, chance=chance, rounds=rounds, seed=seed) for seed in range(6)]
    assert sum(times) / len(times) <= most


@pytest.mark.parametrize("slots", [1, 4, 16])
@pytest.mark.parametrize("chance", [0.2, 0.5, 0.8, 0.95])
def test_it_comes_near_the_best_shape_for_the_text(slots, chance):
    best = min(COSTS.cost(s, slots) / sum(chance**i for i in range(s.num_steps + 1)) for s in SHAPES)
    assert serve(started(slots), COSTS, slots=slots, chance=chance, rounds=2000) <= 1.15 * best


def test_a_text_that_becomes_hard_and_easy_again_is_followed():
    policy = started(1)
    serve(policy, COSTS, slots=1, chance=0.9, rounds=50)
    assert policy.shape != NO_DRAFTS
    serve(policy, COSTS, slots=1, chance=0.0, rounds=30)
    assert policy.shape == NO_DRAFTS
    serve(policy, COSTS, slots=1, chance=0.9, rounds=200)  # a probe comes
    assert policy.shape in (chain(3), TREE)


def test_probes_that_fail_become_rare():
    policy, probes = started(1), []
    for at in range(3000):
        index = policy.choose(1)
        if policy.shapes[index] != NO_DRAFTS:
            probes.append(at)
        policy.record(index, [1])
    starts = [b for a, b in zip(probes, probes[1:], strict=False) if b - a > 10]
    gaps = [b - a for a, b in zip(starts, starts[1:], strict=False)]
    assert len(gaps) >= 2 and all(later > 1.5 * former for former, later in zip(gaps, gaps[1:], strict=False))


def test_a_large_batch_starts_without_drafts_and_a_small_one_with_them():
    assert started(16).shape == NO_DRAFTS and started(64).shape == NO_DRAFTS
    assert started(1).shape == chain(3)


def test_few_requests_in_an_engine_of_many_slots_are_weighed_against_the_small_plain_round():
    policy = AdaptiveShape(SHAPES, COSTS, num_slots=4, plain_costs=((1, 1.0), (4, 2.0)))
    policy.admitted(4)
    for _ in range(10):
        assert policy.shapes[policy.choose(4)] != NO_DRAFTS
    for _ in range(10):
        policy.choose(1)
    assert policy.shape == NO_DRAFTS  # alone, a plain round costs half of what it did
    for _ in range(10):
        policy.choose(4)
    assert policy.shape != NO_DRAFTS


def test_one_shape_is_never_left():
    policy = started(1, shapes=(chain(3),))
    assert {policy.choose(1) for _ in range(50) if policy.record(0, [1]) is None} == {0}


@pytest.mark.parametrize("shape", sorted(ACCEPTED))
def test_what_a_text_gives_and_how_easy_it_is_are_inverse_and_rise(shape):
    assert expected(shape, 1.0) == pytest.approx(ACCEPTED[shape], abs=1e-3)
    given = [expected(shape, odds) for odds in (0.05, 0.3, 1.0, 4.0)]
    assert given == sorted(given) and 1 < given[0] and given[-1] < shape.num_steps + 1
    assert [odds_of(shape, tokens) for tokens in given] == pytest.approx([0.05, 0.3, 1.0, 4.0], rel=1e-2)


@pytest.mark.parametrize("kind", ["cpu", "cuda", "rocm", "tpu"])
def test_tables_of_costs_are_sound(kind):
    costs = round_costs(kind)
    assert costs.evidence in ("measured", "estimated")
    assert costs.evidence == ("measured" if kind == "cpu" else "estimated")  # until one is measured there
    assert list(costs.batches) == sorted(costs.batches)
    for row in costs.over_plain.values():
        assert len(row) == len(costs.batches) and min(row) > 1
    assert worth_compiling(costs, num_seqs=1, most=2)
    assert all(shape.topk == 4 for shape in worth_compiling(costs, num_seqs=1, topk=4, most=3))


def test_costs_between_batches_are_on_a_line():
    assert COSTS.cost(chain(1), 10) == pytest.approx(1.6)
    assert (COSTS.cost(chain(1), 1), COSTS.cost(chain(1), 99), COSTS.cost(NO_DRAFTS, 5)) == (1.2, 1.9, 1.0)


def shapes_of(kind="cpu", num_seqs=1, trees=True, **options):
    return [str(shape) for shape in Options(**options).draft_shapes(kind, num_seqs, trees=trees)]


def test_options_pin_a_shape_or_leave_it_to_the_table():
    assert shapes_of(num_steps=5) == ["chain of 5"]
    assert shapes_of(num_steps=3, topk=2, num_draft_tokens=6) == ["topk 2, 3 steps, 6 nodes"]
    assert shapes_of(draft="standalone") == ["chain of 3"]
    assert shapes_of(rejection_sampling=True, temperature=1.0) == ["chain of 3"]
    assert shapes_of(num_seqs=16) == ["no drafts"]  # by what was measured there: then nothing of a draft is compiled
    chosen, *shapes = shapes_of()
    assert chosen == "no drafts" and len(shapes) == 1  # on a CPU each program takes long to compile
    assert all(shape.startswith("chain of") for shape in shapes_of(topk=1)[1:])
    assert shapes_of(topk=4)[1].startswith("topk 4, ")
    assert shapes_of(topk=2)[1].startswith("topk 2, ")
    assert all("topk" not in shape for shape in shapes_of(kind="cuda", trees=False))
