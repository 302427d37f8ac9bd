"""Which platform row this process runs on: the only module that asks the device."""

import functools
from pathlib import Path

import jax

from jattn.platforms.platform import Platform
from jattn.platforms.table import PLATFORMS

_TPU_KINDS = {
    "TPU v4": "tpu-v4",
    "TPU v5 lite": "tpu-v5e",
    "TPU v5e": "tpu-v5e",
    "TPU v5": "tpu-v5p",
    "TPU v5p": "tpu-v5p",
    "TPU v6 lite": "tpu-v6e",
    "TPU v6e": "tpu-v6e",
    "TPU7x": "tpu-v7x",
    "TPU v7x": "tpu-v7x",
}
_SAME_NAME = ("npu", "xpu", "musa")


@functools.cache  # a process keeps its devices
def detect() -> Platform:
    """The row of `jax.devices()[0]`. An unknown CUDA capability takes the nearest lower row, as 8.9 takes cuda-sm80.

    Raises: ValueError for a device without a row; `platform_row` says which.
    """
    device = jax.devices()[0]
    return platform_row(
        device.platform,
        kind=device.device_kind,
        capability=str(getattr(device, "compute_capability", "")),
        is_rocm="rocm" in str(getattr(device.client, "platform_version", "")).lower(),
        has_amx=_has_amx(Path("/proc/cpuinfo")),
    )


def platform_row(
    platform: str, *, kind: str = "", capability: str = "", is_rocm: bool = False, has_amx: bool = False
) -> Platform:
    """The row for what a device says of itself.

    Args:
      platform: "cpu", "gpu" or "cuda" or "rocm", "tpu", or another plug-in's name.
      kind: the device's kind, as "TPU v6 lite" or "NVIDIA H200".
      capability: "9.0" on CUDA, "gfx942" on ROCm (features after a colon are ignored).
      is_rocm: whether a "gpu" runs on ROCm.
      has_amx: whether a "cpu" has matrix tiles.

    Raises: ValueError naming what was reported and the rows there are.

    >>> platform_row("gpu", kind="NVIDIA L4", capability="8.9").name
    'cuda-sm80'
    """
    if platform == "cpu":
        return PLATFORMS["cpu-amx" if has_amx else "cpu"]
    if platform == "rocm" or (platform == "gpu" and is_rocm):
        name = f"rocm-{capability.split(':')[0]}"
    elif platform in ("gpu", "cuda"):
        name = _cuda_name(capability)
    elif platform == "tpu":
        name = _TPU_KINDS.get(kind, "")
    else:
        name = platform if platform in _SAME_NAME else ""
    if name in PLATFORMS:
        return PLATFORMS[name]
    reported = ", ".join(filter(None, (platform, kind, capability)))
    raise ValueError(
        f"no platform row for the device ({reported}): choose the closest by name, one of {', '.join(PLATFORMS)}"
    )


def _cuda_name(capability: str) -> str:
    major, _, minor = capability.partition(".")
    if not (major.isdigit() and minor.isdigit()):
        return ""
    rows = [row for row in PLATFORMS.values() if row.is_cuda and row.sm <= 10 * int(major) + int(minor)]
    return max(rows, key=lambda row: row.sm).name if rows else ""


def _has_amx(cpuinfo: Path) -> bool:
    try:
        flags = next((line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")), "")
    except OSError:  # not Linux
        return False
    return {"amx_tile", "amx_bf16"} <= set(flags.split())
