"""Long contexts and many requests on TPU at a reduced size: tables of several chunks, items that take turns."""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false, reportCallIssue=false

import jax.numpy as jnp
import numpy as np
import pytest
from watched import CHECKED, assert_no_race

from pallas_kernels._common import tpu_rows
from pallas_kernels.attention import tpu, xla
from pallas_kernels.attention.tpu_config import Config

HEADS, DIM = 2, 16
CASES = dict(
    long=dict(lens=[1000, 517], q_lens=[1, 3], page=1, config=Config(block_q=8, block_pages=32, heads=2)),
    long_rows=dict(lens=[2100, 1], q_lens=[2, 1], page=8, config=Config(block_q=8, block_pages=4, heads=1)),
    halves=dict(lens=[1100, 517, 512], q_lens=[1] * 3, page=16, config=Config(block_pages=32, heads=2)),
    two_held=dict(lens=[700, 517], q_lens=[1, 1], page=16, config=Config(block_pages=16, heads=2, depth=2)),
    many=dict(lens=[7 + 3 * i % 50 for i in range(48)], q_lens=[1] * 48, page=8, config=Config(block_pages=2, heads=2)),
)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_tables_of_many_chunks_and_many_requests_are_gone_through(case):
    rng = np.random.default_rng(0)
    lens, q_lens, page = np.array(case["lens"]), np.array(case["q_lens"]), case["page"]
    pages = -(-lens // page)
    table = np.full((len(lens), pages.max() + 130), 2**30, np.int32)
    order = rng.permutation(pages.sum())
    for b, n in enumerate(pages):
        table[b, :n], order = order[:n], order[n:]
    k, v = (rng.normal(size=(pages.sum(), page, HEADS, DIM)).astype(np.float32) for _ in range(2))
    q = rng.normal(size=(q_lens.sum(), 2 * HEADS, DIM)).astype(np.float32)
    given = dict(
        page_table=jnp.asarray(table),
        seq_lens=jnp.asarray(lens, jnp.int32),
        cu_q_lens=jnp.asarray(np.r_[0, np.cumsum(q_lens)], jnp.int32),
        max_q_len=int(q_lens.max()),
        sm_scale=DIM**-0.5,
    )
    rows = tpu_rows.pack(jnp.asarray(k), jnp.asarray(v))
    words = dict(kv_dtype=jnp.float32) if tpu_rows.held_as_words(page) else {}
    pool = tpu_rows.to_words(rows) if words else rows
    more = dict(kv_heads=HEADS, config=case["config"], interpret=CHECKED)
    out, lse = tpu.paged_attention(jnp.asarray(q), pool, **given, **words, **more)
    assert_no_race()
    want, want_lse = xla.paged_attention(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), **given)
    np.testing.assert_allclose(out, want, atol=2e-6)
    np.testing.assert_allclose(lse, want_lse, atol=2e-6)
