"""The backends that can draft, a row each: what is built, how it is stamped, what it refuses. First match wins."""

import dataclasses
from collections.abc import Callable, Mapping

from jattn.draft.config import DraftConfig


class DraftLimitError(ValueError, AssertionError):
    """A limit that the original asserts: caught as either."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftRow:
    """How one backend name drafts, where `when` holds."""

    name: str
    when: tuple[str, ...] = ()  # conditions on the config, all of which must hold
    variant: str = ""  # what the container is
    stamp: str = ""
    extend_variant: str | None = None  # what draft-extends, where it is another
    extend_stamp: str | None = None
    delegate: str | None = None  # another name, whose rows are read on
    requires_mla: bool = False
    max_topk: int | None = None
    limit_error: type[Exception] = ValueError
    num_extra_steps: int = 0  # children beyond num_steps - 1; never planned


CONDITIONS: Mapping[str, Callable[[DraftConfig], bool]] = {
    "MLA": lambda c: c.use_mla,
    "AMX CPU": lambda c: c.platform.cpu_has_amx_support,
    "Blackwell": lambda c: c.platform.is_blackwell,
    "MUSA": lambda c: c.platform.is_musa,
    "NPU": lambda c: c.platform.is_npu,
    "ROCm": lambda c: c.platform.is_hip,
}


def _row(name: str, *when: str, variant: str | None = None, stamp: str | None = None, **fields) -> DraftRow:
    return DraftRow(name=name, when=when, variant=variant or name, stamp=stamp or name, **fields)


def _chain(name: str, *when: str, **fields) -> DraftRow:
    return _row(name, *when, max_topk=1, **fields)


ROWS: tuple[DraftRow, ...] = (
    _row("native"),
    _chain("flashinfer", "MLA", variant="flashinfer_mla"),
    _row("flashinfer"),
    _row("triton"),
    _row("intel_amx"),
    _row("intel_xpu"),
    _row("aiter"),
    _row("fa3", "MUSA", variant="fa3_musa"),
    _row("fa3"),
    _row("fa4", "MUSA", variant="fa4_musa"),
    _row("fa4"),
    DraftRow(name="hybrid_linear_attn", when=("AMX CPU",), delegate="intel_amx"),
    DraftRow(name="hybrid_linear_attn", when=("Blackwell",), delegate="triton"),
    DraftRow(name="hybrid_linear_attn", delegate="fa3"),
    _chain("flashmla"),
    _row("trtllm_mha"),  # its limit on topk is one of the server's arguments, see limits.py
    _chain("trtllm_mla", requires_mla=True),
    _chain("cutedsl_mla", requires_mla=True, extend_variant="trtllm_mla", extend_stamp="trtllm_mla"),
    _chain("tokenspeed_mla", requires_mla=True),
    _row("dsa"),
    _row("nsa", variant="dsa", stamp="dsa"),
    _row("ascend", num_extra_steps=1),
    _row("dsv4", "NPU", variant="dsv4_npu", num_extra_steps=1),
    _row("dsv4", "ROCm", variant="dsv4_hip", num_extra_steps=1),
    _chain("dsv4", num_extra_steps=1, limit_error=DraftLimitError),
)


def draft_row(name: str | None, config: DraftConfig) -> DraftRow | None:
    """The row of a name for this config; None where the name cannot draft."""
    for row in ROWS:
        if row.name == name and all(CONDITIONS[condition](config) for condition in row.when):
            return draft_row(row.delegate, config) if row.delegate else row
    return None
