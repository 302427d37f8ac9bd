"""Every feature is either provided by a kernel or known to be refused, and a layer's wish is spelled by its name."""

import pytest

from jattn import AttnSpec, Feature, MLASpec
from jattn.kernel_sets import KERNELS, MLA_OPS, OPS

REFUSED = {
    Feature.ALIBI,
    Feature.CROSS_ATTENTION,
    Feature.CHUNKED_LOCAL,
    Feature.BIDIRECTIONAL_SPANS,
    Feature.XAI_TEMPERATURE,
    Feature.SPARSE,
    Feature.LINEAR,
}
WISHES = {
    Feature.UNEQUAL_HEAD_DIMS: dict(v_head_dim=5),
    Feature.WINDOW: dict(sliding_window=1),
    Feature.SOFT_CAP: dict(logit_soft_cap=30.0),
    Feature.SINKS: dict(sinks=True),
    Feature.ALIBI: dict(alibi=True),
    Feature.CROSS_ATTENTION: dict(cross_attention=True),
    Feature.CHUNKED_LOCAL: dict(chunked_local=8192),
    Feature.BIDIRECTIONAL_SPANS: dict(bidirectional_spans=True),
    Feature.XAI_TEMPERATURE: dict(xai_temperature_len=1024),
}


def spec(**fields):
    return AttnSpec(num_q_heads=4, num_kv_heads=2, head_dim=8, **fields)


def test_each_feature_is_provided_by_the_plain_kernels_or_by_none():
    for op in OPS:
        plain = next(row for row in KERNELS if row.set == "xla" and row.op == op)
        assert plain.provides == set(Feature) - REFUSED - {Feature.MLA}
    for op in set(MLA_OPS) - set(OPS):
        plain = next(row for row in KERNELS if row.set == "xla" and row.op == op)
        assert {Feature.MLA, Feature.PAGED, Feature.TREE, Feature.FULL, Feature.LSE, Feature.FP8_KV} <= plain.provides
    assert not any(row.provides & REFUSED for row in KERNELS)


def test_the_plain_kernels_are_written_for_every_op():
    assert all(row.function is not None for row in KERNELS if row.set == "xla")
    assert {row.op for row in KERNELS if row.set == "xla"} == {*OPS, *MLA_OPS}


def test_plain_grouped_query_attention_needs_nothing():
    assert spec().needs() == frozenset()


def str_of(value):
    """An id that does not depend on the order of a set, which differs between processes."""
    return "+".join(sorted(value)) if isinstance(value, (set, frozenset)) else str(value)


@pytest.mark.parametrize("feature", WISHES, ids=str)
def test_each_wish_needs_the_feature_of_its_name(feature):
    assert spec(**WISHES[feature]).needs() == {feature}


def test_wishes_add_up():
    everything = {name: value for wish in WISHES.values() for name, value in wish.items()}
    assert spec(**everything).needs() == set(WISHES)


@pytest.mark.parametrize(
    ("fields", "needs"),
    [
        (dict(kv_dtype="bfloat16"), set()),
        (dict(kv_dtype="bfloat16", kv_scales="token"), set()),  # nothing is scaled
        (dict(kv_dtype="fp8_e4m3"), {Feature.FP8_KV}),
        (dict(kv_dtype="fp8_e5m2", kv_scales="token"), {Feature.FP8_KV, Feature.TOKEN_SCALES}),
        (dict(kv_dtype="int8"), {Feature.INT8_KV, Feature.TOKEN_SCALES}),
        (dict(kv_dtype="int8", kv_scales="tensor"), {Feature.INT8_KV}),
    ],
    ids=str_of,
)
def test_quantised_rows_need_their_dtype_and_the_kind_of_their_scales(fields, needs):
    assert spec(**fields).needs() == needs


@pytest.mark.parametrize(("kv_dtype", "needs"), [(None, {Feature.MLA}), ("fp8_e4m3", {Feature.MLA, Feature.FP8_KV})])
def test_latent_attention_needs_its_own_kernel(kv_dtype, needs):
    widths = dict(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
    assert MLASpec(num_q_heads=2, **widths, kv_dtype=kv_dtype).needs() == needs


def test_a_feature_reads_as_its_name_in_a_sentence():
    assert f"lacks {Feature.ALIBI}, {Feature.WINDOW}" == "lacks alibi, sliding_window"
    assert sorted([Feature.WINDOW, Feature.ALIBI]) == [Feature.ALIBI, Feature.WINDOW]
