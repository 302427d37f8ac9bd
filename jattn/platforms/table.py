"""The platforms, a row each. Figures are for one chip, from the vendors' data sheets; None where none was found.

TPU memory sizes are those that JAX plans with (`pltpu.get_tpu_info`); a v7x chip shows as two devices, so that a device
has half of its bandwidth and rate. A CUDA row stands for its architecture and carries the figures of one card:
A100 80 GB, H200, B200, RTX PRO 6000; ROCm: MI300X, MI355X.
"""

from jattn.platforms.lookup import named
from jattn.platforms.platform import Evidence, Platform

_OPS = ("attend", "write_kv", "merge_states")
_MLA_OPS = ("attend_latent", "write_latent", "gather_latent")  # of the sets `tpu` and `xla`


def _evidence(**levels: Evidence) -> dict[str, Evidence]:
    ops = {kernel_set: _OPS + _MLA_OPS if kernel_set in ("tpu", "xla") else _OPS for kernel_set in levels}
    return {f"{kernel_set}/{op}": level for kernel_set, level in levels.items() for op in ops[kernel_set]}


_DECLARED, _LOWERED = Evidence.DECLARED, Evidence.LOWERED
_CPU = _evidence(xla=Evidence.MEASURED)
_CPU_AMX = _evidence(xla=_LOWERED)
_PORTABLE = ("gpu/attend", "gpu/merge_states", "gpu/attend_latent")
_ROCM = _evidence(xla=_LOWERED) | dict.fromkeys((*_PORTABLE, "gpu/write_kv"), _LOWERED)
_GPU = _ROCM | dict.fromkeys(_PORTABLE, Evidence.COMPILED)
_HOPPER = _GPU | {
    "gpu/attend": Evidence.MEASURED,
    "hopper/attend": Evidence.MEASURED,
    "hopper/write_kv": Evidence.MEASURED,
    "hopper/merge_states": Evidence.MEASURED,
    "hopper/attend_latent": Evidence.MEASURED,
    "hopper/attend_latent/packed": Evidence.COMPILED,
}
_TPU = _evidence(tpu=Evidence.COMPILED, xla=_LOWERED)
_OTHER = _evidence(xla=_DECLARED)
_CUDA = (13, 0)
_KIB, _MIB = 1 << 10, 1 << 20

_ROWS = (
    Platform(name="cpu", kind="cpu", evidence=_CPU),
    Platform(name="cpu-amx", kind="cpu", has_amx=True, evidence=_CPU_AMX),
    Platform(
        name="cuda-sm80",
        kind="cuda",
        sm=80,
        cuda_version=_CUDA,
        num_cores=108,
        shared_memory_bytes=163 * _KIB,
        hbm_gbps=2039,
        bf16_tflops=312,
        kernel_sets=("gpu", "xla"),
        evidence=_GPU,
    ),
    Platform(
        name="cuda-sm90",
        kind="cuda",
        sm=90,
        cuda_version=_CUDA,
        num_cores=132,
        shared_memory_bytes=227 * _KIB,
        hbm_gbps=4800,
        bf16_tflops=989,
        kernel_sets=("hopper", "gpu", "xla"),
        evidence=_HOPPER,
    ),
    Platform(
        name="cuda-sm100",
        kind="cuda",
        sm=100,
        cuda_version=_CUDA,
        num_cores=148,
        shared_memory_bytes=227 * _KIB,
        hbm_gbps=8000,
        bf16_tflops=2250,
        kernel_sets=("gpu", "xla"),
        evidence=_GPU,
    ),
    Platform(
        name="cuda-sm120",
        kind="cuda",
        sm=120,
        cuda_version=_CUDA,
        num_cores=188,
        shared_memory_bytes=99 * _KIB,
        hbm_gbps=1792,
        kernel_sets=("gpu", "xla"),
        evidence=_GPU,
    ),
    Platform(
        name="rocm-gfx942",
        kind="rocm",
        gfx="gfx942",
        num_cores=304,
        shared_memory_bytes=64 * _KIB,
        hbm_gbps=5300,
        bf16_tflops=1307,
        kernel_sets=("gpu", "xla"),
        evidence=_ROCM,
    ),
    Platform(
        name="rocm-gfx950",
        kind="rocm",
        gfx="gfx950",
        num_cores=256,
        shared_memory_bytes=160 * _KIB,
        hbm_gbps=8000,
        bf16_tflops=2517,
        kernel_sets=("gpu", "xla"),
        evidence=_ROCM,
    ),
    Platform(
        name="tpu-v4",
        kind="tpu",
        num_cores=2,
        vmem_bytes=16 * _MIB,
        hbm_gbps=1228,
        bf16_tflops=275,
        kernel_sets=("tpu", "xla"),
        evidence=_TPU,
    ),
    Platform(
        name="tpu-v5e",
        kind="tpu",
        num_cores=1,
        vmem_bytes=128 * _MIB,
        hbm_gbps=819,
        bf16_tflops=197,
        kernel_sets=("tpu", "xla"),
        evidence=_TPU,
    ),
    Platform(
        name="tpu-v5p",
        kind="tpu",
        num_cores=2,
        vmem_bytes=64 * _MIB,
        hbm_gbps=2765,
        bf16_tflops=459,
        kernel_sets=("tpu", "xla"),
        evidence=_TPU,
    ),
    Platform(
        name="tpu-v6e",
        kind="tpu",
        num_cores=1,
        vmem_bytes=128 * _MIB,
        hbm_gbps=1640,
        bf16_tflops=918,
        kernel_sets=("tpu", "xla"),
        evidence=_TPU,
    ),
    Platform(
        name="tpu-v7x",
        kind="tpu",
        num_cores=2,
        vmem_bytes=64 * _MIB,
        hbm_gbps=7380,
        bf16_tflops=2307,
        kernel_sets=("tpu", "xla"),
        evidence=_TPU,
    ),
    Platform(name="npu", kind="npu", evidence=_OTHER),
    Platform(name="xpu", kind="xpu", has_xmx=True, evidence=_OTHER),
    Platform(name="musa", kind="musa", musa_arch=31, evidence=_OTHER),
)
PLATFORMS: dict[str, Platform] = {row.name: row for row in _ROWS}


def platform_named(name: str) -> Platform:
    """The row called `name`.

    Raises: ValueError with the name and every platform, the most similar first.

    >>> platform_named("cuda-sm90").kernel_sets
    ('hopper', 'gpu', 'xla')
    """
    return named(PLATFORMS, name, what="platform")
