"""Serving with n-gram trees on a tiny random model: the same tokens as without drafts, whatever the tree."""

import pytest
from engines import BRANCHING, BRANCHING_OPTIONS, plain_ids, serve, tiny_engine

from jattn.serving.compilations import counting


@pytest.fixture(scope="module")
def plain():
    return plain_ids()


@pytest.mark.parametrize(
    ("topk", "num_steps", "num_nodes", "page_size"),
    [
        (2, 3, 7, 1),
        pytest.param(4, 5, 16, 16, marks=pytest.mark.long),
        pytest.param(8, 8, 64, 64, marks=pytest.mark.long),
    ],
)
def test_any_tree_gives_the_tokens_of_plain_decoding(plain, topk, num_steps, num_nodes, page_size):
    # 160 tokens of pages: the three requests cannot all stay, so some are taken back
    engine = tiny_engine(
        num_steps=num_steps, topk=topk, num_nodes=num_nodes, page_size=page_size, num_pages=-(-160 // page_size)
    )
    accepts = []
    serve(engine, [[1, 2]], max_new_tokens=2)  # warms up
    with counting() as count:  # trees of every size, in the shapes of their buckets
        for temperature, want in plain.items():
            sequences = serve(engine, BRANCHING, temperature=temperature, **BRANCHING_OPTIONS)
            assert [sequence.new_ids for sequence in sequences] == want
            assert any(sequence.num_drafted for sequence in sequences)
            accepts += [sequence.mean_accept for sequence in sequences]
    assert count.value == 0
    assert max(accepts) > 1
    assert engine.scheduler.pages.num_free == engine.scheduler.num_pages


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(topk=2, num_steps=3, num_nodes=8), "at most 7 nodes"),
        (dict(topk=8, num_steps=8, num_nodes=65), "want 2 to 64"),
        (dict(topk=1, num_steps=3, num_nodes=8), "a chain of num_steps=3 has 4"),
    ],
)
def test_trees_that_cannot_be_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        tiny_engine(**options)
