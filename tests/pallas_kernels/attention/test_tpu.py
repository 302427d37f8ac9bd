"""The TPU attention kernel, interpreted with race detection and NaN in all memory that was not written."""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalSubscript=false

import hypothesis
import hypothesis.strategies as st
import pytest
from drawn import Setup
from tpu_pages import check, check_written

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


WRITTEN = (
    (Setup(name="decode", head_dim=64, dtype="bfloat16", page_size=16, **_DECODE), Config(block_pages=2, heads=2)),
)
WRITTEN_WIDE = (
    (Setup(name="verify, page 8, two classes", group=3, head_dim=20, dtype="bfloat16", page_size=8, max_q_len=6,
           num_tokens=20), (_SHORT, _LONG)),
    (Setup(name="verify, blocks of 8 keys", head_dim=64, page_size=8, max_q_len=30),
     Config(block_q=32, block_pages=1, heads=2)),
    (Setup(name="tree, page 3", group=3, head_dim=64, dtype="bfloat16", page_size=3, **_EVERYTHING, **_VERIFY),
     _STACKED),
    (Setup(name="decode, window of 3, page 24", head_dim=80, dtype="bfloat16", page_size=24, sliding_window=3,
           **_DECODE), Config(block_pages=1, heads=2)),
    (Setup(name="verify, fp8, one scale", head_dim=64, kv_dtype="fp8_e4m3", dtype="bfloat16", page_size=16,
           layout="token_major", max_q_len=6, num_tokens=20), _STACKED),
    (Setup(name="verify, int8, token scales", head_dim=64, kv_dtype="int8", kv_scales="token", dtype="bfloat16",
           page_size=8, max_q_len=6, num_tokens=20), _STACKED),
    (Setup(name="verify, e5m2, token scales, page 5", head_dim=64, kv_dtype="fp8_e5m2", kv_scales="token",
           layout="token_major", dtype="bfloat16", page_size=5, max_q_len=6, num_tokens=20), _STACKED),
    (Setup(name="verify, scores ahead", group=3, head_dim=20, dtype="bfloat16", page_size=16, max_q_len=8,
           num_tokens=20), _AHEAD),
    (Setup(name="verify, two cores", head_dim=64, dtype="bfloat16", page_size=16, max_q_len=6, num_tokens=20),
     Config(block_q=8, block_pages=2, heads=2, cores=2)),
    (Setup(name="mixed, written first", head_dim=64, dtype="bfloat16", page_size=16), (_SHORT, _LONG)),
)  # fmt: skip


@pytest.mark.parametrize(("setup", "config"), WRITTEN, ids=str)
@hypothesis.settings(max_examples=2, phases=[hypothesis.Phase.generate])
@hypothesis.given(data=st.data())
def test_the_kernel_writes_the_keys_of_its_step(setup, config, data):
    check_written(setup, config, data)


@pytest.mark.long
@pytest.mark.parametrize(("setup", "config"), WRITTEN_WIDE, ids=str)
@hypothesis.settings(max_examples=4, phases=[hypothesis.Phase.generate])
@hypothesis.given(data=st.data())
def test_the_kernel_writes_the_keys_of_its_step_widely(setup, config, data):
    check_written(setup, config, data)
