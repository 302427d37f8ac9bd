"""Law: whatever trees are drafted, verifying and moving the accepted rows give the tokens of plain decoding."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from started import NEW, PROMPTS, SEQS, decode, started
from tiny_model import CONFIG

from jattn.combinators.accept import append
from jattn.combinators.round import to_the_front
from jattn.combinators.tree import ROOT, DraftTree, link, walk
from jattn.combinators.verify import verify_tree
from jattn.sampling import SamplerConfig

DEPTH = 4


@functools.cache
def start(page_size: int, kv_dtype: str | None, nodes: int):
    graphdef, params, state = started(page_size, kv_dtype)

    @functools.partial(jax.jit, donate_argnums=1)
    def advance(params, state, tokens, parents, num_nodes):
        tree = DraftTree(tokens=tokens, parents=parents, num_nodes=num_nodes)
        model = nnx.merge(graphdef, params)
        cache, targets, _ = verify_tree(
            model, state, tree, link(tree).bits, rows=SEQS * nodes, max_q_len=nodes, sampler=SamplerConfig(random=False)
        )
        path, out, accepted = walk(tree, targets.tokens, max_depth=DEPTH)
        cache = to_the_front(cache, state, path, accepted)
        counts = 1 + accepted
        tokens = append(state.tokens, state.seq_lens + 1, out, counts)
        return dataclasses.replace(state, cache=cache, tokens=tokens, seq_lens=state.seq_lens + counts), counts

    return state, lambda state, *tree: advance(params, state, *tree)


def trees(greedy, newest, seq_lens, nodes, rng):
    """Trees that hold the right path behind wrong siblings, among wrong branches; and how deep the right path goes."""
    tokens, parents, used, depths = [], [], [], []
    for b, prompt in enumerate(PROMPTS):
        right = greedy[b, seq_lens[b] + 1 - len(prompt) :][:DEPTH]
        size = int(rng.integers(1, nodes + 1))
        row, above, depth, on_path = [int(newest[b])], [ROOT], [0], [0]
        while len(row) < size:
            node = on_path[-1] if rng.random() < 0.5 else int(rng.integers(len(row)))
            if depth[node] == DEPTH:
                node = 0
            token = int(rng.integers(CONFIG.vocab_size))
            if node == on_path[-1] and depth[node] < len(right) and rng.random() < 0.5:
                token = int(right[depth[node]])
            follows = node in on_path and depth[node] < len(right) and token == right[depth[node]]
            if follows and node != on_path[-1]:
                continue  # the right token a second time: the walk would rightly take the first
            row.append(token)
            above.append(node)
            depth.append(depth[node] + 1)
            if follows:
                on_path.append(len(row) - 1)
        depths.append(len(on_path) - 1)
        used.append(size)
        tokens.append(row + [0] * (nodes - size))
        parents.append(above + [ROOT] * (nodes - size))
    return [np.asarray(x, np.int32) for x in (tokens, parents, used)], depths


@functools.cache
def greedy(kv_dtype: str | None):
    state, advance = start(4, kv_dtype, 1)  # a row a request: plain decoding

    def roots(seq_lens):
        newest = np.asarray(seen[0].tokens)[np.arange(SEQS), seq_lens]
        return newest[:, None], np.full((SEQS, 1), ROOT, np.int32), np.ones(SEQS, np.int32)

    seen = [state]

    def step(state, *tree):
        seen[0], counts = advance(state, *tree)
        return seen[0], counts

    tokens, rounds = decode(jax.tree.map(jnp.copy, state), step, roots)
    assert rounds == [[1] * SEQS] * (NEW - 1)
    return tokens


@pytest.mark.parametrize(
    ("page_size", "nodes", "kv_dtype"), [(1, 13, None), (16, 8, None), (256, 33, None), (4, 20, "int8")]
)
def test_any_trees_verified_give_the_greedy_tokens(page_size, nodes, kv_dtype):
    want = greedy(kv_dtype)
    rng = np.random.default_rng(nodes)
    state, advance = start(page_size, kv_dtype, nodes)
    expected: list[list[int]] = []

    def propose(seq_lens):
        text = [[*prompt, *want[b]] for b, prompt in enumerate(PROMPTS)]
        newest = [row[n] if n < len(row) else 0 for row, n in zip(text, seq_lens, strict=True)]
        drafts, depths = trees(want, newest, seq_lens, nodes, rng)
        expected.append(depths)
        return drafts

    tokens, rounds = decode(jax.tree.map(jnp.copy, state), advance, propose)
    np.testing.assert_array_equal(tokens, want)
    inside = [
        (count, 1 + depth)
        for counts, depths, total in zip(rounds, expected, np.cumsum(rounds, axis=0), strict=True)
        for count, depth, n in zip(counts, depths, total, strict=True)
        if 1 + n <= NEW
    ]
    assert all(count == depth for count, depth in inside)  # the whole right path is found, wherever it lies
    assert max(count for count, _ in inside) >= 3
