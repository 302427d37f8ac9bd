"""Continuations and tries of n-gram trees against a search by hand, over drawn texts in one call."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from texts import match_len

from jattn.combinators.ngram import check_trie, find_many, ngram_tree

ROWS, CONTEXT, STEPS, TOPK = 1500, 16, 4, 3


def best_places(text):
    """[(match length, continuation)], longest first, then newest; none that agrees with an earlier one."""
    places = sorted(((match_len(text, end), end) for end in range(1, len(text)) if match_len(text, end)), reverse=True)
    found, passed_over = [], set()
    for length, end in places:
        if end in passed_over or len(found) == TOPK:
            continue
        piece = text[end:]
        ahead = [piece[i % len(piece)] for i in range(STEPS)]
        found.append((length, ahead))
        for _, other in places:
            rest = text[other : other + STEPS]
            if rest == ahead[: len(rest)]:
                passed_over.add(other)
    return found


@pytest.fixture(scope="module")
def drawn():
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, rng.integers(1, 5, (ROWS, 1)) + 1, (ROWS, CONTEXT)).astype(np.int32)
    lens = rng.integers(1, CONTEXT + 1, ROWS).astype(np.int32)
    return tokens, lens, jax.jit(functools.partial(find_many, topk=TOPK, num_steps=STEPS))(tokens, lens)


def test_the_best_different_continuations_are_found(drawn):
    tokens, lens, found = drawn
    counts = set()
    for text, n, ahead, lengths in zip(tokens, lens, *map(np.asarray, (found.tokens, found.match_len)), strict=True):
        got = [(int(length), row.tolist()) for length, row in zip(lengths, ahead, strict=True) if length]
        assert got == best_places(text[:n].tolist()), text[:n]
        counts.add(len(got))
    assert counts == {0, 1, 2, 3}


@pytest.mark.parametrize("num_nodes", [2, 5, 1 + TOPK * STEPS])
def test_a_trie_holds_each_beginning_once_likeliest_first(drawn, num_nodes):
    tokens, _, found = drawn
    chance = np.random.default_rng(2).random((ROWS, TOPK)).astype(np.float32)
    chance[:100] = 1.0  # certain children tie with their parents
    grown = jax.jit(functools.partial(ngram_tree, num_nodes=num_nodes))(found, tokens[:, 0], chance)
    grown, found = jax.tree.map(np.asarray, (grown, found))
    for b in range(ROWS):
        branches = [row.tolist() for row, n in zip(found.tokens[b], found.match_len[b], strict=True) if n]
        beginnings = {tuple(row[: i + 1]) for row in branches for i in range(STEPS)}
        used, worth = int(grown.tree.num_nodes[b]), grown.reach[b]
        if b >= 100:  # a branch that leaves a certain one has no chance, and no node
            assert used == min(num_nodes, 1 + len(beginnings))
        assert (np.diff(worth) <= 0).all() and (worth[: used - 1] > 0).all() and (worth[used - 1 :] == 0).all()
        paths: dict[int, tuple[int, ...]] = {0: ()}
        for i in range(1, used):
            parent = int(grown.tree.parents[b, i])
            assert 0 <= parent < i
            paths[i] = (*paths[parent], int(grown.tree.tokens[b, i]))
            on_first = paths[i] == tuple(branches[0][: len(paths[i])])
            assert bool(grown.first_branch[b, i]) == on_first
        kept = set(paths.values()) - {()}
        assert len(kept) == used - 1 and kept <= beginnings


def test_more_nodes_than_a_trie_can_have_are_refused():
    check_trie(topk=2, num_steps=3, num_nodes=7)
    with pytest.raises(ValueError, match="2 continuations of 3 tokens make at most 7 nodes"):
        check_trie(topk=2, num_steps=3, num_nodes=8)


def test_one_branch_is_the_chain():
    tokens = jnp.asarray([[1, 2, 3, 1, 2, 0]])
    found = find_many(tokens, jnp.asarray([5]), topk=1, num_steps=3)
    grown = ngram_tree(found, jnp.asarray([2]), jnp.full((1, 1), 0.5), num_nodes=4)
    assert grown.tree.tokens.tolist() == [[2, 3, 1, 2]]
    assert grown.tree.parents.tolist() == [[-1, 0, 1, 2]]
    assert grown.reach.tolist() == [[0.5, 0.25, 0.125]]
