"""The backend name that the original would choose by itself, per platform and model family, as rows.

Ours is `native` everywhere (`Platform.default_policy`); this is for those who want the original's choice.
"""

import dataclasses
from collections.abc import Callable, Mapping

from jattn.dispatch.interpreter import first, table, with_negations
from jattn.platforms import Platform
from jattn.platforms.lookup import named


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Situation:
    platform: Platform
    is_mla: bool
    topk: int | None
    page_size: int | None
    speculative: bool
    same_kv_head_dims: bool
    sinks: bool
    kv_heads_per_rank: int | None
    deterministic: bool
    deepseek: bool
    flashinfer_installed: bool

    @property
    def fa3_able(self) -> bool:
        """An MLA model, or an MHA model without a tree that FA3 cannot page."""
        return self.is_mla or self.topk is None or (self.topk == 1 and self.page_size in (None, 1))


_PLAIN: dict[str, Callable[[_Situation], bool]] = {
    "MLA": lambda s: s.is_mla,
    "Hopper": lambda s: s.platform.is_sm90,
    "SM100": lambda s: s.platform.is_sm100,
    "SM120": lambda s: s.platform.is_sm120,
    "ROCm": lambda s: s.platform.is_hip,
    "CPU": lambda s: s.platform.is_cpu,
    "AMX": lambda s: s.platform.cpu_has_amx_support,
    "NPU": lambda s: s.platform.is_npu,
    "XPU": lambda s: s.platform.is_xpu,
    "XMX": lambda s: s.platform.xpu_has_xmx_support,
    "TPU": lambda s: s.platform.is_tpu,
    "topk fits fa3": lambda s: s.fa3_able,
    "topk resolved": lambda s: s.is_mla or not s.speculative or s.topk is not None,
    "equal head widths": lambda s: s.same_kv_head_dims,
    "16 or 128 KV heads a rank": lambda s: s.kv_heads_per_rank in (16, 128),
    "sinks": lambda s: s.sinks,
    "flashinfer at hand": lambda s: s.flashinfer_installed and s.platform.is_cuda,
    "deterministic": lambda s: s.deterministic,
    "DeepSeek": lambda s: s.deepseek,
}
_CONDITIONS = with_negations(_PLAIN)

_BY_PLATFORM = table(
    "default",
    (("Hopper", "topk fits fa3"), "fa3"),
    (("SM100", "MLA"), "flashinfer"),
    (("SM100", "topk fits fa3", "topk resolved", "equal head widths"), "trtllm_mha"),
    (("SM100", "topk fits fa3", "topk resolved"), "fa4"),
    (("ROCm", "not MLA"), "aiter"),
    (("ROCm", "16 or 128 KV heads a rank"), "aiter"),
    (("AMX",), "intel_amx"),
    (("CPU",), "native"),  # torch_native in the original
    (("TPU",), "native"),  # the original has no TPU
    (("NPU",), "ascend"),
    (("XPU", "XMX"), "intel_xpu"),
    (("flashinfer at hand", "not MLA", "not sinks"), "flashinfer"),
    ((), "triton"),
)
_DETERMINISTIC = table(
    "deterministic",
    (("SM100", "DeepSeek"), "triton"),
    (("SM120", "DeepSeek"), "triton"),
    (("SM100",), "flashinfer"),
    (("SM120",), "flashinfer"),
    ((), "fa3"),
)
_ANY = table("any", (("deterministic",), _DETERMINISTIC), ((), _BY_PLATFORM))

_FAMILIES: Mapping[str | None, tuple] = {
    None: _ANY,
    "deepseek_v3": table("deepseek_v3", (("not deterministic", "SM100"), "trtllm_mla"), ((), _ANY)),
    "dots": _ANY,
    "dsa": table("dsa", ((), "dsa")),
    "deepseek_v4": table("deepseek_v4", ((), "dsv4")),
    "llama4": table(
        "llama4",
        (("SM100",), "trtllm_mha"),
        (("Hopper",), "fa3"),
        (("ROCm",), "aiter"),
        (("XPU",), "intel_xpu"),
        ((), "triton"),
    ),
    "gpt_oss": table(
        "gpt_oss",
        (("SM100",), "trtllm_mha"),
        (("Hopper",), "fa3"),
        (("AMX",), "intel_amx"),
        (("XPU",), "intel_xpu"),
        (("ROCm",), "aiter"),
        ((), "triton"),
    ),
    "gemma4": table("gemma4", (("SM100",), "trtllm_mha"), ((), "triton")),
    "inkling": table("inkling", (("SM100",), "fa4"), ((), "triton")),
    "whisper": table("whisper", ((), "flashinfer")),
}


def default_policy(
    platform: Platform,
    *,
    is_mla: bool = False,
    family: str | None = None,
    topk: int | None = None,
    page_size: int | None = None,
    speculative: bool = False,
    same_kv_head_dims: bool = True,
    sinks: bool = False,
    kv_heads_per_rank: int | None = None,
    deterministic: bool = False,
    flashinfer_installed: bool = True,
) -> str:
    """The name that the original resolves to when none is given; `native` where it has none that exists here.

    Args:
      family: a model family with rules of its own, as "gpt_oss"; None for any other model.
      topk, page_size: None where not set by the user. speculative: a draft is configured.
      kv_heads_per_rank: read on ROCm for MLA models.

    Raises: ValueError for a family without rows.

    >>> from jattn.platforms import PLATFORMS
    >>> default_policy(PLATFORMS["cuda-sm90"]), default_policy(PLATFORMS["cuda-sm90"], topk=4)
    ('fa3', 'flashinfer')
    """
    situation = _Situation(
        platform=platform,
        is_mla=is_mla,
        topk=topk,
        page_size=page_size,
        speculative=speculative,
        same_kv_head_dims=same_kv_head_dims,
        sinks=sinks,
        kv_heads_per_rank=kv_heads_per_rank,
        deterministic=deterministic,
        deepseek=family == "deepseek_v3",
        flashinfer_installed=flashinfer_installed,
    )
    return first(_family_rows(family), lambda name: _CONDITIONS[name](situation))[-1].then


def _family_rows(family: str | None) -> tuple:
    return (
        _FAMILIES[None] if family is None else named({k: v for k, v in _FAMILIES.items() if k}, family, what="family")
    )
