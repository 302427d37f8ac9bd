"""Serving with n-gram trees on a tiny random model: the same tokens as without drafts, whatever the tree."""

import pytest
from engines import serve
from tiny_model import CONFIG, tiny

from jattn.serving.engine import Engine

# Texts whose last tokens occurred before with different continuations, so that trees branch.
PROMPTS = [[3, 4, 5, 3, 4, 6, 3, 4, 7, 3, 4], [9, 9, 9, 8, 9, 9, 7, 9, 9], [1], [(5 * i) % 11 for i in range(40)]]
OPTIONS = dict(max_new_tokens=24, seed=3, top_p=0.95)


def engine_of(*, num_steps, page_size=4, num_pages=None, **kwargs):
    return Engine(
        tiny(),
        num_layers=CONFIG.num_layers,
        num_slots=3,
        num_pages=num_pages or -(-400 // page_size),
        page_size=page_size,
        max_context=128,
        num_steps=num_steps,
        kind="cuda",  # its cost table makes rows cheap, so that large trees are verified
        prefill_rows=(32,),
        **kwargs,
    )


@pytest.fixture(scope="module")
def plain():
    engine = engine_of(num_steps=0)
    return {t: [serve(engine, [p], temperature=t, **OPTIONS)[0].new_ids for p in PROMPTS] for t in (0.0, 0.05)}


@pytest.mark.parametrize(
    ("topk", "num_steps", "num_nodes", "page_size"), [(2, 3, 7, 1), (4, 5, 16, 16), (8, 8, 64, 64), (3, 1, 4, 4)]
)
def test_any_tree_gives_the_tokens_of_plain_decoding(plain, topk, num_steps, num_nodes, page_size):
    # 160 tokens of pages: the three requests cannot all stay, so some are taken back
    engine = engine_of(
        num_steps=num_steps, topk=topk, num_nodes=num_nodes, page_size=page_size, num_pages=-(-160 // page_size)
    )
    accepts = []
    for temperature, want in plain.items():
        sequences = serve(engine, PROMPTS, temperature=temperature, **OPTIONS)
        assert [sequence.new_ids for sequence in sequences] == want
        assert any(sequence.num_drafted for sequence in sequences)
        accepts += [sequence.mean_accept for sequence in sequences]
    assert max(accepts) > 1
    assert engine.scheduler.pages.num_free == engine.scheduler.num_pages


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(topk=2, num_steps=3, num_nodes=8), "at most 7 nodes"),
        (dict(topk=2, num_steps=8, num_nodes=65), "want 2 to 64"),
        (dict(topk=1, num_steps=3, num_nodes=8), "a chain of num_steps=3 has 4"),
    ],
)
def test_trees_that_cannot_be_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        engine_of(**options)
