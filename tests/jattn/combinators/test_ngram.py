"""Drafts from a request's own text against a search by hand, over thousands of drawn texts in one call."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from texts import match_len

from jattn.combinators import ngram
from jattn.combinators.ngram import MAX_MATCH

CONTEXT, STEPS = 16, 10
ngram_draft = jax.jit(functools.partial(ngram.ngram_draft, num_steps=STEPS))
find = jax.jit(ngram.find)


def best_match(text):
    """(first index after it, length) of the longest match that ends before the end; of equals, the newest."""
    lengths = [match_len(text, end) for end in range(1, len(text))]
    longest = max(lengths, default=0)
    return (None, 0) if longest == 0 else (max(i for i, n in enumerate(lengths) if n == longest) + 1, longest)


def continuation(text, start):
    """STEPS tokens from `start` on; past the end the piece from `start` repeats."""
    piece = text[start:]
    return [piece[i % len(piece)] for i in range(STEPS)]


def draw_texts(rows, rng):
    lens = rng.integers(1, CONTEXT + 1, rows)
    lens[:60] = np.repeat([0, 1, 2, CONTEXT], 15)
    tokens = rng.integers(0, rng.integers(1, 6, (rows, 1)) + 1, (rows, CONTEXT))
    loops = np.tile(rng.integers(0, 9, (rows // 4, 5)), 4)[:, :CONTEXT]  # texts that repeat
    tokens[: rows // 4] = loops
    return tokens.astype(np.int32), lens.astype(np.int32)


@pytest.fixture(scope="module")
def drawn():
    tokens, lens = draw_texts(4000, np.random.default_rng(0))
    return tokens, lens, *map(np.asarray, (*find(tokens, lens), *ngram_draft(tokens, lens)))


def test_the_longest_match_is_found_and_of_equals_the_newest(drawn):
    tokens, lens, starts, lengths, _, drafted_lengths = drawn
    for row, n, start, length in zip(tokens, lens, starts, lengths, strict=True):
        want = best_match(row[:n].tolist())
        assert length == want[1], row[:n]
        assert length == 0 or start == want[0], row[:n]
    np.testing.assert_array_equal(drafted_lengths, lengths)
    assert set(lengths) == set(range(MAX_MATCH + 1))


def test_the_text_behind_the_match_is_copied_and_wraps_around(drawn):
    tokens, lens, starts, lengths, drafts, _ = drawn
    wrapped = 0
    for row, n, start, length, draft in zip(tokens, lens, starts, lengths, drafts, strict=True):
        if length:
            assert draft.tolist() == continuation(row[:n].tolist(), start), row[:n]
            wrapped += start + STEPS > n
    assert wrapped > 100


def test_nothing_past_the_known_tokens_is_read(drawn):
    tokens, lens, starts, lengths, drafts, _ = drawn
    found = lengths > 0
    other = np.where(np.arange(CONTEXT)[None] < lens[:, None], tokens, tokens[:, :1])  # what might match
    again = ngram_draft(other, lens)
    np.testing.assert_array_equal(again[1], lengths)
    np.testing.assert_array_equal(np.asarray(again[0])[found], drafts[found])


def known(*tokens):
    padded = np.full((1, CONTEXT), 7, np.int32)
    padded[0, : len(tokens)] = tokens
    return padded, jnp.array([len(tokens)], jnp.int32)


@pytest.mark.parametrize("text", [[], [7], [7, 8], [1, 2, 3, 4, 5, 6]])
def test_a_text_without_a_repeated_last_token_matches_nothing(text):
    assert find(*known(*text))[1].tolist() == [0]


def test_two_equal_tokens_match_and_repeat():
    drafts, length = ngram_draft(*known(9, 9))
    assert (length.tolist(), drafts.tolist()) == ([1], [[9] * STEPS])


def test_a_full_buffer_is_searched_to_its_end():
    text = [*range(10, 18), 30, *range(10, 17)]
    assert len(text) == CONTEXT
    drafts, length = ngram_draft(*known(*text))
    assert length.tolist() == [MAX_MATCH]
    assert drafts[0].tolist() == [17, 30, 10, 11, 12, 13, 14, 15, 16, 17]


def test_a_longer_match_beats_a_newer_one():
    start, length = find(*known(1, 2, 3, 5, 3, 6, 1, 2, 3))
    assert (start.tolist(), length.tolist()) == ([3], [3])
