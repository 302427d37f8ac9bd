"""The TPU attention kernel, interpreted with race detection and NaN in all memory that was not written."""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalSubscript=false

import functools

import drawn
import earned
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from drawn import Setup
from watched import CHECKED, assert_no_race

import jattn
from jattn.attend import _tree_args
from pallas_kernels._common import tpu_rows
from pallas_kernels.attention import tpu
from pallas_kernels.attention.tpu_config import Config

_SHORT, _LONG = Config(block_q=1, block_pages=2, heads=2), Config(block_q=8, block_pages=2, unroll_heads=False)
_AHEAD = Config(block_q=8, block_pages=16, heads=1, unroll_heads=False, parts=2)
SETUPS = ((Setup(name="mixed, two classes", group=3, head_dim=20, dtype="bfloat16", page_size=16), (_SHORT, _LONG)),)
WIDE = ((Setup(name="scores ahead", group=3, head_dim=20, dtype="bfloat16", page_size=16), (_AHEAD,)),)
_VERIFY = dict(mask="tree", max_q_len=6, num_tokens=26)
_DECODE = dict(max_q_len=1, num_tokens=6)
_EVERYTHING = dict(sliding_window=5, logit_soft_cap=2.0, sinks=True)
_STACKED = Config(block_q=8, block_pages=4, heads=2)
MORE = (
    (Setup(name="decode, 3 heads of 80, page 3, all", num_kv_heads=3, head_dim=80, page_size=3, dtype="bfloat16",
           **_EVERYTHING, **_DECODE), Config(block_pages=8, heads=3)),
    (Setup(name="decode, f32, page 1, narrow values", num_kv_heads=1, head_dim=64, v_head_dim=32, page_size=1,
           **_DECODE), Config(block_pages=16)),
    (Setup(name="decode, fp8, token scales, page 16", head_dim=64, kv_dtype="fp8_e4m3", dtype="bfloat16",
           page_size=16, layout="token_major", kv_scales="token", **_DECODE), Config(block_pages=2, heads=2)),
    (Setup(name="mixed, int8, token scales, window and cap", head_dim=96, kv_dtype="int8", dtype="bfloat16",
           page_size=8, kv_scales="token", sliding_window=7, logit_soft_cap=3.0), (_SHORT, _LONG)),
    (Setup(name="mixed, int8, one scale, page 5, sinks", head_dim=64, kv_dtype="int8", dtype="bfloat16",
           page_size=5, kv_scales="tensor", sinks=True), (_SHORT, _LONG)),
    (Setup(name="mixed, f32, group 7, window, sinks", group=7, head_dim=64, page_size=16, sliding_window=9, sinks=True),
     _STACKED),
    (Setup(name="tree, all", group=3, head_dim=128, dtype="bfloat16", page_size=8, **_EVERYTHING, **_VERIFY), _STACKED),
    (Setup(name="tree, fp8 e5m2, page 3, window", head_dim=64, kv_dtype="fp8_e5m2", dtype="bfloat16", page_size=3,
           layout="token_major", sliding_window=3, **_VERIFY), _STACKED),
    (Setup(name="tree, int8, token scales", head_dim=64, kv_dtype="int8", kv_scales="token", page_size=16, sinks=True,
           **_VERIFY), _STACKED),
    (Setup(name="wide tree, window", mask="tree", dtype="bfloat16", head_dim=64, page_size=16, sliding_window=4,
           max_nodes=40, max_q_len=24, num_tokens=50), (_SHORT, _LONG)),
    (Setup(name="full, head dim 256", mask="full", head_dim=256, num_kv_heads=1, group=2, dtype="bfloat16",
           page_size=16), Config(block_q=8, block_pages=4)),
    (Setup(name="two cores", head_dim=64, dtype="bfloat16", page_size=16),
     Config(block_q=8, block_pages=2, heads=2, cores=2)),
)  # fmt: skip


@functools.cache
def attend(setup: Setup, config):
    """The kernel behind a plan made in jit."""
    spec = setup.spec

    @jax.jit
    def run(q, seq_lens, q_lens, page_table, tree, sinks, cache):
        sizes = dict(page_size=setup.page_size, num_tokens=setup.num_tokens, max_q_len=setup.max_q_len)
        if tree is not None:
            tree = jattn.Tree(**tree) if setup.max_nodes is not None else tree["bits"]
        plan = jattn.make_plan(setup.mode, seq_lens, q_lens, page_table, tree=tree, **sizes)
        pool = tpu_rows.pack(cache.k, cache.v)
        one_scale = cache.k_scale is not None and not cache.token_scales
        return tpu.paged_attention(
            q,
            tpu_rows.to_words(pool) if tpu_rows.held_as_words(setup.page_size) else pool,
            k_scale=cache.k_scale[drawn.LAYER] if one_scale else cache.k_scale,
            v_scale=cache.v_scale[drawn.LAYER] if one_scale else cache.v_scale,
            kv_dtype=cache.dtype,
            mask=setup.mask,
            page_table=plan.page_table,
            page_offset=drawn.LAYER * cache.num_pages,
            seq_lens=plan.seq_lens,
            cu_q_lens=plan.cu_q_lens,
            max_q_len=plan.max_q_len,
            sm_scale=spec.sm_scale,
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
    assert_no_race()


@pytest.mark.parametrize(("setup", "config"), SETUPS, ids=str)
@hypothesis.settings(max_examples=2, phases=[hypothesis.Phase.generate])
@hypothesis.given(data=st.data())
def test_the_kernel_is_as_right_as_plain_jax(setup, config, data):
    check(setup, config, data)


@pytest.mark.long
@pytest.mark.parametrize(("setup", "config"), (*MORE, *WIDE), ids=str)
@hypothesis.settings(max_examples=6, phases=[hypothesis.Phase.generate])
@hypothesis.given(data=st.data())
def test_every_feature_beside_others(setup, config, data):
    check(setup, config, data)
