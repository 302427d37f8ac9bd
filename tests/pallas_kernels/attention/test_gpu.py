"""The portable GPU attention, interpreted step by step, against float64 over drawn batches full of poison."""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalSubscript=false

import functools

import drawn
import earned
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from drawn import Setup

from pallas_kernels.attention import gpu
from pallas_kernels.attention.gpu import Config
from pallas_kernels.attention.gpu_config import heuristic, shared_bytes
from pallas_kernels.attention.gpu_kernel import widened

_SMALL = Config(block_rows=16, block_kv=16)
_SPLIT = Config(block_rows=16, block_kv=16, splits=3)
_VERIFY = dict(mask="tree", max_q_len=6, num_tokens=26)
_DECODE = dict(max_q_len=1, num_tokens=6)
_EVERYTHING = dict(sliding_window=5, logit_soft_cap=2.0, sinks=True)
SETUPS = (
    (Setup(name="mixed, group 3, 20 wide, all", group=3, head_dim=20, dtype="bfloat16", **_EVERYTHING), _SMALL),
    (Setup(name="tree, splits, sinks", group=3, head_dim=64, v_head_dim=80, sinks=True, **_VERIFY), _SPLIT),
)
MORE = (
    (Setup(name="mixed, f32, page 1", head_dim=64, page_size=1, group=2), _SMALL),
    (Setup(name="mixed, f16, sizes chosen", group=2, head_dim=96, dtype="float16", page_size=16), None),
    (Setup(name="decode, sizes chosen", group=4, head_dim=128, dtype="bfloat16", page_size=16, **_DECODE), None),
    (Setup(name="decode, splits, all", group=7, head_dim=64, dtype="bfloat16", **_EVERYTHING, **_DECODE), _SPLIT),
    (Setup(name="a group wider than a tile", group=40, num_kv_heads=1, head_dim=16, max_q_len=5, num_tokens=18),
     _SMALL),
    (Setup(name="full", mask="full", group=2, head_dim=80, dtype="bfloat16", page_size=3), _SMALL),
    (Setup(name="parts for the caller", group=2, head_dim=16, num_splits=3), _SMALL),
    (Setup(name="fp8, token scales", head_dim=64, kv_dtype="fp8_e4m3", dtype="bfloat16", kv_scales="token",
           layout="token_major"), _SMALL),
    (Setup(name="fp8 e5m2, one scale", head_dim=64, kv_dtype="fp8_e5m2", dtype="float16", page_size=16,
           layout="token_major", sliding_window=7), _SMALL),
    (Setup(name="int8, token scales, cap", head_dim=96, kv_dtype="int8", dtype="bfloat16", kv_scales="token",
           logit_soft_cap=3.0), _SMALL),
    (Setup(name="int8, one scale, tree", head_dim=64, kv_dtype="int8", kv_scales="tensor", **_VERIFY), _SMALL),
    (Setup(name="tree, window", group=3, head_dim=16, dtype="bfloat16", **_EVERYTHING, **_VERIFY), _SMALL),
    (Setup(name="tree of two words", mask="tree", head_dim=16, page_size=16, max_nodes=40, max_q_len=24,
           num_tokens=50), _SMALL),
)  # fmt: skip


@functools.cache
def attend(setup: Setup, config):
    """The kernel behind a plan made in jit."""
    spec = setup.spec

    @jax.jit
    def run(q, seq_lens, q_lens, page_table, tree, sinks, cache):
        plan = drawn.plan_of(setup, seq_lens, q_lens, page_table, tree)
        one_scale = cache.k_scale is not None and not cache.token_scales
        out, lse = gpu.paged_attention(
            q,
            cache.k,
            cache.v,
            k_scale=cache.k_scale[drawn.LAYER] if one_scale else cache.k_scale,
            v_scale=cache.v_scale[drawn.LAYER] if one_scale else cache.v_scale,
            kv_dtype=cache.dtype,
            logit_soft_cap=spec.logit_soft_cap,
            sliding_window=spec.sliding_window,
            sinks=sinks,
            config=config,
            interpret=True,
            **drawn.asked_of(setup, plan),
        )
        return drawn.merged(setup, out, lse)

    return run


def check(setup, config, data):
    ins = drawn.build(setup, data.draw(drawn.batches(setup)))
    sinks = None if ins.sinks is None else jnp.asarray(ins.sinks)
    out, lse = attend(setup, config)(*drawn.given(ins), sinks, drawn.cache(setup, ins))
    earned.compare(setup, ins, out, lse)


@pytest.mark.parametrize(("setup", "config"), SETUPS, ids=lambda x: getattr(x, "name", ""))
@hypothesis.settings(max_examples=3, phases=[hypothesis.Phase.generate])
@hypothesis.given(data=st.data())
def test_the_kernel_is_as_right_as_plain_jax(setup, config, data):
    check(setup, config, data)


@pytest.mark.long
@pytest.mark.parametrize(("setup", "config"), SETUPS + MORE, ids=lambda x: getattr(x, "name", ""))
@hypothesis.settings(max_examples=12, phases=[hypothesis.Phase.generate])
@hypothesis.given(data=st.data())
def test_the_kernel_is_as_right_as_plain_jax_widely(setup, config, data):
    check(setup, config, data)


@pytest.mark.long
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_packed_keys_give_what_plain_jax_gives(mask):
    from pallas_kernels.attention import xla

    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.normal(size=(n, h, d)), jnp.float32) for n, h, d in ((9, 6, 24), (70, 2, 24), (70, 2, 16))
    )
    lens = dict(cu_q_lens=jnp.asarray([0, 1, 6, 6, 8]), cu_kv_lens=jnp.asarray([0, 33, 38, 38, 69]))
    args = dict(**lens, max_q_len=5, sm_scale=0.2, mask=mask)
    got = gpu.ragged_attention(q, k, v, **args, config=_SMALL, interpret=True)
    want = xla.ragged_attention(q, k, v, **args)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kind", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_every_8_bit_float_is_widened_exactly(kind):
    bits = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(np.asarray(widened(jnp.asarray(bits), kind)), bits.view(kind).astype(np.float32))


@pytest.mark.parametrize(("max_q_len", "group", "dims"), [(1, 1, 64), (1, 128, 512), (512, 4, 128), (64, 4, 256)])
def test_sizes_follow_the_work(max_q_len, group, dims):
    sizes = dict(max_q_len=max_q_len, group=group, k_dim=dims, v_dim=dims, kv_heads=8, kv_room=4096)
    for itemsize in (2, 4):
        small, large = (
            heuristic(num_seqs=seqs, num_tokens=seqs * max_q_len, itemsize=itemsize, **sizes) for seqs in (1, 256)
        )
        assert large.splits == 1 and small.splits >= large.splits
        assert 16 <= small.block_rows <= 128 and small.block_rows * dims // (32 * small.num_warps) <= 128
        assert shared_bytes(small.block_rows, small.block_kv, dims, dims, itemsize) <= 98 << 10


def test_what_the_kernel_does_not_multiply_is_refused():
    q, pages = jnp.zeros((1, 2, 16), jnp.bfloat16), jnp.zeros((2, 4, 1, 16), jnp.float32)
    ints = dict(page_table=jnp.zeros((1, 2), jnp.int32), seq_lens=jnp.ones(1, jnp.int32))
    with pytest.raises(ValueError, match="q is bfloat16, the keys are float32"):
        gpu.paged_attention(q, pages, pages, **ints, cu_q_lens=jnp.arange(2), max_q_len=1, sm_scale=1.0)
    with pytest.raises(ValueError, match="block_kv=24"):
        Config(block_kv=24)
