"""Policy rows: names, limits typed out by row, refusals, look-up."""

import pytest

from jattn.backends import POLICIES, policy_named

ORIGINAL = (
    "flashinfer triton intel_amx intel_xpu aiter fa3 fa4 hybrid_linear_attn flashmla cutlass_mla trtllm_mha trtllm_mla "
    "cutedsl_mla tokenspeed_mla dsa nsa ascend dsv4 qsa"
).split()

PAGE_SIZES = {
    "flashmla": {64},
    "cutlass_mla": {128},
    "trtllm_mla": {32, 64},
    "cutedsl_mla": {32, 64},
    "tokenspeed_mla": {32, 64},
    "trtllm_mha": {16, 32, 64, 128},
    "intel_xpu": {64, 128},
    "fa4": {1, 128},
    "ascend": {128},
    "dsa": {64},
    "nsa": {64},
    "dsv4": {256},
}
CHAINS_ONLY = set("flashmla cutlass_mla trtllm_mha trtllm_mla cutedsl_mla tokenspeed_mla dsa nsa dsv4 qsa".split())
CHAINS_ONLY_FOR_MLA = CHAINS_ONLY | {"flashinfer", "aiter", "fa4"}
MLA_ONLY = set("flashmla cutlass_mla trtllm_mla cutedsl_mla tokenspeed_mla dsa nsa".split())
REFUSED = set("dsa nsa dsv4 qsa hybrid_linear_attn".split())


def test_names():
    assert set(POLICIES) == {"native", *ORIGINAL}
    assert all(row.name == name for name, row in POLICIES.items())


@pytest.mark.parametrize("name", POLICIES)
def test_limits_are_those_of_the_table(name):
    row = POLICIES[name]
    assert row.page_sizes == (frozenset(PAGE_SIZES[name]) if name in PAGE_SIZES else None)
    assert row.legal_topk(is_mla=False) == (1 if name in CHAINS_ONLY else None)
    assert row.legal_topk(is_mla=True) == (1 if name in CHAINS_ONLY_FOR_MLA else None)
    assert row.mla_only == (name in MLA_ONLY)
    assert row.supports_mla == (name not in {"trtllm_mha", "qsa"})
    assert row.paged_trees == (name in {"native", "flashinfer", "fa3", "triton"})
    assert (row.refused is not None) == (name in REFUSED)


def test_page_sizes_of_mla_models():
    assert policy_named("intel_xpu").legal_page_sizes(is_mla=True) == {16, 32, 64, 128}
    assert policy_named("intel_xpu").legal_page_sizes(is_mla=False) == {64, 128}
    assert policy_named("fa4").legal_page_sizes(is_mla=True) == {1}
    assert policy_named("triton").legal_page_sizes(is_mla=True) is None


def test_sinks_and_dtypes():
    serves = {name for name, row in POLICIES.items() if row.sinks}
    assert serves == {"native", "triton", "intel_amx", "intel_xpu", "aiter", "fa3", "fa4", "trtllm_mha"}
    assert policy_named("tokenspeed_mla").kv_dtypes == {"fp8_e4m3"}
    assert policy_named("trtllm_mla").kv_dtypes == {"bfloat16", "fp8_e4m3"}
    assert "fp8_e5m2" not in (policy_named("fa3").kv_dtypes or ())
    assert policy_named("native").kv_dtypes is None


@pytest.mark.parametrize("name", ["flashinfr", "", None])
def test_an_unknown_name_lists_the_names(name):
    with pytest.raises(ValueError) as error:
        policy_named(name)
    assert str(error.value).startswith(f"unknown policy {name!r}: want one of ")
    assert all(known in str(error.value) for known in POLICIES)
