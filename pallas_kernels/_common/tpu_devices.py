"""What kernels need to know of a TPU generation: for one JAX device, which on v4 and v5p is two TensorCores.

Sources: memory and cores as `pltpu.get_tpu_info` gives them; rates from https://docs.cloud.google.com/tpu/docs. A v7x
chip is two devices of one core each. Clocks are not published: they are those at which the stated bfloat16 rate is what
the matrix units can do.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One JAX device."""

    name: str
    vmem_bytes: int  # of a core
    cores: int
    hbm_gbps: float
    ghz: float


DEVICES = {
    device.name: device
    for device in (
        Device(name="tpu-v4", vmem_bytes=16 << 20, cores=2, hbm_gbps=1228, ghz=1.05),
        Device(name="tpu-v5e", vmem_bytes=128 << 20, cores=1, hbm_gbps=819, ghz=1.5),
        Device(name="tpu-v5p", vmem_bytes=64 << 20, cores=2, hbm_gbps=2765, ghz=1.75),
        Device(name="tpu-v6e", vmem_bytes=128 << 20, cores=1, hbm_gbps=1640, ghz=1.75),
        Device(name="tpu-v7x", vmem_bytes=64 << 20, cores=1, hbm_gbps=3690, ghz=2.2),
    )
}
UNNAMED = Device(name="unnamed", vmem_bytes=16 << 20, cores=1, hbm_gbps=0, ghz=0)
"""What runs anywhere: the smallest memory, one core."""


def device_named(name: str | None) -> Device:
    """The row of a generation; None stands for any of them.

    Raises: ValueError with the names.
    """
    if name is None:
        return UNNAMED
    if name not in DEVICES:
        raise ValueError(f"device={name!r}: want one of {', '.join(DEVICES)}, or None for sizes that fit all of them")
    return DEVICES[name]
