"""Chunked prefixes and chunked local attention: worked examples, and random batches token by token."""

import numpy as np
import pytest

from jattn.dispatch.local_chunks import plan_local_chunks
from jattn.dispatch.prefix_chunks import chunk_slots, plan_prefix_chunks


def test_worked_example_of_prefix_chunks():
    plan = plan_prefix_chunks([5, 12, 0], capacity=12)
    assert (plan.chunk_len, plan.num_chunks) == (4, 3)
    assert plan.starts.tolist() == [[0, 0, 0], [4, 4, 4], [8, 8, 8]]
    assert plan.lens.tolist() == [[4, 4, 0], [1, 4, 0], [0, 4, 0]]
    assert plan.cu_seqlens.tolist() == [[0, 4, 8, 8], [0, 1, 5, 5], [0, 0, 4, 4]]
    assert plan.max_seq_lens.tolist() == [4, 4, 4] and plan.num_tokens.tolist() == [8, 5, 4]
    assert plan.has_zero_kv.tolist() == [True, True, True]
    assert plan.cu_seqlens.dtype == np.int32


@pytest.mark.parametrize("seed", range(30))
def test_prefix_chunks_cover_each_prefix_once_in_order(seed):
    draw = np.random.default_rng(seed)
    prefixes = draw.integers(0, 40, size=draw.integers(1, 6)).tolist()
    capacity = int(draw.integers(len(prefixes), 60))
    plan = plan_prefix_chunks(prefixes, capacity=capacity)
    table = np.arange(len(prefixes) * 40).reshape(-1, 40)
    parts = [[] for _ in prefixes]
    for i, slots in enumerate(chunk_slots(table, plan)):
        assert len(slots) == plan.num_tokens[i] == plan.cu_seqlens[i, -1] <= capacity
        assert plan.has_zero_kv[i] == (plan.lens[i].min() == 0) and plan.max_seq_lens[i] == plan.lens[i].max() > 0
        for b, part in enumerate(np.split(slots, plan.cu_seqlens[i, 1:-1])):
            parts[b].extend(part.tolist())
    assert parts == [table[b, :n].tolist() for b, n in enumerate(prefixes)]


def test_without_prefix_there_is_no_chunk():
    assert plan_prefix_chunks([0, 0], capacity=0).num_chunks == 0
    assert plan_prefix_chunks([]).num_chunks == 0
    assert chunk_slots(np.zeros((2, 4), int), plan_prefix_chunks([0, 0])) == ()


def test_bad_prefix_batches_are_refused():
    with pytest.raises(ValueError, match="capacity=2 leaves no token for each of 3 requests: raise max_chunk_capacity"):
        plan_prefix_chunks([1, 2, 3], capacity=2)
    with pytest.raises(ValueError, match="prefix_lens=.-1.: want lengths of at least 0"):
        plan_prefix_chunks([-1])


def test_worked_example_of_local_chunks():
    plan = plan_local_chunks([4, 10, 5], [6, 17, 9], np.arange(15).reshape(3, 5), chunk_len=4, page_size=4)
    assert plan.q_lens.tolist() == [2, 2, 1, 4, 4, 1, 4, 1]
    assert plan.kv_lens.tolist() == [4, 2, 4, 4, 4, 1, 4, 1]
    assert plan.seq_ids.tolist() == [0, 0, 1, 1, 1, 1, 2, 2]
    assert plan.page_table[:, 0].tolist() == [0, 1, 6, 7, 8, 9, 11, 12]


@pytest.mark.parametrize("seed", range(30))
def test_local_chunks_show_each_query_its_own_chunk(seed):
    draw = np.random.default_rng(seed)
    page_size = int(draw.choice([1, 2, 4]))
    chunk_len = page_size * int(draw.integers(1, 4))
    kv_lens = draw.integers(0, 25, size=4)
    q_lens = [int(draw.integers(0, n + 1)) for n in kv_lens]
    pages = -(-25 // page_size)
    table = draw.permutation(4 * pages).reshape(4, pages)
    plan = plan_local_chunks(q_lens, kv_lens.tolist(), table, chunk_len=chunk_len, page_size=page_size)
    got = [[] for _ in q_lens]
    for v, b in enumerate(plan.seq_ids):
        for i in range(plan.q_lens[v]):
            seen = range(plan.kv_lens[v] - plan.q_lens[v] + i + 1)
            got[b].append([(int(plan.page_table[v, j // page_size]), j % page_size) for j in seen])
    for b, (q, kv) in enumerate(zip(q_lens, kv_lens.tolist(), strict=True)):
        want = [range(p // chunk_len * chunk_len, p + 1) for p in range(kv - q, kv)]
        assert got[b] == [[(int(table[b, j // page_size]), j % page_size) for j in seen] for seen in want]
    assert plan.cu_q_lens.tolist() == np.cumsum([0, *plan.q_lens]).tolist()


def test_bad_local_chunks_are_refused():
    with pytest.raises(ValueError, match="chunk_len=6 with page_size=4: want a chunk of whole pages"):
        plan_local_chunks([1], [1], np.zeros((1, 1)), chunk_len=6, page_size=4)
    with pytest.raises(ValueError, match="q_lens.0.=3 with kv_lens.0.=2"):
        plan_local_chunks([3], [2], np.zeros((1, 1)), chunk_len=4, page_size=4)
