"""Draft plans: worked examples, and random batches against a listing slot by slot, with pages checked for overlap."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.draft.block_tables import BlockTable, Cascade, branch_tables, cascade_step
from jattn.draft.index_lists import IndexLists, kv_lists, used_len
from jattn.draft.slots import (
    DraftShape,
    branch_starts,
    by_step,
    draft_positions,
    draft_slots,
    reserved_slots,
    tail_copies,
)
from jattn.draft.step_plans import STEP_ROWS, plan_step, step_kv_lens

CHAIN_AND_TREE = DraftShape(topk=2, num_steps=3)
PAGED = DraftShape(topk=2, num_steps=3, page_size=4)


# What is compiled here runs a few times: without optimisation it is there sooner, with the same integers.
compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def rows(*bases: int, width: int = 24) -> np.ndarray:
    return np.array(bases, np.int32)[:, None] + np.arange(width, dtype=np.int32)[None]


def on_arrays(run, table, lens):
    """run(table, lens) as one program, its arrays as NumPy's."""
    return jax.tree.map(np.asarray, compiled(run)(jnp.asarray(table), jnp.asarray(lens, jnp.int32)))


def test_worked_example_of_single_token_pages():
    slots, lists, positions = on_arrays(
        lambda table, lens: (
            draft_slots(table, lens, CHAIN_AND_TREE),
            kv_lists(table, lens, CHAIN_AND_TREE),
            [draft_positions(lens, i, 2) for i in (0, 1)],
        ),
        rows(100, 200),
        [3, 2],
    )
    assert slots.reshape(-1).tolist() == [*range(103, 109), *range(202, 208)]
    assert by_step(slots).tolist() == [[103, 106, 202, 205], [104, 107, 203, 206], [105, 108, 204, 207]]
    assert lists.kv_indptr[:2].tolist() == [[0, 4, 8, 11, 14], [0, 5, 10, 14, 18]]
    assert lists.kv_indices[0, :14].tolist() == [
        *(100, 101, 102, 103, 100, 101, 102, 106),
        *(200, 201, 202, 200, 201, 205),
    ]
    assert lists.kv_indices[1, :18].tolist() == [
        *(100, 101, 102, 103, 104, 100, 101, 102, 106, 107),
        *(200, 201, 202, 203, 200, 201, 205, 206),
    ]
    assert [x.tolist() for x in positions] == [[3, 3, 2, 2], [4, 4, 3, 3]]


def test_worked_example_of_pages():
    longer = DraftShape(topk=2, num_steps=4, page_size=4)
    slots, (source, target), lists, cascades, third = on_arrays(
        lambda table, lens: (
            draft_slots(table, lens, PAGED),
            tail_copies(table, lens, PAGED),
            kv_lists(table, lens, PAGED),
            [cascade_step(table, lens, step, PAGED) for step in (0, 1)],
            cascade_step(table, lens, 2, longer).branch,
        ),
        rows(400, 800),
        [6, 4],
    )
    assert slots.reshape(-1).tolist() == [406, 407, 408, 414, 415, 416, 804, 805, 806, 808, 809, 810]
    assert source.tolist() == [[[404, 405, -1]], [[-1, -1, -1]]]
    assert target.tolist() == [[[412, 413, -1]], [[-1, -1, -1]]]
    assert lists.kv_indptr[:2].tolist() == [[0, 7, 14, 19, 24], [0, 8, 16, 22, 28]]
    assert lists.kv_indices[0, 7:14].tolist() == [
        400,
        401,
        402,
        403,
        404,
        405,
        414,
    ]  # the original prefix, not the copy
    for cascade, want in zip(cascades, ([3, 3, 1, 1], [4, 4, 2, 2]), strict=True):
        assert cascade.prefix.cache_seqlens.tolist() == [4, 4]
        assert cascade.prefix.cu_q_lens.tolist() == [0, 2, 4]
        assert cascade.branch.cache_seqlens.tolist() == want
        assert cascade.branch.page_table[:, 0].tolist() == [101, 103, 201, 202]
    assert third.cache_seqlens.tolist() == [5, 5, 3, 3] and third.page_table[0].tolist() == [101, 102]


def test_reservation_and_lengths_used():
    assert reserved_slots(DraftShape(topk=1, num_steps=3), 4) == 8
    assert reserved_slots(DraftShape(topk=4, num_steps=5), 8) == 40
    assert reserved_slots(DraftShape(topk=1, num_steps=3, page_size=64), 4) == 8
    assert reserved_slots(PAGED, 40) == 80
    assert used_len(5, 2, 1, 2) == 18


SHAPES = [(1, 3, 1), (2, 3, 1), (3, 5, 1), (1, 4, 4), (2, 3, 4), (4, 5, 2), (3, 1, 8), (2, 5, 8)]


