"""Stop texts in a stream equal reading one character at a time, however the text is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jattn.loaders.stop import StopTexts

texts = st.text(alphabet="ab🙂", max_size=30)
stop_lists = st.lists(st.text(alphabet="ab🙂", min_size=1, max_size=5), max_size=4)


def read_by_character(text, stops):
    """(emitted, hit): after each character, does the text end with a stop text? Of several, the longest."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            hit = max(hits, key=len)
            return text[: end - len(hit)], hit
    return text, None


@given(text=texts, stops=stop_lists, places=st.lists(st.integers(0, 99), max_size=6))
def test_any_cut_of_the_text_gives_what_reading_by_character_gives(text, stops, places):
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    matcher = StopTexts(stops)
    emitted, hit = "", None
    for a, b in zip(edges, edges[1:], strict=False):
        safe, hit = matcher.push(text[a:b])
        emitted += safe
    emitted += matcher.flush()
    assert (emitted, hit) == read_by_character(text, stops)
    assert matcher.hit == hit


@given(text=texts, stops=stop_lists)
def test_no_more_is_held_back_than_could_begin_a_stop_text(text, stops):
    matcher = StopTexts(stops)
    emitted, hit = matcher.push(text)
    if hit is None:
        held = text[len(emitted) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_of_overlapping_stop_texts_the_one_complete_first_wins():
    assert StopTexts(["abcd", "bc"]).push("xabcd") == ("xa", "bc")
    assert StopTexts(["bc", "abc"]).push("xabcd") == ("x", "abc")
    matcher = StopTexts(["aab"])
    assert [matcher.push(char) for char in "aaab"] == [("", None), ("", None), ("a", None), ("", "aab")]


def test_nothing_is_emitted_after_a_hit():
    matcher = StopTexts(["END"])
    assert matcher.push("one END two") == ("one ", "END")
    assert matcher.push("three") == ("", "END") and matcher.flush() == ""


def test_without_stop_texts_everything_passes():
    matcher = StopTexts([])
    assert matcher.push("anything") == ("anything", None) and matcher.flush() == ""


def test_an_empty_stop_text_is_refused():
    with pytest.raises(ValueError, match="a stop text is empty"):
        StopTexts(["a", ""])
