"""What the target reads when it verifies, against a listing key by key over random trees."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.draft.block_tables import BlockTable, Cascade
from jattn.draft.verify import (
    ListVerify,
    full_mask,
    pack_mask_bits,
    verify_cascade,
    verify_chain,
    verify_chain_by_row,
    verify_lists,
    verify_window,
    window_lists,
)
from jattn.draft.verify_plans import VERIFY_ROWS, plan_verify

NUM_NODES, WIDTH, PAGE = 5, 20, 4


def drawn(seed: int):
    """A shuffled pool, lengths with 0 among them, and random trees: parents[i] < i."""
    draw = np.random.default_rng(seed)
    lens = np.array([0, *draw.integers(0, WIDTH - NUM_NODES, size=2)], np.int32)
    ids = draw.permutation(3 * WIDTH // PAGE).reshape(3, -1)
    table = (ids[:, :, None] * PAGE + np.arange(PAGE)).reshape(3, -1).astype(np.int32)
    mask, depths = np.zeros((3, NUM_NODES, NUM_NODES), bool), np.zeros((3, NUM_NODES), np.int32)
    for b in range(3):
        for node in range(NUM_NODES):
            parent = draw.integers(0, node) if node else None
            if parent is not None:
                mask[b, node] = mask[b, parent]
                depths[b, node] = depths[b, parent] + 1
            mask[b, node, node] = True
    return table, lens, mask, depths


@jax.jit
def planned(table, lens, mask, depths):
    return dict(
        cascade=verify_cascade(table, lens, mask, PAGE),
        windows=[verify_window(table, lens, mask, depths, w) for w in (1, 3, 30)],
        prefix_lists=verify_lists(table, lens, mask),
        all_lists=verify_lists(table, lens, mask, with_nodes=True),
        window_lists=window_lists(table, lens, 3),
        by_row=verify_chain_by_row(table, lens, NUM_NODES, PAGE),
    )


@pytest.mark.parametrize("seed", range(6))
def test_verify_plans_equal_a_listing_key_by_key(seed):
    table, lens, mask, depths = drawn(seed)
    got = jax.tree.map(np.asarray, planned(table, lens, mask, depths))
    nodes = [table[b, lens[b] : lens[b] + NUM_NODES] for b in range(3)]
    visible = [nodes[b][mask[b, i]].tolist() for b in range(3) for i in range(NUM_NODES)]

    branch = got["cascade"].branch
    assert branch.cache_seqlens.tolist() == [len(row) for row in visible]
    assert [row[:n].tolist() for row, n in zip(branch.page_table, branch.cache_seqlens, strict=True)] == visible
    assert got["cascade"].prefix.cache_seqlens.tolist() == lens.tolist() and not got["cascade"].prefix.causal
    assert got["cascade"].prefix.cu_q_lens.tolist() == [0, 5, 10, 15]
    assert (got["cascade"].prefix.page_table == table[:, ::PAGE] // PAGE).all()

    for window, tables in zip((1, 3, 30), got["windows"], strict=True):
        for z, row in enumerate(tables.page_table):
            b, i = divmod(z, NUM_NODES)
            own = lens[b] + depths[b, i]
            want = [int(table[b, p]) for p in range(lens[b]) if p > own - window]
            want += [
                int(nodes[b][j]) for j in range(NUM_NODES) if mask[b, i, j] and lens[b] + depths[b, j] > own - window
            ]
            assert row[: tables.cache_seqlens[z]].tolist() == want

    flat = [
        [j < 0 or bool(mask[b, i, j]) for j in range(-lens[b], NUM_NODES)] for b in range(3) for i in range(NUM_NODES)
    ]
    flat = [seen for row in flat for seen in row]
    for name, counts in (("prefix_lists", lens), ("all_lists", lens + NUM_NODES)):
        lists = got[name]
        assert lists.custom_mask[: len(flat)].tolist() == flat and not lists.custom_mask[len(flat) :].any()
        assert lists.mask_indptr.tolist() == np.cumsum([0, *(NUM_NODES * (lens + NUM_NODES))]).tolist()
        assert lists.qo_indptr.tolist() == [0, 5, 10, 15] and lists.max_extend_len == NUM_NODES
        assert lists.kv_indptr.tolist() == np.cumsum([0, *counts]).tolist()
        want = np.concatenate([table[b, : counts[b]] for b in range(3)])
        assert lists.kv_indices[: want.size].tolist() == want.tolist()

    indptr, indices, offsets = got["window_lists"]
    assert offsets.tolist() == [max(n - 3, 0) for n in lens]
    want = np.concatenate([table[b, offsets[b] : lens[b]] for b in range(3)])
    assert indices[: indptr[-1]].tolist() == want.tolist()

    rows = got["by_row"]
    assert rows.cache_seqlens.tolist() == [lens[b] + 1 + i for b in range(3) for i in range(NUM_NODES)]
    assert (rows.page_table[7] == table[1, ::PAGE] // PAGE).all()


def test_a_chain_is_one_causal_pass():
    plan = verify_chain(jnp.arange(40).reshape(2, 20), jnp.array([5, 0]), 3, 4)
    assert plan.causal and plan.cu_q_lens.tolist() == [0, 3, 6] and plan.cache_seqlens.tolist() == [8, 3]
    assert plan.page_table.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_mask_bits_are_lowest_first_and_start_at_whole_bytes():
    tree = np.array([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]] * 2, bool)
    mask, indptr = (np.asarray(x) for x in jax.jit(full_mask, static_argnums=2)(tree, jnp.array([1, 0]), 4))
    bits, starts = pack_mask_bits(mask, indptr)
    assert indptr.tolist() == [0, 12, 21] and starts.tolist() == [0, 2, 4]
    for b in range(2):
        unpacked = np.unpackbits(bits[starts[b] : starts[b + 1]], bitorder="little")
        block = mask[indptr[b] : indptr[b + 1]]
        assert unpacked[: block.size].tolist() == block.tolist() and not unpacked[block.size :].any()


# variant -> what verifies a chain, what verifies a tree (None: refused)
FORMS = {
    "triton": (ListVerify, ListVerify),
    "flashinfer": (ListVerify, ListVerify),
    "aiter": (ListVerify, ListVerify),
    "fa3": (BlockTable, Cascade),
    "fa4": (BlockTable, Cascade),
    "fa3_musa": (BlockTable, Cascade),
    "fa4_musa": (BlockTable, Cascade),
    "intel_xpu": (BlockTable, Cascade),
    "flashinfer_mla": (BlockTable, None),
    "flashmla": (BlockTable, None),
    "trtllm_mha": (BlockTable, None),
    "trtllm_mla": (BlockTable, None),
    "cutedsl_mla": (BlockTable, None),
    "tokenspeed_mla": (BlockTable, None),
    "ascend": (BlockTable, None),
    "dsa": (BlockTable, None),
}


def test_every_verifying_variant_has_a_form():
    assert set(VERIFY_ROWS) == set(FORMS)
    with pytest.raises(ValueError, match="unknown verifying variant 'native': want one of"):
        plan_verify("native", jnp.zeros((1, 8), jnp.int32), jnp.array([3]), NUM_NODES, PAGE)


@pytest.mark.parametrize("variant", FORMS)
def test_plan_of_a_verification_by_variant(variant):
    table, lens, mask, depths = map(jnp.asarray, drawn(0))
    plan = functools.partial(plan_verify, variant, num_nodes=NUM_NODES, page_size=PAGE)
    of_chain, of_tree = FORMS[variant]
    chain = jax.eval_shape(plan, table, lens)
    assert isinstance(chain, of_chain)
    if isinstance(chain, BlockTable):
        rows = 3 * NUM_NODES if variant == "dsa" else 3
        assert chain.causal and chain.cu_q_lens.shape == (rows + 1,) and chain.page_table.shape == (rows, WIDTH // PAGE)
    if of_tree is None:
        with pytest.raises(ValueError, match=f"{variant} verifies chains, so it takes no tree_mask: draft with topk=1"):
            plan(table, lens, tree_mask=mask)
    else:
        assert isinstance(jax.eval_shape(functools.partial(plan, tree_mask=mask), table, lens), of_tree)
    if of_tree is Cascade:
        windowed = functools.partial(plan_verify, variant, num_nodes=NUM_NODES, page_size=1, tree_mask=mask, window=3)
        assert isinstance(jax.eval_shape(functools.partial(windowed, depths=depths), table, lens), BlockTable)
        with pytest.raises(ValueError, match=f"a windowed tree with page_size=4 under {variant}: want page_size=1"):
            plan(table, lens, tree_mask=mask, depths=depths, window=3)


def test_chains_as_lists_are_causal_and_aiter_reads_mla_in_one_pass():
    def run(table, lens):
        lists = [plan_verify(name, table, lens, 2, 1) for name in ("triton", "flashinfer")]
        return lists, plan_verify("aiter", table, lens, 2, 1, use_mla=True), plan_verify("dsa", table, lens, 2, 1)

    (prefix, paged), mla, by_row = jax.jit(run)(jnp.arange(8)[None] + 40, jnp.array([1]))
    assert prefix.custom_mask[:6].tolist() == paged.custom_mask[:6].tolist() == [True, True, False, True, True, True]
    assert prefix.kv_indptr.tolist() == [0, 1] and paged.kv_indices[:3].tolist() == [40, 41, 42]
    assert isinstance(mla, BlockTable) and mla.cache_seqlens.tolist() == [3] and mla.cu_q_lens.tolist() == [0, 2]
    assert by_row.cache_seqlens.tolist() == [2, 3] and by_row.page_table.shape == (2, 8)
