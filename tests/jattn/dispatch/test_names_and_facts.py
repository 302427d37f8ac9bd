"""Names per phase, facts read from live objects, DSA's dense prefill, and the original's default names."""

import dataclasses
from types import SimpleNamespace as Object
from typing import Any

import pytest

from jattn.dispatch import (
    AttnForwardMethod,
    HybridPair,
    default_policy,
    dsa_prefill_uses_mha,
    facts_from,
    select_method,
)
from jattn.modes import ForwardMode
from jattn.platforms import PLATFORMS

# mode -> half that names the dispatch under attention_mode prefill, decode; half that runs it under prefill, decode
HALVES = {
    "EXTEND": "prefill prefill prefill prefill",
    "DECODE": "decode decode decode decode",
    "MIXED": "prefill prefill prefill prefill",
    "IDLE": "decode decode decode decode",
    "TARGET_VERIFY": "prefill decode prefill decode",
    "DRAFT_EXTEND_V2": "prefill decode prefill prefill",
    "PREBUILT": "prefill prefill prefill prefill",
    "SPLIT_PREFILL": "prefill prefill prefill prefill",
    "DLLM_EXTEND": "prefill prefill prefill prefill",
}


@pytest.mark.parametrize("mode", HALVES)
def test_half_of_the_pair_by_mode(mode):
    pairs = [HybridPair(prefill="prefill", decode="decode", attention_mode=m) for m in ("prefill", "decode")]
    got = [p.dispatch_name(ForwardMode[mode]) for p in pairs] + [p.runs_on(ForwardMode[mode]) for p in pairs]
    assert got == HALVES[mode].split()


def test_a_base_name_fills_the_halves():
    assert HybridPair.of("fa3", decode="flashmla") == HybridPair(prefill="fa3", decode="flashmla")
    assert HybridPair.of("fa3", prefill="") == HybridPair(prefill="fa3", decode="fa3")


def test_host_lengths_of_a_pair():
    for mode, needed in (("prefill", [False, True, True, True]), ("decode", [False, True, False, True])):
        pair = HybridPair(prefill=None, decode=None, attention_mode=mode)
        halves = [(False, False), (False, True), (True, False), (True, True)]
        assert [pair.needs_host_lens(prefill=p, decode=d) for p, d in halves] == needed


def batch(mode="EXTEND", prefix=(0, 4), seqs=(3, 9), **fields):
    lens = dict(extend_prefix_lens_cpu=prefix and list(prefix), seq_lens_cpu=seqs and list(seqs))
    return Object(forward_mode=ForwardMode[mode], **lens, **fields)


def test_stamps_name_the_policy_and_the_configured_pair_stands_in():
    configured = HybridPair(prefill="fa3", decode="flashmla")
    stamped = Object(prefill_stamp="triton", decode_stamp="aiter")
    original = Object(prefill_attention_backend_str="triton", decode_attention_backend_str="aiter")
    unstamped = Object(prefill_attention_backend_str=None)
    for mode, own, other in (("EXTEND", "triton", "fa3"), ("DECODE", "aiter", "flashmla")):
        assert facts_from(stamped, batch(mode), configured=configured).policy == own
        assert facts_from(original, batch(mode), configured=configured).policy == own
        assert facts_from(unstamped, batch(mode), configured=configured).policy == other
        assert facts_from(Object(primary=stamped), batch(mode), configured=configured).policy == own
        assert facts_from(None, batch(mode)).policy is None


# what the active backend is -> whether a DSA name runs dense
BACKENDS = {
    "missing": (Object(), False),
    "false": (Object(use_mha=False), False),
    "true": (Object(use_mha=True), True),
    "overlap of true": (Object(primary=Object(use_mha=True), children=()), True),
    "overlap of false": (Object(primary=Object(use_mha=False), children=()), False),
}


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("name", ["dsa", "nsa"])
def test_dense_prefill_is_read_through_two_batch_overlap(kind, name):
    backend, dense = BACKENDS[kind]
    facts = facts_from(backend, batch())
    want = AttnForwardMethod.MHA_ONE_SHOT if dense else AttnForwardMethod.MLA
    assert facts.dsa_use_mha is dense and select_method(name, facts) is want


