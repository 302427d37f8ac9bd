"""Draft trees against oracles that walk paths in plain Python."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.combinators.tree import Candidates, DraftTree, check_size, grow, link, num_candidates, prune, walk

VOCAB, CONTEXTS = 13, 61


def _tables(rng, kind: str) -> np.ndarray:
    # Scores of the next tokens of hashed paths. Three bits each, so that products of eight levels are exact in float32
    # and ties are ties. "ties" has certainties, which tie with their parents, and zeros.
    scores = rng.integers(1, 8, (CONTEXTS, VOCAB)) * 2.0 ** -rng.integers(3, 9, (CONTEXTS, VOCAB))
    if kind == "ties":
        certain = rng.random(CONTEXTS) < 0.4
        scores[certain] = np.eye(VOCAB)[rng.integers(VOCAB, size=certain.sum())]
    return scores.astype(np.float32)


def _hash(before, token):
    return (before * 31 + token + 7) % CONTEXTS


def _best(probs, topk):
    return jax.lax.top_k(probs, topk)


def _grown(table, starts, topk, num_steps):
    # grow through jit, with the hash of each frontier path as the carry
    table = jnp.asarray(table)

    @jax.jit
    def run(starts):
        def step(paths, level, tokens, beams):
            paths = _hash(jnp.take_along_axis(paths, beams, axis=1), tokens)
            return paths, *_best(table[paths], topk)

        probs, ids = _best(table[starts], topk)
        return grow(step, jnp.repeat(starts[:, None], topk, axis=1), probs, ids, num_steps=num_steps)[1]

    return run(jnp.asarray(starts, jnp.int32))


def _oracle(table, start, topk, num_steps, num_nodes):
    def probs(path):
        state = start
        for token in path:
            state = _hash(state, token)
        return table[state]

    return cases.grow_tree(probs, num_steps, topk, num_nodes)


SHAPES = [(1, 8, 9), (2, 3, 5), (3, 1, 4), (8, 8, 64), (5, 3, 56)]


@pytest.mark.parametrize("kind", ["spread", "ties"])
@pytest.mark.parametrize(("topk", "num_steps", "num_nodes"), SHAPES)
def test_trees_equal_the_oracle_node_by_node(kind, topk, num_steps, num_nodes):
    rng = np.random.default_rng(topk * 100 + num_steps)
    table = _tables(rng, kind)
    starts = np.arange(5)
    tree = prune(_grown(table, starts, topk, num_steps), jnp.full(5, -1, jnp.int32), num_nodes=num_nodes)
    links = link(tree)
    for seq, start in enumerate(starts):
        tokens, parents = _oracle(table, start, topk, num_steps, num_nodes)
        assert tree.tokens[seq].tolist() == tokens.tolist()
        assert tree.parents[seq].tolist() == parents.tolist()
        want = cases.tree_build(parents.tolist())
        assert links.depth[seq].tolist() == want["depth"].tolist()
        assert links.first_child[seq].tolist() == want["first_child"].tolist()
        assert links.next_sibling[seq].tolist() == want["next_sibling"].tolist()
        assert (_unpacked(links.bits[seq], num_nodes) == want["mask"]).all()


def _unpacked(bits, num_nodes):
    return np.unpackbits(np.asarray(bits).view(np.uint8), axis=1, bitorder="little")[:, :num_nodes].astype(bool)


@pytest.mark.parametrize("num_nodes", [2, 9, 31, 32, 33, 64])
def test_links_of_any_tree_and_of_a_part_of_it(num_nodes):
    rng = np.random.default_rng(num_nodes)
    parents = np.array([[-1, *(rng.integers(0, i) for i in range(1, num_nodes))] for _ in range(6)], np.int32)
    parents[0] = np.arange(num_nodes) - 1  # a chain is the deepest tree
    used = np.array([num_nodes, num_nodes, 1, 2, num_nodes - 1, (num_nodes + 1) // 2], np.int32)
    links = link(_tree(np.zeros_like(parents), parents, used))
    for seq, n in enumerate(used):
        want = cases.tree_build(parents[seq, :n].tolist())
        for name in ("depth", "first_child", "next_sibling"):
            assert getattr(links, name)[seq, :n].tolist() == want[name].tolist(), name
        assert (_unpacked(links.bits[seq], num_nodes)[:n, :n] == want["mask"]).all()
        assert not _unpacked(links.bits[seq], num_nodes)[:n, n:].any()


def test_the_walk_equals_the_oracle_and_stays_inside_the_used_nodes():
    rng = np.random.default_rng(3)
    seqs, nodes, max_depth = 64, 12, 11
    parents = np.array([[-1, *(rng.integers(0, i) for i in range(1, nodes))] for _ in range(seqs)], np.int32)
    tokens = rng.integers(0, 3, (seqs, nodes)).astype(np.int32)  # few tokens: equal siblings are common
    used = rng.integers(1, nodes + 1, seqs).astype(np.int32)
    targets = rng.integers(0, 3, (seqs, nodes)).astype(np.int32)
    path, out, accepted = jax.jit(walk, static_argnames="max_depth")(
        _tree(tokens, parents, used), targets, max_depth=max_depth
    )
    assert len(set(np.asarray(accepted).tolist())) > 3
    for seq, n in enumerate(used):
        want_path, want_out = cases.greedy_verify(tokens[seq, :n], parents[seq, :n], targets[seq, :n])
        count = int(accepted[seq])
        assert path[seq, : count + 1].tolist() == want_path
        assert out[seq, : count + 1].tolist() == want_out
        assert (path[seq, count:] == path[seq, count]).all()


def test_case_c14_positions_masks_and_links():
    case = cases.build("C14")
    parents = np.asarray(case.inputs["parents"], np.int32)[None]
    nodes = parents.shape[1]
    links = link(_tree(np.zeros_like(parents), parents, np.array([nodes], np.int32)))
    got = {
        "positions": case.inputs["prefix_len"] + np.asarray(links.depth[0]),
        "mask": _unpacked(links.bits[0], nodes),
        "first_child": np.asarray(links.first_child[0]),
        "next_sibling": np.asarray(links.next_sibling[0]),
    }
    assert case.check(got) == []


def test_case_c15_the_right_sibling_and_the_right_bonus_token():
    case = cases.build("C15")
    parents = np.asarray(case.inputs["parents"], np.int32)
    tree = _tree(np.asarray(case.inputs["tokens"], np.int32)[None], parents[None], np.array([len(parents)], np.int32))
    got = {}
    for name, targets in case.inputs["target_next"].items():
        path, out, accepted = walk(tree, jnp.asarray(targets, jnp.int32)[None], max_depth=3)
        count = int(accepted[0]) + 1
        got[name] = {"path": np.asarray(path[0, :count]), "out": np.asarray(out[0, :count])}
    assert case.check(got) == []


def test_a_certain_child_never_loses_its_parent():
    # every score equal, or a probability that rounds above 1: the smaller index wins, and parents come first
    above_one = np.nextafter(np.float32(1), np.float32(2))
    for value in (1.0, above_one, 0.0):
        probs, ids = jnp.full((1, 2, 2), value, jnp.float32), jnp.zeros((1, 2, 2), jnp.int32)
        step = functools.partial(_constant_step, probs, ids)
        _, seen = grow(step, None, jnp.full((1, 2), 0.5), ids[:, 0], num_steps=4)
        for num_nodes in range(2, 2 + num_candidates(2, 4)):
            parents = np.asarray(prune(seen, jnp.array([0]), num_nodes=num_nodes).parents[0])
            assert parents[0] == -1 and (parents[1:] < np.arange(1, num_nodes)).all() and (parents[1:] >= 0).all()


def _constant_step(probs, ids, carry, level, tokens, beams):
    return carry, probs, ids


def test_sizes_that_no_tree_has_are_refused():
    for kwargs, text in (
        (dict(topk=0, num_steps=3, num_nodes=4), "topk=0"),
        (dict(topk=2, num_steps=2, num_nodes=8), "at most 7 nodes"),
        (dict(topk=8, num_steps=8, num_nodes=65), "want 2 to 64"),
    ):
        with pytest.raises(ValueError, match=text):
            check_size(**kwargs)
    seen = Candidates(scores=jnp.ones((1, 2)), tokens=jnp.ones((1, 2), jnp.int32), parents=-jnp.ones((1, 2), jnp.int32))
    with pytest.raises(ValueError, match="at most 3 nodes"):
        prune(seen, jnp.array([0]), num_nodes=4)


def _tree(tokens, parents, num_nodes) -> DraftTree:
    return DraftTree(tokens=jnp.asarray(tokens), parents=jnp.asarray(parents), num_nodes=jnp.asarray(num_nodes))
