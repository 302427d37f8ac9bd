"""rules="newer": what changed after the seed, a literal line a change, and that nothing else did."""

import itertools
from typing import Any

import pytest

from jattn.dispatch import DispatchFacts, explain, select_method
from jattn.modes import ForwardMode

K = 131072


def newer(name: str, mode: str = "EXTEND", prefix: int | None = 0, total: int | None = 100, **flags: Any) -> str:
    facts = DispatchFacts(mode=ForwardMode[mode], sum_prefix_lens=prefix, sum_seq_lens=total, **flags)
    return select_method(name, facts, rules="newer").name


GENERIC = ("flashinfer", "flashmla", "fa3", "intel_xpu")
TRTLLM = ("trtllm_mla", "tokenspeed_mla")


@pytest.mark.parametrize("name", [*GENERIC, *TRTLLM, "triton", "cutedsl_mla"])
@pytest.mark.parametrize("graph", ["piecewise_graph", "breakable_graph"])
def test_either_graph_takes_plain_absorbed(name, graph):
    flag: Any = {graph: True}
    for mode in ForwardMode:
        assert newer(name, mode.name, fused_qkv_a=True, amx=True, **flag) == "MLA"


def test_no_rope_acts_as_ragged_disabled():
    assert [newer(name, no_rope=True) for name in GENERIC] == ["MLA", "MLA", "MHA_ONE_SHOT", "MHA_CHUNKED_KV"]


def test_cutlass_mla_is_gone_so_it_takes_tritons_rows():
    assert newer("cutlass_mla") == "MHA" and newer("cutlass_mla", prefix=9000) == "MLA"


def test_fa4_depends_on_the_device():
    assert {newer("fa4", mode.name) for mode in ForwardMode} == {"MHA_CHUNKED_KV"}
    on: Any = dict(sm100_or_sm110=True)
    assert newer("fa4", deterministic=True, **on) == "MLA"
    assert [newer("fa4", prefix=p, **on) for p in (0, 100, 9000)] == ["MHA_CHUNKED_KV", "MLA", "MHA_CHUNKED_KV"]
    assert newer("fa4", "DECODE", **on) == "MLA"


def test_aiter_chunks_what_does_not_fit_and_decodes_by_subtype():
    assert newer("aiter", total=K + 1) == "MHA_CHUNKED_KV"
    assert newer("aiter", total=K) == "MHA"
    assert newer("aiter", total=K, decode_context_parallel=True) == "MHA_ONE_SHOT"
    assert newer("aiter", total=K + 1, decode_context_parallel=True) == "MHA_CHUNKED_KV"
    assert newer("aiter", total=K + 1, breakable_graph=True) == "MHA"
    on: Any = dict(hip=True, rocm_fused_decode=True)
    assert newer("aiter", "DECODE", **on) == "MLA_FUSED_ROPE_ROCM"
    assert [newer(name, "DECODE", **on) for name in ("triton", "fa3", "trtllm_mla")] == ["MLA_ROCM"] * 3


def test_tritons_dense_path():
    assert newer("triton", prefix=9000, fp8_gfx95_dense=True) == "MHA_CHUNKED_KV"
    assert newer("triton", "DECODE", fp8_gfx95_dense=True) == "MLA"
    assert newer("triton", fp8_gfx95_dense=True, deterministic=True) == "MLA"


ROCM = {
    "MHA": "MHA_ROCM",
    "MHA_ONE_SHOT": "MHA_ONE_SHOT_ROCM",
    "MHA_CHUNKED_KV": "MHA_CHUNKED_KV_ROCM",
    "MLA": "MLA_ROCM",
}
CELLS = list(itertools.product(ForwardMode.__members__, (0, 100, 9000), (None, K + 1)))


@pytest.mark.parametrize(
    "name", ["flashinfer", "fa3", "fa4", "trtllm_mla", "aiter", "dsa", "ascend", "triton", "native"]
)
def test_rocm_renames_four_methods(name):
    for mode, prefix, total in CELLS:
        plain = newer(name, mode, prefix, total)
        assert newer(name, mode, prefix, total, hip=True) == (plain if name == "native" else ROCM.get(plain, plain))


@pytest.mark.parametrize(
    "name", [*GENERIC, *TRTLLM, "fa4", "dsa", "nsa", "ascend", "triton", "no such backend", "native"]
)
def test_everything_else_is_the_seeds(name):
    flags = ("chunked_prefix_disabled", "ragged_disabled", "piecewise_graph", "deterministic", "dsa_use_mha")
    for mode, prefix, total in CELLS:
        for values in itertools.product((False, True), repeat=len(flags)):
            on: Any = dict(zip(flags, values, strict=True)) | dict(fused_qkv_a=True, amx=True)
            facts = DispatchFacts(mode=ForwardMode[mode], sum_prefix_lens=prefix, sum_seq_lens=total, **on)
            assert newer(name, mode, prefix, total, **on) == select_method(name, facts).name


def test_the_reason_names_the_generation_s_row():
    facts = DispatchFacts(mode=ForwardMode.EXTEND, sum_prefix_lens=0, sum_seq_lens=5, breakable_graph=True)
    assert str(explain("fa3", facts, rules="newer")) == "MLA by generic 1 (piecewise or breakable graph)"
    assert explain("fa3", facts).method == "MHA_ONE_SHOT"
