"""Attention over packed keys on TPU, interpreted with race detection and NaN in all memory that was not written."""
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
from watched import CHECKED, assert_no_race

import jattn
from jattn.attend import _tree_args
from pallas_kernels.attention import tpu_ragged
from pallas_kernels.attention.tpu_config import Config

_BASE = Setup(name="causal, 24/16", num_kv_heads=2, head_dim=24, v_head_dim=16, dtype="bfloat16", page_size=64)
_CONFIG = Config(block_q=8, block_pages=1, heads=1, unroll_heads=False)
SETUPS = ((_BASE, _CONFIG, 2560),)
WIDE = (
    (dataclasses.replace(_BASE, name="groups of heads", num_kv_heads=4, group=2, sinks=True), _CONFIG, 80),
    (dataclasses.replace(_BASE, name="full", mask="full", dtype="float32"), _CONFIG, 40),
    (dataclasses.replace(_BASE, name="tree", mask="tree", max_q_len=8, max_nodes=11), _CONFIG, 40),
    (dataclasses.replace(_BASE, name="192/128, sizes chosen", head_dim=192, v_head_dim=128), None, 2560),
    (dataclasses.replace(_BASE, name="window and cap", sliding_window=40, logit_soft_cap=3.0), _CONFIG, 2560),
    (dataclasses.replace(_BASE, name="ahead"), dataclasses.replace(_CONFIG, block_pages=2, parts=2), 2560),
)


@functools.cache
def attend(setup: Setup, config, lanes):
    """The kernel behind a plan made in jit."""
    spec = setup.spec

    @jax.jit
    def run(q, k, v, seq_lens, q_lens, page_table, tree, sinks):
        sizes = dict(page_size=setup.page_size, num_tokens=setup.num_tokens, max_q_len=setup.max_q_len)
        tree = None if tree is None else jattn.Tree(**tree)
        plan = jattn.make_plan(setup.mode, seq_lens, q_lens, page_table, tree=tree, **sizes)
        return tpu_ragged.ragged_attention(
            q,
            k,
            v,
            cu_kv_lens=jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(seq_lens, dtype=jnp.int32)]),
            cu_q_lens=plan.cu_q_lens,
            max_q_len=plan.max_q_len,
            sm_scale=spec.sm_scale,
            mask="full" if setup.mask == "full" else plan.mask,
            logit_soft_cap=spec.logit_soft_cap,
            sliding_window=spec.sliding_window,
            sinks=sinks,
            config=config,
            interpret=CHECKED,
            **_tree_args(plan),
        )

    return run


def check(setup, config, lanes, data, monkeypatch):
    monkeypatch.setattr(tpu_ragged, "_LANES", lanes)
    ins = drawn.build(setup, data.draw(drawn.batches(setup)))
    room = setup.num_seqs * setup.max_len
    packed = []
    for parts in (ins.keys, ins.values):
        x = np.concatenate(parts)
        spare = np.full((room - len(x), *x.shape[1:]), np.nan).astype(x.dtype)
        packed.append(jnp.asarray(np.concatenate([x, spare])))
    tree = None if ins.tree is None else {name: jnp.asarray(x) for name, x in ins.tree.items()}
    given = (jnp.asarray(x) for x in (ins.seq_lens, ins.q_lens, ins.page_table))
    sinks = None if ins.sinks is None else jnp.asarray(ins.sinks)
    out, lse = attend(setup, config, lanes)(jnp.asarray(ins.q), *packed, *given, tree, sinks)
    earned.compare(setup, ins, out, lse)
    assert_no_race()


NAMES = dict(ids=lambda x: getattr(x, "name", ""))
ANY = dict(phases=[hypothesis.Phase.generate], suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize(("setup", "config", "lanes"), SETUPS, **NAMES)
@hypothesis.settings(max_examples=2, **ANY)
@hypothesis.given(data=st.data())
def test_packed_keys_are_attended_as_right_as_plain_jax(setup, config, lanes, data, monkeypatch):
    check(setup, config, lanes, data, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize(("setup", "config", "lanes"), SETUPS + WIDE, **NAMES)
@hypothesis.settings(max_examples=6, **ANY)
@hypothesis.given(data=st.data())
def test_packed_keys_are_attended_as_right_as_plain_jax_widely(setup, config, lanes, data, monkeypatch):
    check(setup, config, lanes, data, monkeypatch)


def test_scales_a_token_are_refused():
    x, at = jnp.zeros((4, 2, 8)), jnp.array([0, 4])
    with pytest.raises(ValueError, match="takes a scalar"):
        tpu_ragged.ragged_attention(x, x, x, cu_kv_lens=at, cu_q_lens=at, k_scale=jnp.ones((4, 2)))
