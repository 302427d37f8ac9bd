"""Greedy ids equal those of three independent engines, whatever the draft, the page size and the batch."""

import pytest
from engines import engine_of, serve


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("num_steps", [0, 15])
def test_greedy_ids_equal_the_reference_alone_and_in_a_ragged_batch(loaded, reference, page_size, num_steps):
    engine = engine_of(loaded, page_size=page_size, num_steps=num_steps)
    for name, (prompt, want) in reference.items():
        (alone,) = serve(engine, [prompt], max_new_tokens=32)
        assert alone.new_ids == want, name
    together = serve(engine, [prompt for prompt, _ in reference.values()], max_new_tokens=32)
    for sequence, (name, (_, want)) in zip(together, reference.items(), strict=True):
        assert sequence.new_ids == want, name
    if num_steps:
        assert sum(sequence.num_drafted for sequence in together) > 0  # drafts were tried, and changed nothing
    assert engine.scheduler.pages.num_free == engine.scheduler.num_pages