def drawn(seed, shape: DraftShape):
    """A batch over a shuffled pool of pages, and the slot of each (request, branch, step) found by walking pages."""
    draw = np.random.default_rng(seed)
    page_size, lens = shape.page_size, draw.integers(0, 14, size=4).astype(np.int32)
    pages = -(-(14 + reserved_slots(shape, 1)) // page_size)
    ids = draw.permutation(len(lens) * pages).reshape(len(lens), pages)
    table = (ids[:, :, None] * page_size + np.arange(page_size)).reshape(len(lens), -1).astype(np.int32)
    own = np.zeros((len(lens), shape.topk, shape.num_steps), np.int32)
    for b, length in enumerate(lens):
        at = length  # branches follow each other; with pages, each takes whole ones
        for t in range(shape.topk):
            own[b, t] = table[b, at : at + shape.num_steps]
            at += shape.num_steps
            if page_size > 1 and shape.topk > 1:
                at = -(-at // page_size) * page_size + length % page_size
    return table, lens, own


def planned(shape: DraftShape):
    """Every plan of a shape in one program, so that a shape compiles once."""

    def run(table, lens):
        def of_step(step):
            kv_lens = step_kv_lens("ascend", lens, step, shape.topk)
            return dict(
                pages=branch_tables(table, lens, kv_lens, shape),
                tokens=branch_tables(table, lens, kv_lens, shape, by_token=True),
                cascades=cascade_step(table, lens, step, shape),
            )

        return dict(
            slots=draft_slots(table, lens, shape),
            starts=branch_starts(lens, shape),
            copies=tail_copies(table, lens, shape),
            lists=kv_lists(table, lens, shape),
            steps=jax.vmap(of_step)(jnp.arange(shape.num_steps)),
        )

    return compiled(run)


@pytest.mark.parametrize(("topk", "num_steps", "page_size"), SHAPES)
def test_slots_lists_and_tables_equal_a_listing_slot_by_slot(topk, num_steps, page_size):
    shape = DraftShape(topk=topk, num_steps=num_steps, page_size=page_size)
    run = planned(shape)
    for seed in range(8):
        table, lens, own = drawn(seed, shape)
        got = jax.tree.map(np.asarray, run(table, lens))
        assert got["slots"].tolist() == own.tolist()
        assert got["starts"].max() < table.shape[1]
        check_branches_apart(shape, table, lens, own)
        for i in range(num_steps):
            want = [[*table[b, : lens[b]], *own[b, t, : i + 1]] for b in range(len(lens)) for t in range(topk)]
            check_lists(got["lists"], i, want)
            assert got["lists"].kv_indptr[i, -1] == used_len(int(lens.sum()), len(lens), i, topk)
            step = jax.tree.map(lambda x, i=i: x[i], got["steps"])
            check_tables(shape, table, lens, own, got["copies"], step, want)


def check_lists(lists: IndexLists, step: int, want: list) -> None:
    indptr, indices = lists.kv_indptr[step], lists.kv_indices[step]
    assert indptr.tolist() == np.cumsum([0, *map(len, want)]).tolist()
    assert indices[: indptr[-1]].tolist() == np.concatenate(want).tolist()
    assert indptr[-1] <= indices.size and not indices[indptr[-1] :].any()


def check_tables(shape, table, lens, own, copies, step: dict, want: list) -> None:
    """What a paged kernel reads through the tables, after the tails are copied, is what the lists say."""
    holds = {int(slot): (b, i) for b in range(len(lens)) for i, slot in enumerate(table[b, : lens[b]])}
    holds |= {int(own[b, t, s]): (b, t, s) for b, t, s in np.ndindex(own.shape)}
    for source, target in zip(*(x.reshape(-1) for x in copies), strict=True):
        if source >= 0:
            assert int(target) not in holds
            holds[int(target)] = holds[int(source)]
    contents = [[holds[int(slot)] for slot in row] for row in want]
    page_size, cascade = shape.page_size, step["cascades"]
    assert [read(holds, step["pages"], z, page_size) for z in range(len(want))] == contents
    assert [read(holds, step["tokens"], z, 1) for z in range(len(want))] == contents
    for z, content in enumerate(contents):
        shared = read(holds, cascade.prefix, z // shape.topk, page_size)
        assert shared + read(holds, cascade.branch, z, page_size) == content


def check_branches_apart(shape: DraftShape, table, lens, own) -> None:
    """No two branches touch one page, and the prefix only branch 0's, in its last partial page."""
    if shape.topk > 1:
        touched = [set(own[b, t] // shape.page_size) for b in range(len(lens)) for t in range(shape.topk)]
        assert sum(map(len, touched)) == len(set.union(*touched))
    for b, length in enumerate(lens):
        prefix = set(table[b, :length] // shape.page_size)
        for t in range(shape.topk):
            shared = prefix & set(own[b, t] // shape.page_size)
            assert not shared or (t == 0 and len(shared) == 1 and length % shape.page_size)


def read(holds, tables: BlockTable, row: int, page_size: int) -> list:
    """What lies at the keys of one row of a table."""
    pages, count = np.asarray(tables.page_table)[row], int(tables.cache_seqlens[row])
    return [holds[int(pages[i // page_size]) * page_size + i % page_size] for i in range(count)]


def test_a_draft_window_keeps_sinks_and_the_newest():
    windowed = functools.partial(kv_lists, shape=CHAIN_AND_TREE, window=3, num_sink_tokens=2)
    lists = on_arrays(windowed, rows(100, 200), [9, 3])
    want = [[100, 101, 106, 107, 108, 109], [100, 101, 106, 107, 108, 112], [200, 201, 202, 203], [200, 201, 202, 206]]
    got = np.split(np.asarray(lists.kv_indices[0]), np.asarray(lists.kv_indptr[0]))[1:-1]
    assert [row.tolist() for row in got] == want
    assert lists.kv_lens[0].tolist() == [6, 6, 4, 4]


# variant -> form, whether it drafts trees, whether the original adds i + 1
FORMS = {
    "triton": ("lists", True, True),
    "flashinfer": ("lists", True, True),
    "flashinfer_mla": ("lists", False, True),
    "aiter": ("lists", True, True),
    "fa3": ("cascade", True, True),
    "fa4": ("cascade", True, True),
    "fa3_musa": ("cascade", True, True),
    "fa4_musa": ("cascade", True, True),
    "intel_xpu": ("cascade", True, True),
    "intel_amx": ("table", True, True),
    "trtllm_mha": ("table", False, True),
    "flashmla": ("table", False, False),
    "trtllm_mla": ("table", False, False),
    "cutedsl_mla": ("table", False, False),
    "tokenspeed_mla": ("table", False, False),
    "dsa": ("table", False, False),
    "dsv4": ("table", False, False),
    "dsv4_hip": ("table", False, True),
    "dsv4_npu": ("table", False, True),
    "ascend": ("table", True, True),
    "qsa": ("table", False, True),
}
TYPES = {"lists": IndexLists, "cascade": Cascade, "table": BlockTable}


def test_every_variant_has_a_form():
    assert set(STEP_ROWS) == set(FORMS)
    with pytest.raises(ValueError, match="unknown draft variant 'native': want one of"):
        plan_step("native", jnp.asarray(rows(0)), jnp.array([3]), 0, CHAIN_AND_TREE)


@functools.cache
def chain_plans(row):
    """Plans of one row's second forward, and the same for parity; a row compiles once, whatever its variants."""
    variant = next(variant for variant, other in STEP_ROWS.items() if other == row)
    chain = DraftShape(topk=1, num_steps=3, page_size=4)

    def run(table, lens):
        return [plan_step(variant, table, lens, 1, chain, parity=parity) for parity in (False, True)]

    return on_arrays(run, rows(400, 800), [6, 4])


@pytest.mark.parametrize("variant", FORMS)
def test_plan_of_a_step_by_variant(variant):
    form, trees, sees_own = FORMS[variant]
    plan, parity = chain_plans(STEP_ROWS[variant])
    if form == "lists":
        assert isinstance(plan, IndexLists) and plan.kv_lens.tolist() == [[8, 6]]
    else:
        assert isinstance(plan, BlockTable) and plan.cache_seqlens.tolist() == [8, 6] and plan.causal
        assert isinstance(parity, BlockTable)
        assert parity.cache_seqlens.tolist() == ([8, 6] if sees_own else [6, 4])
        assert plan.page_table[0, 0] == (400 if variant == "intel_amx" else 100)
        assert plan.cu_kv_lens.tolist() == [0, 8, 14]
    tree = functools.partial(plan_step, variant, step=1, shape=PAGED)
    batch = jnp.asarray(rows(400, 800)), jnp.array([6, 4])
    if trees:
        assert isinstance(jax.eval_shape(tree, *batch), TYPES[form])
    else:
        with pytest.raises(ValueError, match=f"topk=2: {variant} drafts chains, so it needs topk=1"):
            tree(*batch)


@pytest.mark.parametrize("variant", ["triton", "fa3", "intel_amx", "flashmla"])
def test_plans_run_inside_jit_with_a_traced_step(variant):
    shape = PAGED if FORMS[variant][1] else DraftShape(topk=1, num_steps=3, page_size=4)

    @compiled
    def both(table, lens, step):
        wants = [plan_step(variant, table, lens, i, shape) for i in range(2)]
        return wants, plan_step(variant, table, lens, step, shape)

    for step in range(2):
        wants, got = both(jnp.asarray(rows(400, 800)), jnp.array([6, 4]), step)
        assert jax.tree.all(jax.tree.map(lambda a, b: a.tolist() == b.tolist(), got, wants[step]))


def test_a_shape_below_one_is_refused():
    with pytest.raises(ValueError, match="DraftShape.topk=0: want at least 1"):
        DraftShape(topk=0, num_steps=3)
