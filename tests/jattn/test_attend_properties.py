"""The door against a float64 oracle, over drawn ragged batches in caches full of poison."""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false, reportOptionalSubscript=false, reportCallIssue=false

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

import jattn
from jattn import Tree, make_plan

_DECODE = dict(max_q_len=1, num_tokens=6)
_VERIFY = dict(max_q_len=6, num_tokens=26)
_LONG = dict(page_size=64, max_q_len=193, num_tokens=230)
SETUPS = (
    Setup(name="decode, page 1, sinks", page_size=1, sinks=True, **_DECODE),
    Setup(name="decode, bf16, group 7, long pages, window", group=7, dtype="bfloat16", sliding_window=70,
          page_size=64, **_DECODE),
    Setup(name="decode, splits, cap and sinks", group=3, head_dim=20, num_splits=3, page_size=16, logit_soft_cap=2.0,
          sinks=True, **_DECODE),
    Setup(name="mixed, group 3, narrow values, cap", group=3, head_dim=20, v_head_dim=8, logit_soft_cap=1.5),
    Setup(name="mixed, bf16, group 7, window", group=7, head_dim=24, dtype="bfloat16", sliding_window=5, page_size=16),
    Setup(name="mixed, f16, page 1", group=5, dtype="float16", page_size=1, max_q_len=13, num_tokens=40),
    Setup(name="mixed, long pages", group=3, head_dim=20, **_LONG),
    Setup(name="mixed, bf16, long pages, splits, window", head_dim=24, v_head_dim=20, dtype="bfloat16", num_splits=3,
          sliding_window=64, **_LONG),
    Setup(name="verify, f16, page 3, everything", group=5, dtype="float16", page_size=3, sliding_window=3, sinks=True,
          logit_soft_cap=3.0, **_VERIFY),
    Setup(name="full", group=3, mask="full"),
    Setup(name="full, bf16, splits, sinks", mask="full", dtype="bfloat16", num_splits=3, sinks=True, page_size=16),
    Setup(name="tree", group=3, mask="tree", **_VERIFY),
    Setup(name="tree, splits, window, sinks", mask="tree", page_size=3, num_splits=3, sliding_window=2, sinks=True,
          **_VERIFY),
    Setup(name="wide tree, bf16, window", mask="tree", dtype="bfloat16", page_size=16, sliding_window=4, max_nodes=40,
          max_q_len=24, num_tokens=50),
    Setup(name="tree of two words, cap", group=5, mask="tree", page_size=16, max_q_len=40, logit_soft_cap=2.0),
    Setup(name="fp8, bf16 queries", group=3, dtype="bfloat16", kv_dtype="fp8_e4m3", page_size=16),
    Setup(name="fp8, token scales, splits", kv_dtype="fp8_e4m3", kv_scales="token", num_splits=3, v_head_dim=20),
    Setup(name="fp8 e5m2, f16 queries, decode", dtype="float16", kv_dtype="fp8_e5m2", page_size=3, **_DECODE),
    Setup(name="fp8 not as bits", group=3, kv_dtype="fp8_e4m3", layout="token_major", page_size=3, **_VERIFY),
    Setup(name="int8, token scales, tree", group=3, dtype="bfloat16", kv_dtype="int8", page_size=3, mask="tree",
          **_VERIFY),
    Setup(name="int8, token scales, decode", group=3, kv_dtype="int8", page_size=64, **_DECODE),
    Setup(name="int8, one scale, f16 queries", dtype="float16", kv_dtype="int8", kv_scales="tensor"),
    Setup(name="bf16 cache, f32 queries", group=3, kv_dtype="bfloat16", sinks=True),
    Setup(name="f32 cache, bf16 queries, window", dtype="bfloat16", kv_dtype="float32", sliding_window=7),
)  # fmt: skip
EVERY = pytest.mark.parametrize("setup", SETUPS, ids=str)
FEW = hypothesis.settings(max_examples=6, phases=[hypothesis.Phase.generate])  # shrinking takes minutes: run `long`
MANY = hypothesis.settings(max_examples=250)


