"""The record of one device kind. Rows are in `table.py`; only `detect.py` asks which device this is."""

import dataclasses
import enum
from collections.abc import Mapping


class Evidence(enum.StrEnum):
    """How much is known about a kernel on a platform, strongest first."""

    MEASURED = "measured"  # ran on the device: right and timed
    COMPILED = "compiled"  # compiled ahead of time for the device
    LOWERED = "lowered"  # lowered for the platform, not compiled
    DECLARED = "declared"  # a row that names the plan; there is no code yet


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """One device kind: what it is (spec H), what it can hold and move, and which kernels serve it.

    Units: `hbm_gbps` in GB/s, `bf16_tflops` in TFLOP/s (dense), memories in bytes; None where the vendor states none.
    """

    name: str
    kind: str  # "cpu" | "cuda" | "rocm" | "tpu" | "npu" | "xpu" | "musa"
    sm: int = 0  # 10 * major + minor on CUDA, else 0
    gfx: str | None = None  # ROCm architecture
    has_amx: bool = False
    has_xmx: bool = False
    num_cores: int | None = None  # SMs, CUs or TensorCores
    shared_memory_bytes: int | None = None  # a block may use, after opting in
    vmem_bytes: int | None = None  # a TensorCore
    hbm_gbps: float | None = None
    bf16_tflops: float | None = None
    kernel_sets: tuple[str, ...] = ("xla",)  # in order of preference
    evidence: Mapping[str, Evidence] = dataclasses.field(default_factory=dict, hash=False)  # "set/op" -> level
    default_policy: str = "native"
