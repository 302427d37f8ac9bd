"""Plans against rows enumerated in NumPy: ragged lengths, any page size, padding, wild table tails, trees."""

import functools
import itertools
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jattn import ForwardMode, Tree, make_plan
from jattn.plan import rows_of

SEQS, WIDTH, ROWS = 4, 6, 24  # one shape for all drawn plans, so that few programs are compiled
PAGE_SIZES = (1, 4, 256)
DRAWN = settings(max_examples=40)


@functools.cache
def jitted(mode, page_size, num_tokens=ROWS, max_q_len=ROWS):
    def build(seq_lens, q_lens, table, tree):
        sizes: dict[str, Any] = dict(page_size=page_size, num_tokens=num_tokens, max_q_len=max_q_len)
        return make_plan(mode, seq_lens, q_lens, table, tree=tree, **sizes)

    return jax.jit(build)


def wild_table(rng, seq_lens, page_size, width=WIDTH):
    """Distinct pages for the tokens of each request; past them any 32 bits."""
    table = rng.integers(-(2**31), 2**31, (len(seq_lens), width), dtype=np.int64).astype(np.int32)
    pages = iter(rng.permutation(64))
    for row, length in enumerate(seq_lens):
        table[row, : -(-length // page_size)] = list(itertools.islice(pages, int(-(-length // page_size))))
    return table


@st.composite
def batches(draw):
    """(page_size, seq_lens, q_lens, table): lengths around page edges, padding requests, requests without rows."""
    page_size = draw(st.sampled_from(PAGE_SIZES))
    edges = sorted({0, 1, page_size - 1, page_size, page_size + 1, 2 * page_size, WIDTH * page_size})
    seq_lens = draw(st.lists(st.sampled_from(edges), min_size=SEQS, max_size=SEQS))
    q_lens = [draw(st.sampled_from(sorted({0, min(1, n), min(n, ROWS // SEQS), min(n, 3)}))) for n in seq_lens]
    table = wild_table(np.random.default_rng(draw(st.integers(0, 2**16))), seq_lens, page_size)
    return page_size, np.asarray(seq_lens, np.int32), np.asarray(q_lens, np.int32), table


def enumerate_rows(seq_lens, q_lens, table, page_size):
    """(request, row within the request, sequence index, slot) of each row in packed order."""
    for b, (length, rows) in enumerate(zip(seq_lens.tolist(), q_lens.tolist(), strict=True)):
        for i in range(rows):
            idx = length - rows + i
            yield b, i, idx, int(table[b, idx // page_size]) * page_size + idx % page_size


def same(first, second):
    assert jax.tree.structure(first) == jax.tree.structure(second)
    jax.tree.map(np.testing.assert_array_equal, first, second)


@DRAWN
@given(batch=batches())
def test_a_plan_is_the_enumeration_of_its_rows(batch):
    page_size, seq_lens, q_lens, table = batch
    rows = list(enumerate_rows(seq_lens, q_lens, table, page_size))
    padding = ROWS - len(rows)
    sizes: dict[str, Any] = dict(page_size=page_size, num_tokens=ROWS, max_q_len=ROWS)
    plan = make_plan(ForwardMode.MIXED, seq_lens, q_lens, table, **sizes)
    np.testing.assert_array_equal(plan.positions, [idx for _, _, idx, _ in rows] + [0] * padding)
    np.testing.assert_array_equal(plan.write_slots, [slot for *_, slot in rows] + [-1] * padding)
    np.testing.assert_array_equal(plan.cu_q_lens, [0, *itertools.accumulate(q_lens.tolist())])
    np.testing.assert_array_equal(plan.seq_lens, seq_lens)
    np.testing.assert_array_equal(plan.page_table, table)
    assert {x.dtype for x in jax.tree.leaves(plan)} == {jnp.dtype(jnp.int32)}
    same(plan, jitted(ForwardMode.MIXED, page_size)(seq_lens, q_lens, table, None))


@DRAWN
@given(q_lens=st.lists(st.sampled_from([0, 0, 1, 2, 5]), min_size=SEQS, max_size=SEQS))
def test_each_row_belongs_to_the_request_that_counts_it(q_lens):
    seq, idx, valid = rows_of(jnp.asarray([0, *itertools.accumulate(q_lens)], jnp.int32), ROWS)
    want = [(b, i) for b, n in enumerate(q_lens) for i in range(n)]
    np.testing.assert_array_equal(valid, np.arange(ROWS) < len(want))
    assert list(zip(seq.tolist(), idx.tolist(), strict=True))[: len(want)] == want
    assert 0 <= seq.min() and seq.max() < SEQS  # padding rows borrow a request that exists


def test_bounds_come_from_the_lengths_where_they_are_known():
    plan = make_plan(ForwardMode.EXTEND, [9, 0, 4], [5, 0, 1], [[3, 1, 2], [0, 0, 0], [7, 0, 0]], page_size=4)
    assert (plan.num_tokens, plan.max_q_len, plan.page_size, plan.mode) == (6, 5, 4, ForwardMode.EXTEND)
    assert plan.positions.tolist() == [4, 5, 6, 7, 8, 3]
    assert plan.write_slots.tolist() == [4, 5, 6, 7, 8, 31]
    known_rows = jax.jit(
        lambda lens: make_plan(ForwardMode.EXTEND, lens, np.array([2, 1]), np.eye(2, dtype=int), page_size=4)
    )
    assert known_rows(jnp.array([3, 2])).positions.tolist() == [1, 2, 1]


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_batch_without_requests_or_pages_has_a_plan_without_rows(page_size):
    none = np.zeros(0, np.int32)
    assert make_plan(ForwardMode.IDLE, none, none, np.zeros((0, 3), np.int32), page_size=page_size).num_tokens == 0
    two = np.zeros(2, np.int32)
    plan = make_plan(ForwardMode.PREBUILT, two, two, np.zeros((2, 0), np.int32), page_size=page_size)
    assert (plan.num_tokens, plan.cu_q_lens.tolist()) == (0, [0, 0, 0])


def test_the_mask_follows_the_mode_and_the_tree():
    def mask(mode, tree=None):
        rows = 1 if mode is ForwardMode.DECODE else 0 if mode in (ForwardMode.IDLE, ForwardMode.PREBUILT) else 2
        return make_plan(mode, [3], [rows], [[0]], page_size=4, tree=tree).mask

    full = {mode for mode in ForwardMode if mask(mode) == "full"}
    assert full == {ForwardMode.DLLM_EXTEND}
    assert {mask(mode) for mode in set(ForwardMode) - full} == {"causal"}
    assert mask(ForwardMode.TARGET_VERIFY, np.array([[1], [3]])) == "tree"


@pytest.mark.parametrize("mode", ForwardMode, ids=lambda mode: mode.name)
def test_a_mode_refuses_rows_that_it_does_not_have(mode):
    most = {ForwardMode.DECODE: 1, ForwardMode.IDLE: 0, ForwardMode.PREBUILT: 0}.get(mode, 2)
    for rows in range(3):
        q_lens = [rows, 0]
        if rows <= most:
            assert make_plan(mode, [3, 0], q_lens, [[5], [0]], page_size=4).num_tokens == rows
            continue
        with pytest.raises(ValueError, match=rf"q_lens=\[{rows}, 0\] in {mode.name}: "):
            make_plan(mode, [3, 0], q_lens, [[5], [0]], page_size=4)


E = ForwardMode.EXTEND
TREE = Tree(
    bits=jnp.ones((3, 1), jnp.uint32), starts=jnp.zeros(2, jnp.int32), kv_positions=jnp.zeros((2, 5), jnp.int32)
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(page_size=0), r"page_size=0: want 1 to 256"),
        (dict(page_size=257), r"page_size=257: want 1 to 256"),
        (
            dict(q_lens=[2]),
            r"seq_lens\[2\], q_lens\[1\], page_table\[2, 2\]: want \[seqs\], \[seqs\] and \[seqs, max_pages",
        ),
        (dict(seq_lens=3), r"seq_lens\[\], q_lens\[2\], page_table\[2, 2\]: want \[seqs\]"),
        (dict(page_table=[0, 1]), r"page_table\[2\]: want"),
        (dict(seq_lens=[5.5, 3]), r"are float64, int\d\d, int\d\d: want integers"),
        (dict(q_lens=[2, 4]), r"q_lens=\[2, 4\], seq_lens=\[5, 3\]: .* 0 <= q_len <= seq_len"),
        (dict(q_lens=[2, -1]), r"q_lens=\[2, -1\], seq_lens=\[5, 3\]: .* 0 <= q_len <= seq_len"),
        (dict(seq_lens=[9, 3]), r"seq_lens=\[9, 3\] but page_table holds 2 pages of 4: 8"),
        (dict(num_tokens=2), r"num_tokens=2, max_q_len=2 do not hold q_lens=\[2, 1\]: .* sum and their maximum"),
        (dict(max_q_len=1), r"num_tokens=3, max_q_len=1 do not hold q_lens=\[2, 1\]"),
        (dict(page_table=np.zeros((2, 0), int), seq_lens=[0, 0], q_lens=[0, 0], num_tokens=3), r"\[2, 0\] has no page"),
        (dict(tree=np.ones((4, 1))), r"tree.shape=\(4, 1\): want u32\[tokens=3, ceil\(nodes / 32\)\], a row a query"),
        (dict(tree=np.ones(3)), r"tree.shape=\(3,\): want u32\[tokens=3"),
        (dict(tree=np.ones((3, 1)), max_q_len=33), r"tree has 1 words a row, room for 32 nodes, not 33"),
        (dict(tree=TREE, num_tokens=4), r"Tree has bits\[3, 1\], .*: want \[tokens=4, words\], \[seqs=2\]"),
        (
            dict(tree=TREE, seq_lens=[3], q_lens=[3], page_table=[[0]]),
            r"starts\[2\], kv_positions\[2, 5\]: .*\[seqs=1\]",
        ),
        (
            dict(tree=Tree(bits=TREE.bits, starts=TREE.starts, kv_positions=jnp.zeros((2, 33)))),
            r"33 nodes .* 1 words a row",
        ),
    ],
)
def test_an_error_is_one_sentence_with_the_values_and_the_rule(change, message):
    right: dict[str, Any] = dict(seq_lens=[5, 3], q_lens=[2, 1], page_table=[[0, 1], [2, 3]], page_size=4)
    assert make_plan(E, **right).num_tokens == 3
    with pytest.raises(ValueError, match=message) as error:
        make_plan(E, **{**right, **change})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("given_bounds", [dict(), dict(num_tokens=4), dict(max_q_len=4)])
def test_inside_jit_the_bounds_must_be_given(given_bounds):
    def build(q_lens):
        return make_plan(E, np.array([5, 3]), q_lens, np.array([[0, 1], [2, 3]]), page_size=4, **given_bounds)

    with pytest.raises(ValueError, match="inside jit: q_lens is traced, so give num_tokens= and max_q_len="):
        jax.jit(build)(np.array([2, 1]))


def ancestor_bits(parents, words):
    """u32[nodes, words] of a tree given by parents, from the oracle's mask."""
    mask = cases.tree_build(parents)["mask"]
    padded = np.zeros((len(parents), words * 32), bool)
    padded[:, : len(parents)] = mask
    return np.packbits(padded, axis=1, bitorder="little").view(np.uint32).reshape(len(parents), words)


@st.composite
def forests(draw):
    """A tree a request, of at most 40 nodes, some absent; with the prefix length in front of each."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    sizes = draw(st.lists(st.sampled_from([0, 1, 2, 7, 31, 32, 33, 40]), min_size=SEQS, max_size=SEQS))
    parents = [[-1, *(int(rng.integers(0, i)) for i in range(1, n))][:n] for n in sizes]
    prefix = rng.integers(0, 24, SEQS)
    return parents, prefix, wild_table(rng, prefix + sizes, 16)


TREE_ROWS = 160


@DRAWN
@given(forest=forests())
def test_tree_nodes_are_at_the_start_plus_their_depth(forest):
    parents, prefix, table = forest
    q_lens = np.asarray([len(p) for p in parents], np.int32)
    seq_lens = np.where(q_lens > 0, prefix + q_lens, 0).astype(np.int32)
    rows = list(enumerate_rows(seq_lens, q_lens, table, 16))
    bits = np.random.default_rng(0).integers(0, 2**32, (TREE_ROWS, 2), dtype=np.uint32)  # padding rows: anything
    bits[: len(rows)] = np.concatenate([ancestor_bits(p, 2) for p in parents if p] or [bits[:0]])
    sizes: dict[str, Any] = dict(page_size=16, num_tokens=TREE_ROWS, max_q_len=40)
    plan = make_plan(ForwardMode.TARGET_VERIFY, seq_lens, q_lens, table, tree=bits, **sizes)
    depths = [cases.tree_build(p)["depth"] if p else np.zeros(0, int) for p in parents]
    padding = TREE_ROWS - len(rows)
    np.testing.assert_array_equal(plan.positions, [prefix[b] + depths[b][i] for b, i, *_ in rows] + [0] * padding)
    np.testing.assert_array_equal(plan.write_slots, [slot for *_, slot in rows] + [-1] * padding)
    assert plan.tree is not None and plan.mask == "tree"
    np.testing.assert_array_equal(plan.tree.bits, bits)
    for b, nodes in enumerate(parents):
        assert plan.tree.starts[b] == seq_lens[b] - q_lens[b]
        np.testing.assert_array_equal(plan.tree.kv_positions[b, : len(nodes)], prefix[b] + depths[b])
    same(plan, jitted(ForwardMode.TARGET_VERIFY, 16, TREE_ROWS, 40)(seq_lens, q_lens, table, bits))


def test_positions_of_a_known_tree():
    case = cases.build("C14")
    parents, prefix = case.inputs["parents"].tolist(), case.inputs["prefix_len"]
    nodes = len(parents)
    bits = ancestor_bits(parents, 1)
    plan = make_plan(ForwardMode.TARGET_VERIFY, [prefix + nodes], [nodes], [np.arange(5)], page_size=8, tree=bits)
    mask = np.unpackbits(np.asarray(bits).view(np.uint8), axis=1, bitorder="little")[:, :nodes].astype(bool)
    assert case.check({"positions": np.asarray(plan.positions), "mask": mask}) == []


def test_a_draft_step_plans_its_newest_nodes_of_a_larger_tree():
    """Two branches at step 2 of request 0, none of request 1: the queries are nodes 3 and 4 of five."""
    parents = [-1, 0, 0, 1, 2]
    bits = ancestor_bits(parents, 1)[3:]
    tree = Tree(
        bits=jnp.asarray(np.concatenate([bits, [[7]]]).astype(np.uint32)),  # the last row is padding
        starts=jnp.array([6, 0], jnp.int32),
        kv_positions=jnp.array([[6, 7, 7, 8, 8], [0] * 5], jnp.int32),
    )
    seq_lens, q_lens, table = np.array([11, 0]), np.array([2, 0]), np.array([[9, 4, 1], [-5, 99, 7]])
    sizes: dict[str, Any] = dict(page_size=4, num_tokens=3, max_q_len=2)
    plan = make_plan(ForwardMode.DRAFT_EXTEND_V2, seq_lens, q_lens, table, tree=tree, **sizes)
    assert plan.positions.tolist() == [8, 8, 0]
    assert plan.write_slots.tolist() == [1 * 4 + 1, 1 * 4 + 2, -1]  # by index, not by depth
    same(plan.tree, tree)
    same(plan, jitted(ForwardMode.DRAFT_EXTEND_V2, 4, 3, 2)(seq_lens, q_lens, table, tree))