def test_sums_layers_and_overrides():
    layer = Object(
        chunked_prefix_cache_threshold=7,
        disable_chunked_prefix_cache=True,
        flashinfer_mla_disable_ragged=True,
        rocm_fused_decode_mla=True,
        use_intel_amx_backend=True,
        use_dsa=True,
        fused_qkv_a_proj_with_mqa=None,
    )
    platform = PLATFORMS["rocm-gfx942"]
    read = facts_from(Object(), batch(get_max_chunk_capacity=lambda: 11), layer=layer, platform=platform, amx=False)
    assert (read.sum_prefix_lens, read.sum_seq_lens, read.batch_size) == (4, 12, 2)
    assert (read.chunked_prefix_threshold, read.max_chunk_capacity) == (7, 11)
    assert read.chunked_prefix_disabled and read.ragged_disabled and read.rocm_fused_decode and read.fused_qkv_a
    assert read.hip and read.dsa_model and not read.amx
    unknown = facts_from(Object(), batch("DECODE", prefix=None, seqs=None))
    assert unknown.sum_prefix_lens is None and unknown.sum_seq_lens is None and unknown.dsa_model is None
    with pytest.raises(TypeError, match="batch.forward_mode=None: want a ForwardMode"):
        facts_from(Object(), Object())


@pytest.mark.parametrize("mode", ForwardMode)
def test_context_parallel_needs_the_metadata_and_an_extend_that_may_be_split(mode):
    split = batch(mode.name, attn_cp_metadata=object())
    assert facts_from(None, split).prefill_context_parallel == (mode.name in ("EXTEND", "MIXED"))
    assert not facts_from(None, batch(mode.name, attn_cp_metadata=None)).prefill_context_parallel


DENSE = dict(max_seq_len=2048, sum_seq_lens=131072, platform=PLATFORMS["cuda-sm90"])


def dense(mode: str = "EXTEND", **fields: Any) -> bool:
    return dsa_prefill_uses_mha(ForwardMode[mode], **{**DENSE, **fields})


def test_dense_prefill_holds_iff_every_condition_does():
    assert dense() and dense(kv_dtype="fp8_e4m3") and dense(platform=PLATFORMS["cuda-sm100"])
    conditions: list[dict[str, Any]] = [
        dict(in_graph=True),
        dict(max_seq_len=2049),
        dict(sum_seq_lens=131073),
        dict(kv_dtype="fp8_e5m2"),
        dict(context_parallel=True),
        dict(hierarchical_sparse=True),
        dict(platform=PLATFORMS["cuda-sm80"]),
        dict(platform=PLATFORMS["cuda-sm120"]),
        dict(platform=PLATFORMS["rocm-gfx950"]),
        dict(one_shot_allowed=False, rules="newer"),
    ]
    for broken in conditions:
        assert not dense(**broken)
    assert dense(one_shot_allowed=False) and dense(platform=PLATFORMS["rocm-gfx950"], rules="newer")
    with pytest.raises(ValueError, match="unknown rules 'old': want one of seed, newer"):
        dense(rules="old")
    assert [m.name for m in ForwardMode if dense(m.name)] == ["EXTEND", "MIXED", "SPLIT_PREFILL", "DLLM_EXTEND"]