def check_attend(setup, data):
    batch = data.draw(drawn.batches(setup))
    ins = drawn.build(setup, batch)
    out, lse = attend(setup)(*arrays(ins), drawn.cache(setup, ins))
    earned.compare(setup, ins, out, lse)


def check_write_attend(setup, data):
    batch = data.draw(drawn.batches(setup))
    ins = drawn.build(setup, batch)
    before = drawn.cache(setup, ins, held=ins.seq_lens - ins.q_lens)
    out, lse, cache = write_attend(setup)(*arrays(ins), jnp.asarray(ins.k), jnp.asarray(ins.v), before)
    if setup.token_scales:
        drawn.take_scales(setup, ins, cache)
    compare_cache(drawn.cache(setup, ins), cache)
    earned.compare(setup, ins, out, lse)


@EVERY
@FEW
@hypothesis.given(data=st.data())
def test_attending_reads_what_is_cached(setup, data):
    check_attend(setup, data)


@EVERY
@FEW
@hypothesis.given(data=st.data())
def test_writing_and_attending_stores_exactly_the_new_rows(setup, data):
    check_write_attend(setup, data)


@pytest.mark.long
@EVERY
@MANY
@hypothesis.given(data=st.data())
def test_attending_reads_what_is_cached_over_many_batches(setup, data):
    check_attend(setup, data)


@pytest.mark.long
@EVERY
@MANY
@hypothesis.given(data=st.data())
def test_writing_and_attending_over_many_batches(setup, data):
    check_write_attend(setup, data)


def arrays(ins):
    """The arrays that `attend(setup)` takes before the cache."""
    tree = None if ins.tree is None else {name: jnp.asarray(x) for name, x in ins.tree.items()}
    sinks = None if ins.sinks is None else jnp.asarray(ins.sinks)
    return tuple(jnp.asarray(x) for x in (ins.q, ins.seq_lens, ins.q_lens, ins.page_table)) + (tree, sinks)


def plan_of(setup, seq_lens, q_lens, page_table, tree):
    """A plan inside jit, with the square tree as bare bits."""
    if tree is not None:
        tree = Tree(**tree) if setup.max_nodes is not None else tree["bits"]
    sizes = dict(page_size=setup.page_size, num_tokens=setup.num_tokens, max_q_len=setup.max_q_len)
    return make_plan(setup.mode, seq_lens, q_lens, page_table, tree=tree, **sizes)


@functools.cache
def attend(setup):
    """The jitted door of a setup."""

    @jax.jit
    def run(q, seq_lens, q_lens, page_table, tree, sinks, cache):
        plan = plan_of(setup, seq_lens, q_lens, page_table, tree)
        static = dict(spec=setup.spec, choice=setup.choice, mask=setup.mask, sinks=sinks)
        return jattn.attend(q, cache, plan, layer=drawn.LAYER, **static)

    return run


@functools.cache
def write_attend(setup):
    """The same with the newest keys still to be written; the layer is traced."""

    @jax.jit
    def run(layer, q, seq_lens, q_lens, page_table, tree, sinks, k, v, cache):
        plan = plan_of(setup, seq_lens, q_lens, page_table, tree)
        static = dict(spec=setup.spec, choice=setup.choice, mask=setup.mask, sinks=sinks)
        return jattn.write_attend(q, k, v, cache, plan, layer=layer, **static)

    return functools.partial(run, drawn.LAYER)


def compare_cache(want, got):
    """Every byte, poison included."""
    for field in dataclasses.fields(want):
        a, b = getattr(want, field.name), getattr(got, field.name)
        if not isinstance(a, jax.Array):
            assert a == b
        else:
            a, b = np.asarray(a), np.asarray(b)
            assert a.dtype == b.dtype
            differs = (a.view(np.uint8) != b.view(np.uint8)).reshape(*a.shape, -1).any(-1)
            assert not differs.any(), (field.name, np.argwhere(differs)[:5], a[differs][:5], b[differs][:5])
