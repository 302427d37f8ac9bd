"""The policies, a row each: `native`, which has no limits, and the 19 backend names of SGLang with theirs.

A limit here is refused when violated, with the legal values; the original silently overrides some of them.
Source: support matrix and argument checks of SGLang 0.5.15 to 0.5.21. A name that was made for one vendor's device runs
everywhere here, under that name's rules.
"""

from jattn.backends.policy import BackendPolicy
from jattn.platforms.lookup import named

_FLOAT = frozenset({"float32", "bfloat16", "float16"})
_FP8 = frozenset({"fp8_e4m3", "fp8_e5m2"})


def _mla(name: str, *, page_sizes: set[int], kv_dtypes: frozenset[str], **fields) -> BackendPolicy:
    """A policy for MLA models whose drafts are chains."""
    return BackendPolicy(
        name=name,
        page_sizes=frozenset(page_sizes),
        kv_dtypes=kv_dtypes,
        max_topk=1,
        mla_only=True,
        supports_mha=False,
        sinks=False,
        **fields,
    )


def _refused(name: str, why: str, **fields) -> BackendPolicy:
    return BackendPolicy(name=name, refused=f"{why}, for which there is no kernel yet", sinks=False, **fields)


def _dsa(name: str, note: str = "") -> BackendPolicy:
    why = "it is sparse MLA attention over selected tokens (DeepSeek-V3.2)"
    pages = frozenset({64})
    return _refused(name, why, page_sizes=pages, max_topk=1, mla_only=True, supports_mha=False, note=note)


_ROWS = (
    BackendPolicy(name="native", paged_trees=True, note="no legacy limits; the cheapest form by cost"),
    BackendPolicy(name="flashinfer", max_mla_topk=1, paged_trees=True, sinks=False, kv_dtypes=_FLOAT | _FP8),
    BackendPolicy(name="triton", paged_trees=True, kv_dtypes=_FLOAT | _FP8),
    BackendPolicy(name="intel_amx", kv_dtypes=_FLOAT),
    BackendPolicy(
        name="intel_xpu",
        page_sizes=frozenset({64, 128}),
        mla_page_sizes=frozenset({16, 32, 64, 128}),
        kv_dtypes=_FLOAT | _FP8,
    ),
    BackendPolicy(name="aiter", max_mla_topk=1, kv_dtypes=_FLOAT | _FP8),
    BackendPolicy(name="fa3", paged_trees=True, kv_dtypes=_FLOAT | {"fp8_e4m3"}, note="fp8_e5m2 is triton's"),
    BackendPolicy(
        name="fa4",
        page_sizes=frozenset({1, 128}),
        mla_page_sizes=frozenset({1}),
        max_mla_topk=1,
        kv_dtypes=_FLOAT,
        note="its original kernel reads pages of 128, and single tokens for trees and MLA",
    ),
    _refused("hybrid_linear_attn", "it mixes linear and full attention by layer"),
    _mla("flashmla", page_sizes={64}, kv_dtypes=_FLOAT | _FP8),
    _mla("cutlass_mla", page_sizes={128}, kv_dtypes=_FLOAT | _FP8, note="has dispatch rules, but no draft backend"),
    BackendPolicy(
        name="trtllm_mha",
        page_sizes=frozenset({16, 32, 64, 128}),
        max_topk=1,
        supports_mla=False,
        kv_dtypes=_FLOAT | _FP8,
    ),
    _mla("trtllm_mla", page_sizes={32, 64}, kv_dtypes=frozenset({"bfloat16", "fp8_e4m3"})),
    _mla("cutedsl_mla", page_sizes={32, 64}, kv_dtypes=_FLOAT | _FP8, note="draft-extend runs as trtllm_mla"),
    _mla("tokenspeed_mla", page_sizes={32, 64}, kv_dtypes=frozenset({"fp8_e4m3"})),
    _dsa("dsa"),
    _dsa("nsa", note="the former name of dsa"),
    BackendPolicy(name="ascend", page_sizes=frozenset({128}), sinks=False, kv_dtypes=_FLOAT | {"int8"}),
    _refused(
        "dsv4",
        "it mixes windowed, compressed and sparse attention by layer (DeepSeek-V4)",
        page_sizes=frozenset({256}),
        max_topk=1,
    ),
    _refused("qsa", "it is sparse attention over selected blocks (Qwen)", max_topk=1, supports_mla=False),
)
POLICIES: dict[str, BackendPolicy] = {row.name: row for row in _ROWS}


def policy_named(name: str | None) -> BackendPolicy:
    """The row called `name`.

    Raises: ValueError with the name and every policy, the most similar first.

    >>> sorted(policy_named("trtllm_mla").page_sizes)
    [32, 64]
    """
    return named(POLICIES, name, what="policy")
