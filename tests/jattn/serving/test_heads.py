"""Drafts from heads on the target's hidden states: the same tokens as without drafts, whatever they propose."""

import itertools
import json
from pathlib import Path

import pytest
from draft_heads import KINDS, draft_head
from engines import BRANCHING, BRANCHING_OPTIONS, plain_ids, quick_programs, serve, tiny_engine
from tiny_model import tiny

import jattn
from jattn.combinators.draft_shapes import NO_DRAFTS, DraftShape, chain
from jattn.sampling import SamplerConfig
from jattn.serving.compilations import counting

V3 = Path(__file__).parents[2] / "data" / "hf" / "deepseek-v3"
LONG = pytest.mark.long


@pytest.fixture(scope="module")
def plain():
    return plain_ids()


@pytest.mark.parametrize(
    ("kind", "topk", "num_steps", "num_nodes", "num_ids", "page_size"),
    [
        pytest.param("eagle3", 4, 4, 16, 64, 4, marks=LONG),
        pytest.param("eagle3", 1, 5, 6, None, 1, marks=LONG),
        pytest.param("eagle", 1, 3, 4, 64, 16, marks=LONG),
        pytest.param("eagle", 8, 2, 16, None, 64, marks=LONG),
        pytest.param("mtp", 2, 3, 8, 40, 4, marks=LONG),
        pytest.param("mtp", 1, 1, 2, None, 256, marks=LONG),
    ],
)
def test_any_head_gives_the_tokens_of_plain_decoding(plain, kind, topk, num_steps, num_nodes, num_ids, page_size):
    # 160 tokens of pages: the three requests cannot all stay, so some are taken back
    model = tiny()
    engine = tiny_engine(
        model=model,
        drafter=draft_head(model, kind, num_ids=num_ids),
        num_steps=num_steps,
        topk=topk,
        num_nodes=num_nodes,
        page_size=page_size,
        num_pages=max(-(-160 // page_size), 2),
    )
    serve(engine, [[1, 2]], max_new_tokens=2)  # warms up
    with counting() as count:
        for temperature, want in plain.items():
            sequences = serve(engine, BRANCHING, temperature=temperature, **BRANCHING_OPTIONS)
            assert [sequence.new_ids for sequence in sequences] == want
            assert all(sequence.num_drafted for sequence in sequences)
    assert count.value == 0
    assert engine.scheduler.pages.num_free == engine.scheduler.num_pages


@pytest.mark.parametrize(
    ("kind", "shapes"),
    [
        ("eagle3", (NO_DRAFTS, DraftShape(num_steps=4, topk=4, num_nodes=16))),
        pytest.param("eagle", (chain(3), NO_DRAFTS, chain(1)), marks=LONG),
        pytest.param("standalone", (NO_DRAFTS, chain(2), DraftShape(num_steps=2, topk=2, num_nodes=5)), marks=LONG),
    ],
)
def test_rounds_of_several_shapes_follow_each_other(plain, kind, shapes):
    model = tiny()
    drafter = model if kind == "standalone" else draft_head(model, kind, num_ids=64)
    engine = tiny_engine(model=model, drafter=drafter, num_steps=0, draft_shapes=shapes)
    sequences = []
    order = itertools.cycle([*range(len(shapes)), 0, 0])
    engine.adaptive.choose = lambda num_active: next(order)
    with counting() as count:
        for temperature, want in plain.items():
            sequences = serve(engine, BRANCHING, temperature=temperature, **BRANCHING_OPTIONS)
            assert [sequence.new_ids for sequence in sequences] == want
    assert count.value == 0
    if kind == "standalone":  # which agrees with itself, also behind tokens that it never read
        assert sum(s.num_round_tokens for s in sequences) > 1.1 * sum(s.num_rounds for s in sequences)


@LONG
@pytest.mark.parametrize("kind", KINDS)
def test_drawn_chains_of_a_head_serve(kind):
    model = tiny()
    engine = tiny_engine(
        model=model,
        drafter=draft_head(model, kind, num_ids=64),
        num_steps=3,
        sampler=SamplerConfig(rejection=True),
    )
    sequences = serve(engine, BRANCHING, temperature=1.0, **BRANCHING_OPTIONS)
    assert [len(sequence.new_ids) for sequence in sequences] == [BRANCHING_OPTIONS["max_new_tokens"]] * len(BRANCHING)


@LONG
@pytest.mark.parametrize("tree", [{}, dict(topk=3, num_steps=3, num_draft_tokens=8)], ids=["chain", "tree"])
def test_the_models_own_next_layer_drafts(tree):
    want = json.loads((V3 / "expected.json").read_text())
    options = dict(model=str(V3), dtype="float32", max_new_tokens=len(want["greedy"][0]), ignore_eos=True)
    with quick_programs():
        done = jattn.generate(want["prompts"], draft="nextn", **tree, **options)
    assert [completion.ids for completion in done] == want["greedy"]
