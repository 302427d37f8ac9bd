"""Chunks of cached latents: the plan of the original, in buckets, on the host and inside jit."""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.combinators.latent_chunks import BLOCK, CHUNKED, ONE_SHOT, make_chunks
from jattn.dispatch import METHODS
from jattn.dispatch import AttnForwardMethod as M
from jattn.dispatch.prefix_chunks import chunk_slots, plan_prefix_chunks

PAGE = 4


def batch(seed: int):
    """seq_lens, q_lens, a shuffled table, and the slot of each token [seqs, width]."""
    draw = np.random.default_rng(seed)
    fresh = draw.integers(0, 6, 5)
    lens = fresh + draw.integers(0, 40, 5) * draw.integers(0, 2, 5)
    table = draw.permutation(60).reshape(5, 12).astype(np.int32)
    return lens, fresh, table, (table[:, :, None] * PAGE + np.arange(PAGE)).reshape(5, -1)


def spans(chunks):
    """Slots of each chunk in use."""
    ends = np.asarray(chunks.cu_kv_lens)[:, -1]
    return [np.asarray(chunks.slots)[i, : ends[i]] for i in range(int(chunks.num_chunks))]


@pytest.mark.parametrize("capacity", [5, 17, 64, 131072])
@pytest.mark.parametrize("seed", range(4))
def test_chunks_are_those_of_the_plan(seed, capacity):
    lens, fresh, table, slots = batch(seed)
    plan = plan_prefix_chunks((lens - fresh).tolist(), capacity=capacity)
    for method in (M.MHA_CHUNKED_KV, M.MHA):
        chunks = make_chunks(method, lens, fresh, table, page_size=PAGE, capacity=capacity)
        assert int(chunks.num_chunks) == plan.num_chunks
        np.testing.assert_array_equal(chunks.cu_kv_lens[: plan.num_chunks], plan.cu_seqlens)
        np.testing.assert_array_equal(chunks.starts[: plan.num_chunks], plan.starts)
        for got, want in zip(spans(chunks), chunk_slots(slots, plan), strict=True):
            np.testing.assert_array_equal(got, want)
        assert (np.asarray(chunks.slots)[plan.num_chunks :] == -1).all()


@pytest.mark.parametrize("seed", range(4))
def test_one_shot_is_one_chunk_of_everything(seed):
    lens, fresh, table, slots = batch(seed)
    chunks = make_chunks(M.MHA_ONE_SHOT, lens, fresh, table, page_size=PAGE)
    (got,) = spans(chunks)
    np.testing.assert_array_equal(got, np.concatenate([row[:n] for row, n in zip(slots, lens, strict=True)]))
    assert chunks.cu_kv_lens.tolist() == [[0, *np.cumsum(lens)]]


def test_without_a_prefix_there_is_no_chunk_unless_there_must_be_one():
    lens, _, table, _ = batch(0)
    for method in CHUNKED | ONE_SHOT:
        make = functools.partial(make_chunks, method, lens, lens, table, page_size=PAGE)
        assert make().slots.shape == (0, 0)
        assert make(min_chunks=1).slots.shape[0] == 1
    (got,) = spans(make_chunks(M.MHA_ONE_SHOT, lens, lens, table, page_size=PAGE, min_chunks=1))
    assert len(got) == lens.sum()


def test_absorbed_forms_have_no_chunks():
    lens, fresh, table, _ = batch(0)
    without = {m for m in METHODS if make_chunks(m, lens, fresh, table, page_size=PAGE) is None}
    assert without == {m for m in METHODS if m.startswith(("MLA", "DSA"))}


def test_shapes_are_buckets():
    def shape(prefixes, **options):
        lens, table = np.array(prefixes) + 1, np.zeros((len(prefixes), 2048), np.int32)
        chunks = make_chunks(M.MHA_CHUNKED_KV, lens, np.ones(len(prefixes)), table, page_size=PAGE, **options)
        return chunks.slots.shape

    assert shape([1]) == shape([64]) == (1, 64)
    assert shape([65]) == shape([100, 3]) == (1, 128)
    assert shape([5 * BLOCK]) == shape([8 * BLOCK]) == (1, 8 * BLOCK)
    assert shape([5 * BLOCK], capacity=5 * BLOCK + 1) == (1, 6 * BLOCK)  # the capacity, in whole blocks
    assert shape([300], capacity=100) == shape([400], capacity=100) == (4, 100) != shape([500], capacity=100)
    assert shape([300], capacity=100, min_rows=256, min_chunks=8) == (8, 256)


@pytest.mark.parametrize("method", [M.MHA_CHUNKED_KV, M.MHA_ONE_SHOT], ids=str)
def test_inside_jit_the_same_tokens_are_expanded(method):
    @jax.jit
    def traced(lens, fresh, table):
        return make_chunks(method, lens, fresh, table, page_size=PAGE, capacity=240)

    for seed in range(4):
        lens, fresh, table, _ = batch(seed)
        got = traced(*(jnp.asarray(x, jnp.int32) for x in (lens, fresh, table)))
        want = make_chunks(method, lens, fresh, table, page_size=PAGE, capacity=240)
        np.testing.assert_array_equal(np.concatenate(spans(got)), np.concatenate(spans(want)))
        np.testing.assert_array_equal(got.cu_kv_lens[0], want.cu_kv_lens[0])


@pytest.mark.parametrize(
    ("method", "capacity", "message"),
    [
        (
            M.MHA_CHUNKED_KV,
            2,
            "capacity=2 leaves no token for each of 3 requests: raise max_chunk_capacity to at least",
        ),
        (M.MHA_ONE_SHOT, 20, "capacity=20 but 21 tokens are to be expanded in one shot: use MHA_CHUNKED_KV, or raise"),
    ],
)
def test_a_capacity_that_is_too_small_is_refused(method, capacity, message):
    with pytest.raises(ValueError, match=message):
        make_chunks(method, [6, 13, 2], [1, 1, 2], np.zeros((3, 4)), page_size=PAGE, capacity=capacity)


def test_a_capacity_without_a_token_for_each_request_is_refused_inside_jit_too():
    with pytest.raises(ValueError, match="capacity=2 leaves no token for each of 3 requests"):
        jax.eval_shape(
            lambda lens: make_chunks(
                M.MHA_CHUNKED_KV, lens, lens, jnp.zeros((3, 4), jnp.int32), page_size=4, capacity=2
            ),
            jax.ShapeDtypeStruct((3,), jnp.int32),
        )
