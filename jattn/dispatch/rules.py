"""The decision tables. First match wins; a new backend is a new entry, usually of rows that exist.

`SEED` is the behaviour of SGLang's DeepSeek dispatch between 0.5.15 and 0.5.16, `NEWER` what 0.5.17 to 0.5.21 changed.
`native` is ours, in both. A name without an entry takes triton's rows, as in the original.
"""

from collections.abc import Mapping

from jattn.dispatch.interpreter import Row, table
from jattn.dispatch.methods import AttnForwardMethod as M

_W = "non-speculative extend"
_GRAPH = "piecewise or breakable graph"

SUB = table(
    "subtype",
    (("ROCm", "fused decode", "decode"), M.MLA_FUSED_ROPE_ROCM),
    (("ROCm",), M.MLA),
    (("fused qkv_a", "AMX"), M.MLA_FUSED_ROPE_CPU),
    ((), M.MLA),
)
# 0.5.16 and later fuse under the name aiter only.
_NEWER_SUB = table(
    "subtype",
    (("ROCm", "fused decode", "decode", "aiter"), M.MLA_FUSED_ROPE_ROCM),
    (("ROCm",), M.MLA),
    (("fused qkv_a", "AMX"), M.MLA_FUSED_ROPE_CPU),
    ((), M.MLA),
)


def _generic(graph: str, ragged: str, sub: tuple[Row, ...]) -> tuple[Row, ...]:
    return table(
        "generic",
        ((graph,), M.MLA),  # the lengths are not known inside the graph, and the subtypes are not captured
        (("context parallel",), sub),
        (("backend with a ragged switch", ragged), sub),
        ((f"not {_W}",), sub),
        (("no prefix", "one-shot backend", "all tokens fit the capacity"), M.MHA_ONE_SHOT),
        (("no prefix",), M.MHA_CHUNKED_KV),
        (
            (
                "not chunked prefix disabled",
                "one-shot backend",
                "prefix reaches the threshold",
                "all tokens fit the capacity",
            ),
            M.MHA_ONE_SHOT,
        ),
        (("not chunked prefix disabled", "prefix reaches the threshold"), M.MHA_CHUNKED_KV),
        (("not prefix reaches the threshold",), sub),
        ((), sub),
    )


def _trtllm(graph: str, sub: tuple[Row, ...]) -> tuple[Row, ...]:
    return table(
        "trtllm_mla",
        ((graph,), M.MLA),
        ((_W, "not chunked prefix disabled"), M.MHA_CHUNKED_KV),
        ((_W, "no prefix"), M.MHA_CHUNKED_KV),
        ((), sub),
    )


GENERIC = _generic("piecewise graph", "ragged disabled", SUB)
_NEWER_GENERIC = _generic(_GRAPH, "ragged disabled or no rope", _NEWER_SUB)

_DSA = table("dsa", (("DSA planned dense",), M.MHA_ONE_SHOT), ((), M.MLA))
_ASCEND = table(
    "ascend",
    (("DSA model",), M.DSA_NPU),
    ((_W,), M.MHA_NPU),
    ((), M.MLA_NPU),
)
_NATIVE = table(
    "native",
    ((_GRAPH,), M.MLA),
    (("context parallel",), M.MLA),  # latents are gathered over the ranks
    (("deterministic",), M.MLA),  # one form, whatever is cached
    ((f"not {_W}",), M.MLA),  # a few query tokens never pay for expanding the cache
    (("ragged disabled",), M.MLA),
    (("prefix known", "no prefix"), M.MHA),
    (("sums known", "expanding is cheaper", "all tokens fit the capacity"), M.MHA_ONE_SHOT),
    (("sums known", "expanding is cheaper", "not chunked prefix disabled"), M.MHA_CHUNKED_KV),
    ((), M.MLA),
)

SEED: Mapping[str, tuple[Row, ...]] = {
    "native": _NATIVE,
    "ascend": _ASCEND,
    "flashinfer": GENERIC,
    "fa3": table("fa3", (("deterministic",), SUB)) + GENERIC,
    "flashmla": GENERIC,
    "cutlass_mla": GENERIC,
    "intel_xpu": GENERIC,
    "fa4": table("fa4", ((), M.MHA_CHUNKED_KV)),
    "trtllm_mla": _trtllm("piecewise graph", SUB),
    "tokenspeed_mla": _trtllm("piecewise graph", SUB),
    "aiter": table("aiter", ((_GRAPH,), M.MHA), ((_W,), M.MHA), ((), M.MLA)),
    "dsa": _DSA,
    "nsa": _DSA,
    "triton": table(
        "triton",
        (("piecewise graph",), M.MLA),
        (("deterministic",), SUB),
        ((_W, "no prefix, which must be known"), M.MHA),
        ((), SUB),
    ),
}

NEWER: Mapping[str, tuple[Row, ...]] = {
    "native": _NATIVE,
    "ascend": _ASCEND,
    "flashinfer": _NEWER_GENERIC,
    "fa3": table("fa3", (("deterministic",), _NEWER_SUB)) + _NEWER_GENERIC,
    "flashmla": _NEWER_GENERIC,
    "intel_xpu": _NEWER_GENERIC,
    "fa4": table("fa4", (("not SM100 or SM110",), M.MHA_CHUNKED_KV), (("deterministic",), _NEWER_SUB)) + _NEWER_GENERIC,
    "trtllm_mla": _trtllm(_GRAPH, _NEWER_SUB),
    "tokenspeed_mla": _trtllm(_GRAPH, _NEWER_SUB),
    "aiter": table(
        "aiter",
        ((_GRAPH,), M.MHA),
        ((_W, "not all tokens fit the capacity"), M.MHA_CHUNKED_KV),
        ((_W, "decode context parallel"), M.MHA_ONE_SHOT),
        ((_W,), M.MHA),
        ((), _NEWER_SUB),  # the rework made the fused decode reachable
    ),
    "dsa": _DSA,
    "nsa": _DSA,
    "triton": table(
        "triton",
        ((_GRAPH,), M.MLA),
        (("deterministic",), _NEWER_SUB),
        ((_W, "dense fp8 on gfx95"), M.MHA_CHUNKED_KV),
        ((_W, "no prefix, which must be known"), M.MHA),
        ((), _NEWER_SUB),
    ),
}
RULES: Mapping[str, Mapping[str, tuple[Row, ...]]] = {"seed": SEED, "newer": NEWER}

# rules="newer" renames on ROCm, after the tables; `native` keeps its names, which say what is computed.
ROCM_NAMES: Mapping[M, M] = {
    M.MHA: M.MHA_ROCM,
    M.MHA_ONE_SHOT: M.MHA_ONE_SHOT_ROCM,
    M.MHA_CHUNKED_KV: M.MHA_CHUNKED_KV_ROCM,
    M.MLA: M.MLA_ROCM,
}
