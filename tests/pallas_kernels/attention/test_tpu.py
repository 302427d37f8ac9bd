"""The TPU attention kernel, interpreted with race detection and NaN in all memory that was not written."""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false, reportCallIssue=false

import functools

import drawn
import earned
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from drawn import Setup
from jax.experimental.pallas import tpu as pltpu

import jattn
from jattn.attend import _tree_args
from pallas_kernels._common import tpu_rows
from pallas_kernels.attention import tpu
from pallas_kernels.attention.tpu_config import Config

CHECKED = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
_SHORT, _LONG = Config(block_q=1, block_pages=2, heads=2), Config(block_q=8, block_pages=2, unroll_heads=False)
_AHEAD = Config(block_q=8, block_pages=16, heads=1, unroll_heads=False, parts=2)
SETUPS = ((Setup(name="mixed, two classes", group=3, head_dim=20, dtype="bfloat16", page_size=16), (_SHORT, _LONG)),)
WIDE = ((Setup(name="scores ahead", group=3, head_dim=20, dtype="bfloat16", page_size=16), (_AHEAD,)),)


@functools.cache
def attend(setup: Setup, config):
    """The kernel behind a plan made in jit."""
    spec = setup.spec

    @jax.jit
    def run(q, seq_lens, q_lens, page_table, tree, sinks, cache):
        sizes = dict(page_size=setup.page_size, num_tokens=setup.num_tokens, max_q_len=setup.max_q_len)
        tree = None if tree is None else jattn.Tree(**tree)
        plan = jattn.make_plan(setup.mode, seq_lens, q_lens, page_table, tree=tree, **sizes)
        return tpu.paged_attention(
            q,
            tpu_rows.pack(cache.k, cache.v),
            page_table=plan.page_table,
            page_offset=drawn.LAYER * cache.num_pages,
            seq_lens=plan.seq_lens,
            cu_q_lens=plan.cu_q_lens,
            max_q_len=plan.max_q_len,
            sm_scale=spec.sm_scale,
            mask=plan.mask,
            logit_soft_cap=spec.logit_soft_cap,
            sliding_window=spec.sliding_window,
            sinks=sinks,
            kv_heads=spec.num_kv_heads,
            v_dim=spec.v_head_dim,
            config=config,
            interpret=CHECKED,
            **_tree_args(plan),
        )

    return run


def check(setup, config, data):
    ins = drawn.build(setup, data.draw(drawn.batches(setup)))
    tree = None if ins.tree is None else {name: jnp.asarray(x) for name, x in ins.tree.items()}
    sinks = None if ins.sinks is None else jnp.asarray(ins.sinks)
    given = tuple(jnp.asarray(x) for x in (ins.q, ins.seq_lens, ins.q_lens, ins.page_table))
    out, lse = attend(setup, config)(*given, tree, sinks, drawn.cache(setup, ins))
    earned.compare(setup, ins, out, lse)


@pytest.mark.parametrize(("setup", "config"), SETUPS, ids=str)
@hypothesis.settings(max_examples=2, phases=[hypothesis.Phase.generate])
@hypothesis.given(data=st.data())
def test_the_kernel_is_as_right_as_plain_jax(setup, config, data):
    check(setup, config, data)


@pytest.mark.long
@pytest.mark.parametrize(("setup", "config"), WIDE, ids=str)
@hypothesis.settings(max_examples=8, phases=[hypothesis.Phase.generate])
@hypothesis.given(data=st.data())
def test_the_kernel_is_as_right_as_plain_jax_widely(setup, config, data):
    check(setup, config, data)
