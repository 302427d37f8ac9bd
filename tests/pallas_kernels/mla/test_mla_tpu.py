"""Latent attention on TPU, interpreted with race detection and NaN in all memory that was not written."""
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
from jax.experimental.pallas import tpu as pltpu

import jattn
from jattn.attend import _tree_args
from pallas_kernels.attention.tpu_config import Config
from pallas_kernels.mla import tpu, xla

CHECKED = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
_BASE = Setup(name="", num_kv_heads=1, group=3, head_dim=20, v_head_dim=16, dtype="bfloat16", page_size=16)
# four tiles of heads and queries, blocks of two parts
_AHEAD = Config(block_q=8, block_pages=16, heads=1, unroll_heads=False, parts=2)
SETUPS = (
    (dataclasses.replace(_BASE, name="tree", group=4, mask="tree", max_q_len=8, num_tokens=24, max_nodes=11), _AHEAD),
)
_LONG = dict(page_size=128, num_tokens=40)
WIDE = (
    (dataclasses.replace(_BASE, name="decode, several blocks", group=32, max_q_len=1, **_LONG),
     Config(block_q=1, block_pages=2, heads=2, unroll_heads=False, parts=2)),
    (dataclasses.replace(_BASE, name="prefill, tiles in turn", group=48, **_LONG),
     Config(block_q=8, block_pages=2, heads=1, unroll_heads=False, parts=2)),
    (dataclasses.replace(_BASE, name="without parts", group=5, dtype="float32"),
     Config(block_q=8, block_pages=2, heads=1, unroll_heads=False)),
    (dataclasses.replace(_BASE, name="two classes", group=16, max_q_len=24, **_LONG),
     (Config(block_q=1, block_pages=2, parts=2), dataclasses.replace(_AHEAD, block_pages=4))),
    (dataclasses.replace(_BASE, name="sizes chosen", group=16, head_dim=384, v_head_dim=192, dtype="float32"), None),
    (dataclasses.replace(_BASE, name="splits", group=4, num_splits=2, **_LONG), _AHEAD),
    (dataclasses.replace(_BASE, name="two cores", group=4, **_LONG),
     dataclasses.replace(_AHEAD, block_pages=2, cores=2)),
    (dataclasses.replace(_BASE, name="tree over blocks", group=16, mask="tree", max_q_len=8, max_nodes=70, **_LONG),
     dataclasses.replace(_AHEAD, block_pages=2)),
)  # fmt: skip


@functools.cache
def attend(setup: Setup, config):
    """The kernel behind a plan made in jit."""

    @jax.jit
    def run(q, seq_lens, q_lens, page_table, tree, pages):
        sizes = dict(page_size=setup.page_size, num_tokens=setup.num_tokens, max_q_len=setup.max_q_len)
        tree = None if tree is None else jattn.Tree(**tree)
        plan = jattn.make_plan(setup.mode, seq_lens, q_lens, page_table, tree=tree, **sizes)
        out, lse = tpu.attend_latent(
            q,
            pages,
            latent_dim=setup.v_head_dim,
            page_table=plan.page_table,
            page_offset=drawn.LAYER * setup.num_pages,
            seq_lens=plan.seq_lens,
            cu_q_lens=plan.cu_q_lens,
            max_q_len=plan.max_q_len,
            sm_scale=setup.spec.sm_scale,
            mask=plan.mask,
            num_splits=setup.num_splits,
            config=config,
            interpret=CHECKED,
            **_tree_args(plan),
        )
        if setup.num_splits > 1:
            out, lse = jattn.merge_states(out, lse)
        return out.astype(setup.dtype), lse

    return run


def check(setup, config, data):
    ins = drawn.build(setup, data.draw(drawn.batches(setup)))
    ins.values = [keys[..., : setup.v_head_dim] for keys in ins.keys]  # the front of the row
    ins.v_scales = ins.k_scales
    rows = drawn.cache(setup, ins).k[:, :, 0]
    lanes = -setup.head_dim % 128
    spare = jnp.where(jnp.isnan(rows[..., :1]), rows[..., :1], 0)  # rows that were never written are NaN all over
    pages = jnp.concatenate([rows, jnp.repeat(spare, lanes, axis=-1)], axis=-1)
    tree = None if ins.tree is None else {name: jnp.asarray(x) for name, x in ins.tree.items()}
    given = tuple(jnp.asarray(x) for x in (ins.q, ins.seq_lens, ins.q_lens, ins.page_table))
    out, lse = attend(setup, config)(*given, tree, pages)
    earned.compare(setup, ins, out, lse)


@pytest.mark.parametrize(("setup", "config"), SETUPS, ids=lambda x: getattr(x, "name", ""))
@hypothesis.settings(max_examples=1, phases=[hypothesis.Phase.generate])
@hypothesis.given(data=st.data())
def test_latent_attention_is_as_right_as_plain_jax(setup, config, data):
    check(setup, config, data)


@pytest.mark.long
@pytest.mark.parametrize(("setup", "config"), SETUPS + WIDE, ids=lambda x: getattr(x, "name", ""))
@hypothesis.settings(max_examples=6, phases=[hypothesis.Phase.generate])
@hypothesis.given(data=st.data())
def test_latent_attention_is_as_right_as_plain_jax_widely(setup, config, data):
    check(setup, config, data)


@pytest.mark.parametrize("page_size", [2, 16])
def test_rows_are_written_and_gathered_as_plain_jax_does(page_size):
    rng = np.random.default_rng(0)
    latent, key = (jnp.asarray(rng.normal(size=(5, n)), jnp.bfloat16) for n in (16, 4))
    slots, where = jnp.array([3, -1, 0, 7, 40]), dict(page_offset=8, num_pages=8)
    plain = jnp.full((24, page_size, 20), jnp.nan, jnp.bfloat16)
    padded = jnp.pad(plain, ((0, 0), (0, 0), (0, 108)))
    want = xla.write_latent(plain, latent, key, slots, **where)
    got = tpu.write_latent(padded, latent, key, slots, **where)
    np.testing.assert_array_equal(*(np.asarray(x[..., :20], np.float32) for x in (got, want)))
    assert (got[..., 20:] == 0).all()
    read = dict(latent_dim=16, page_offset=8, dtype=jnp.float32)
    for mine, theirs in zip(
        tpu.gather_latent(got, slots, rope_dim=4, **read), xla.gather_latent(want, slots, **read), strict=True
    ):
        np.testing.assert_array_equal(mine[:4], theirs[:4])


def test_rows_of_other_widths_are_refused():
    with pytest.raises(ValueError, match="want 128"):
        tpu.write_latent(jnp.zeros((2, 4, 256)), jnp.zeros((1, 16)), jnp.zeros((1, 4)), jnp.zeros(1, jnp.int32))
