"""Greedy ids equal those of three independent engines, whatever the draft, the page size and the batch."""

import pytest
from engines import engine_of, serve

CHAIN = dict(num_steps=15)
TREE = dict(num_steps=5, topk=4, num_nodes=16)


@pytest.mark.parametrize(
    ("page_size", "draft"),
    [
        *((page_size, draft) for draft in (dict(num_steps=0), CHAIN) for page_size in (1, 16, 64)),
        pytest.param(16, TREE, marks=pytest.mark.long),
        # every depth and breadth, and page sizes at both ends
        *(
            pytest.param(page_size, dict(num_steps=steps, topk=topk, num_nodes=nodes), marks=pytest.mark.long)
            for page_size in (1, 256)
            for topk, steps, nodes in ((2, 1, 3), (2, 8, 12), (8, 1, 9), (8, 8, 64))
        ),
    ],
)
def test_greedy_ids_equal_the_reference_alone_and_in_a_ragged_batch(loaded, reference, page_size, draft):
    engine = engine_of(loaded, page_size=page_size, **draft)
    for name, (prompt, want) in reference.items():
        (alone,) = serve(engine, [prompt], max_new_tokens=32)
        assert alone.new_ids == want, name
    together = serve(engine, [prompt for prompt, _ in reference.values()], max_new_tokens=32)
    for sequence, (name, (_, want)) in zip(together, reference.items(), strict=True):
        assert sequence.new_ids == want, name
    if draft["num_steps"]:
        assert sum(sequence.num_drafted for sequence in together) > 0  # drafts were tried, and changed nothing
    assert engine.scheduler.pages.num_free == engine.scheduler.num_pages
