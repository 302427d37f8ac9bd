"""Specs fill in their defaults, refuse what makes no sense with the value and the rule, and pick programs by hash."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jattn import AttnSpec, MLASpec
from jattn.spec import KV_DTYPES

HEADS: dict[str, Any] = dict(num_q_heads=6, num_kv_heads=2, head_dim=16)
LATENT: dict[str, Any] = dict(num_q_heads=4, kv_lora_rank=32, qk_nope_head_dim=12, qk_rope_head_dim=4, v_head_dim=8)


def test_defaults_are_filled_in():
    spec = AttnSpec(**HEADS)
    assert (spec.v_head_dim, spec.sm_scale, spec.group_size, spec.kv_scales) == (16, 0.25, 3, "tensor")
    assert (spec.logit_soft_cap, spec.sliding_window, spec.sinks, spec.kv_dtype) == (None, None, False, None)
    assert not spec.quantised


def test_what_is_given_is_kept():
    spec = AttnSpec(**HEADS, v_head_dim=5, sm_scale=0.3, kv_dtype="int8", kv_scales="tensor")
    assert (spec.v_head_dim, spec.sm_scale, spec.kv_scales, spec.quantised) == (5, 0.3, "tensor", True)
    assert AttnSpec(**HEADS, sm_scale=0.0).sm_scale == 0  # zero is a scale, not a missing one


@pytest.mark.parametrize(
    ("kv_dtype", "scales"), [("int8", "token"), ("fp8_e4m3", "tensor"), ("fp8_e5m2", "tensor"), ("float16", "tensor")]
)
def test_int8_is_scaled_by_token_and_the_rest_by_tensor(kv_dtype, scales):
    assert AttnSpec(**HEADS, kv_dtype=kv_dtype).kv_scales == scales


def test_exactly_the_narrow_dtypes_are_quantised():
    quantised = {name for name in KV_DTYPES if AttnSpec(**HEADS, kv_dtype=name).quantised}
    assert quantised == {name for name, dtype in KV_DTYPES.items() if jnp.dtype(dtype).itemsize == 1}
    assert len(quantised) == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(num_q_heads=0), r"AttnSpec.num_q_heads=0: want at least 1"),
        (dict(num_kv_heads=-1), r"AttnSpec.num_kv_heads=-1: want at least 1"),
        (dict(head_dim=0), r"AttnSpec.head_dim=0: want at least 1"),
        (dict(v_head_dim=0), r"AttnSpec.v_head_dim=0: want at least 1"),
        (dict(num_kv_heads=4), r"num_q_heads=6 is not a multiple of num_kv_heads=4: each KV head serves the same"),
        (dict(sm_scale=float("nan")), r"sm_scale=nan: want a finite number"),
        (dict(sm_scale=float("inf")), r"sm_scale=inf: want a finite number"),
        (dict(logit_soft_cap=0.0), r"logit_soft_cap=0.0: want a positive cap, or None"),
        (dict(logit_soft_cap=-3), r"logit_soft_cap=-3: want a positive cap"),
        (dict(logit_soft_cap=float("nan")), r"logit_soft_cap=nan: want a positive cap"),
        (dict(logit_soft_cap=float("inf")), r"logit_soft_cap=inf: want a positive cap"),
        (dict(sliding_window=0), r"sliding_window=0: want at least 1 \(the query's own key\), or None"),
        (dict(sliding_window=-1), r"sliding_window=-1: want at least 1"),
        (dict(kv_dtype="fp4"), r"kv_dtype='fp4': want one of float32, bfloat16, .*int8, or None"),
        (dict(kv_scales="channel"), r"kv_scales='channel': want 'tensor', 'token' or None"),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_the_rule(fields, message):
    with pytest.raises(ValueError, match=message):
        AttnSpec(**{**HEADS, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(num_q_heads=0), r"MLASpec.num_q_heads=0: want at least 1"),
        (dict(kv_lora_rank=0), r"MLASpec.kv_lora_rank=0: want at least 1"),
        (dict(qk_nope_head_dim=-1), r"MLASpec.qk_nope_head_dim=-1: want at least 0"),
        (dict(qk_nope_head_dim=0, qk_rope_head_dim=0), r"qk_nope_head_dim=0 and qk_rope_head_dim=0: want a key"),
        (dict(qk_rope_head_dim=-4), r"MLASpec.qk_rope_head_dim=-4: want at least 0"),
        (dict(v_head_dim=-1), r"MLASpec.v_head_dim=-1: want at least 1"),
        (dict(kv_dtype="fp8"), r"MLASpec.kv_dtype='fp8': want one of float32"),
    ],
)
def test_a_wrong_latent_width_is_named_too(fields, message):
    with pytest.raises(ValueError, match=message):
        MLASpec(**{**LATENT, **fields})


def test_the_latent_scale_is_that_of_the_whole_key():
    assert MLASpec(**LATENT).sm_scale == 0.25  # (12 + 4) ** -0.5, not 12, not 32 + 4
    assert MLASpec(**{**LATENT, "qk_rope_head_dim": 0, "qk_nope_head_dim": 4}).sm_scale == 0.5
    assert MLASpec(**LATENT, sm_scale=2.0).sm_scale == 2.0


@pytest.mark.parametrize("spec", [AttnSpec(**HEADS), MLASpec(**LATENT)], ids=["mha", "mla"])
def test_equal_specs_share_a_program_and_others_do_not(spec):
    traces = []
    run = jax.jit(lambda x, spec: traces.append(spec) or x * spec.sm_scale, static_argnums=1)
    again = type(spec)(**{f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)})
    assert again == spec and hash(again) == hash(spec)
    for equal in (spec, again):
        run(1.0, equal)
    assert len(traces) == 1
    run(1.0, dataclasses.replace(spec, sm_scale=0.125))
    assert len(traces) == 2


def test_a_spec_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        AttnSpec(**HEADS).head_dim = 8  # pyright: ignore[reportAttributeAccessIssue]
