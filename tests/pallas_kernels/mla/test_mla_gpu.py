"""The portable latent attention, interpreted step by step, against float64 over drawn batches full of poison."""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false, reportCallIssue=false

import dataclasses
import functools

import drawn
import earned
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import Setup

from pallas_kernels._common import latent_rows
from pallas_kernels.attention.gpu_config import Config
from pallas_kernels.mla import gpu, xla

_BASE = Setup(name="", num_kv_heads=1, group=3, head_dim=20, v_head_dim=16, dtype="bfloat16")
_SMALL = Config(block_rows=16, block_kv=16)
SETUPS = ((dataclasses.replace(_BASE, name="tree", group=4, mask="tree", max_q_len=6, num_tokens=20), _SMALL),)
WIDE = (
    (dataclasses.replace(_BASE, name="many heads", group=40, dtype="float32"), _SMALL),
    (dataclasses.replace(_BASE, name="splits", group=16, max_q_len=1, num_tokens=5, page_size=16),
     dataclasses.replace(_SMALL, splits=4)),
    (dataclasses.replace(_BASE, name="sizes chosen", group=16, head_dim=384, v_head_dim=192, dtype="float32"), None),
    (dataclasses.replace(_BASE, name="full", mask="full", group=5, page_size=1), _SMALL),
)  # fmt: skip


@functools.cache
def attend(setup: Setup, config):
    """The kernel behind a plan made in jit."""

    @jax.jit
    def run(q, seq_lens, q_lens, page_table, tree, pages):
        plan = drawn.plan_of(setup, seq_lens, q_lens, page_table, tree)
        return gpu.attend_latent(
            q,
            pages,
            latent_dim=setup.v_head_dim,
            config=config,
            interpret=True,
            **drawn.asked_of(setup, plan),
        )

    return run


def check(setup, config, data):
    ins = drawn.build(setup, data.draw(drawn.batches(setup)))
    ins.values = [keys[..., : setup.v_head_dim] for keys in ins.keys]  # the front of the row
    ins.v_scales = ins.k_scales
    out, lse = attend(setup, config)(*drawn.given(ins), drawn.cache(setup, ins).k[:, :, 0])
    earned.compare(setup, ins, out, lse)


@pytest.mark.parametrize(("setup", "config"), SETUPS, ids=lambda x: getattr(x, "name", ""))
@hypothesis.settings(max_examples=2, phases=[hypothesis.Phase.generate])
@hypothesis.given(data=st.data())
def test_latent_attention_is_as_right_as_plain_jax(setup, config, data):
    check(setup, config, data)


@pytest.mark.long
@pytest.mark.parametrize(("setup", "config"), SETUPS + WIDE, ids=lambda x: getattr(x, "name", ""))
@hypothesis.settings(max_examples=10, phases=[hypothesis.Phase.generate])
@hypothesis.given(data=st.data())
def test_latent_attention_is_as_right_as_plain_jax_widely(setup, config, data):
    check(setup, config, data)


@pytest.mark.long
@pytest.mark.parametrize(("latent_dim", "rope_dim"), [(160, 16), (128, 20)])
def test_packed_8_bit_rows_give_what_plain_jax_gives(latent_dim, rope_dim):
    rng = np.random.default_rng(0)
    rows, pages, size, heads = 60, 8, 8, 3
    latent, rope = (jnp.asarray(rng.normal(size=(rows, dim)), jnp.float32) for dim in (latent_dim, rope_dim))
    packed = latent_rows.pack(latent, rope, jnp.uint8)
    pool = jnp.full((pages * size, packed.shape[1]), 0x7F, jnp.uint8).at[:rows].set(packed).reshape(pages, size, -1)
    args = dict(
        latent_dim=latent_dim,
        page_table=jnp.asarray([[0, 1, 2, 99], [3, 4, 5, 7]], jnp.int32),
        seq_lens=jnp.asarray([20, 30], jnp.int32),
        cu_q_lens=jnp.asarray([0, 1, 4], jnp.int32),
        max_q_len=3,
        sm_scale=0.1,
    )
    q = jnp.asarray(rng.normal(size=(5, heads, latent_dim + rope_dim)), jnp.float32)
    pool = pool.at[7].set(pool[6])
    got = gpu.attend_latent(q, pool, **args, config=_SMALL, interpret=True)
    want = xla.attend_latent(q, pool, **args)
    assert np.isfinite(np.asarray(want[0])).all()
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=3e-6, atol=3e-6)