# platform, keyword arguments -> the original's choice
DEFAULTS = [
    ("cuda-sm90", {}, "fa3"),
    ("cuda-sm90", dict(topk=1), "fa3"),
    ("cuda-sm90", dict(topk=1, page_size=1), "fa3"),
    ("cuda-sm90", dict(topk=1, page_size=64), "flashinfer"),
    ("cuda-sm90", dict(topk=4), "flashinfer"),
    ("cuda-sm90", dict(topk=4, sinks=True), "triton"),
    ("cuda-sm90", dict(topk=4, flashinfer_installed=False), "triton"),
    ("cuda-sm90", dict(is_mla=True, topk=4, page_size=64), "fa3"),
    ("cuda-sm100", {}, "trtllm_mha"),
    ("cuda-sm100", dict(same_kv_head_dims=False), "fa4"),
    ("cuda-sm100", dict(speculative=True), "flashinfer"),
    ("cuda-sm100", dict(speculative=True, topk=1), "trtllm_mha"),
    ("cuda-sm100", dict(topk=4), "flashinfer"),
    ("cuda-sm100", dict(is_mla=True), "flashinfer"),
    ("cuda-sm100", dict(is_mla=True, family="deepseek_v3"), "trtllm_mla"),
    ("cuda-sm90", dict(is_mla=True, family="deepseek_v3"), "fa3"),
    ("cuda-sm80", {}, "flashinfer"),
    ("cuda-sm80", dict(is_mla=True), "triton"),
    ("cuda-sm120", {}, "flashinfer"),
    ("rocm-gfx942", {}, "aiter"),
    ("rocm-gfx942", dict(is_mla=True, kv_heads_per_rank=16), "aiter"),
    ("rocm-gfx942", dict(is_mla=True, kv_heads_per_rank=128), "aiter"),
    ("rocm-gfx950", dict(is_mla=True, kv_heads_per_rank=8), "triton"),
    ("cpu-amx", {}, "intel_amx"),
    ("cpu", {}, "native"),
    ("tpu-v6e", {}, "native"),
    ("npu", {}, "ascend"),
    ("xpu", {}, "intel_xpu"),
    ("musa", {}, "triton"),
    ("cuda-sm90", dict(family="dsa", is_mla=True), "dsa"),
    ("cuda-sm90", dict(family="deepseek_v4"), "dsv4"),
    ("cuda-sm100", dict(family="llama4"), "trtllm_mha"),
    ("cuda-sm90", dict(family="llama4"), "fa3"),
    ("rocm-gfx942", dict(family="llama4"), "aiter"),
    ("xpu", dict(family="llama4"), "intel_xpu"),
    ("cpu-amx", dict(family="llama4"), "triton"),
    ("cuda-sm100", dict(family="gpt_oss"), "trtllm_mha"),
    ("cuda-sm90", dict(family="gpt_oss"), "fa3"),
    ("cpu-amx", dict(family="gpt_oss"), "intel_amx"),
    ("xpu", dict(family="gpt_oss"), "intel_xpu"),
    ("rocm-gfx942", dict(family="gpt_oss"), "aiter"),
    ("cuda-sm80", dict(family="gpt_oss"), "triton"),
    ("cuda-sm100", dict(family="gemma4"), "trtllm_mha"),
    ("cuda-sm90", dict(family="gemma4"), "triton"),
    ("cuda-sm100", dict(family="inkling"), "fa4"),
    ("cuda-sm90", dict(family="inkling"), "triton"),
    ("cuda-sm80", dict(family="whisper"), "flashinfer"),
    ("cuda-sm90", dict(deterministic=True), "fa3"),
    ("cuda-sm100", dict(deterministic=True), "flashinfer"),
    ("cuda-sm120", dict(deterministic=True, is_mla=True), "flashinfer"),
    ("cuda-sm100", dict(deterministic=True, is_mla=True, family="deepseek_v3"), "triton"),
    ("cuda-sm120", dict(deterministic=True, is_mla=True, family="deepseek_v3"), "triton"),
]


@pytest.mark.parametrize(("platform", "situation", "want"), DEFAULTS)
def test_default_name_of_the_original(platform, situation, want):
    assert default_policy(PLATFORMS[platform], **situation) == want


def test_an_xpu_without_matrix_units_takes_triton():
    assert default_policy(dataclasses.replace(PLATFORMS["xpu"], has_xmx=False)) == "triton"


def test_an_unknown_family_is_refused():
    with pytest.raises(ValueError, match="unknown family 'gptoss': want one of gpt_oss"):
        default_policy(PLATFORMS["cpu"], family="gptoss")
    assert all(platform.default_policy == "native" for platform in PLATFORMS.values())
