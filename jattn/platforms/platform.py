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
    cuda_version: tuple[int, int] = (0, 0)  # toolkit that a CUDA row stands for
    musa_arch: int = 0  # 10 * major + minor on MUSA, else 0

    @property
    def is_cpu(self) -> bool:
        return self.kind == "cpu"

    @property
    def is_cuda(self) -> bool:
        return self.kind == "cuda"

    @property
    def is_hip(self) -> bool:
        return self.kind == "rocm"

    @property
    def is_tpu(self) -> bool:
        return self.kind == "tpu"

    @property
    def is_npu(self) -> bool:
        return self.kind == "npu"

    @property
    def is_xpu(self) -> bool:
        return self.kind == "xpu"

    @property
    def is_musa(self) -> bool:
        return self.kind == "musa"

    @property
    def cpu_has_amx_support(self) -> bool:
        return self.is_cpu and self.has_amx

    @property
    def xpu_has_xmx_support(self) -> bool:
        return self.is_xpu and self.has_xmx

    @property
    def is_sm90(self) -> bool:
        """Hopper with CUDA 12.3 or newer."""
        return self._is_sm(9, cuda=(12, 3))

    @property
    def is_sm100(self) -> bool:
        return self._is_sm(10, cuda=(12, 8))

    @property
    def is_sm100_or_sm110(self) -> bool:
        return self._is_sm(10, 11, cuda=(0, 0))

    @property
    def is_sm120(self) -> bool:
        return self._is_sm(12, cuda=(12, 8))

    @property
    def is_blackwell(self) -> bool:
        """Compute capability 10, 11 or 12 with CUDA 12.8 or newer."""
        return self._is_sm(10, 11, 12, cuda=(12, 8))

    @property
    def is_gfx942(self) -> bool:
        return self.gfx == "gfx942"

    @property
    def is_gfx95(self) -> bool:
        return self.gfx is not None and self.gfx.startswith("gfx95")

    @property
    def get_device_sm(self) -> int:
        """10 * major + minor as the device reports it, also on ROCm (gfx942 is 94) and MUSA; 0 where there is none."""
        if self.gfx is not None:
            return 10 * int(self.gfx[3:-2]) + int(self.gfx[-2], 16)
        return self.sm or self.musa_arch

    def _is_sm(self, *majors: int, cuda: tuple[int, int]) -> bool:
        return self.is_cuda and self.sm // 10 in majors and self.cuda_version >= cuda
