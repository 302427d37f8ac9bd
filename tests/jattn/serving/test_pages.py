"""The page allocator against a model of it: one owner a page, none lost, nothing changed by a refusal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jattn.serving.pages import PageAllocator

OWNERS = ("a", "b", "c")
steps = st.lists(st.tuples(st.sampled_from(OWNERS), st.none() | st.integers(-1, 9)), max_size=30)


@given(num_pages=st.integers(1, 8), steps=steps)
def test_pages_have_one_owner_and_come_back(num_pages, steps):
    pages = PageAllocator(num_pages)
    for owner, want in steps:
        before = {name: list(pages.owned(name)) for name in OWNERS}
        free = pages.num_free
        if want is None:
            pages.release(owner)
            assert pages.owned(owner) == []
            assert pages.num_free == free + len(before[owner])
        else:
            fits = want <= len(before[owner]) + free
            assert pages.grow(owner, want) == fits
            held = pages.owned(owner)
            assert held[: len(before[owner])] == before[owner]  # tokens stay where they are
            assert len(held) == (max(want, len(before[owner])) if fits else len(before[owner]))
        assert all(pages.owned(other) == before[other] for other in OWNERS if other != owner)
        held = [page for name in OWNERS for page in pages.owned(name)]
        assert len(set(held)) == len(held) == num_pages - pages.num_free
        assert set(held) <= set(range(num_pages))
    for owner in OWNERS:
        pages.release(owner)
    assert pages.num_free == num_pages
    assert pages.grow("a", num_pages) and sorted(pages.owned("a")) == list(range(num_pages))


def test_a_refusal_changes_nothing_and_leaves_no_trace_of_the_owner():
    pages = PageAllocator(3)
    assert pages.grow("a", 2)
    assert not pages.grow("b", 2)
    assert (pages.owned("b"), pages.num_free) == ([], 1)
    assert "b" not in pages._owned


@pytest.mark.parametrize("owner", ["nobody", None])
def test_releasing_what_owns_nothing_is_harmless(owner):
    pages = PageAllocator(2)
    pages.release(owner)
    assert pages.num_free == 2
