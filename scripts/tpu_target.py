"""Compile for a TPU that is not here: libtpu (extra `aot-tpu`) needs a name of the topology, and no device."""

import contextlib
import dataclasses
import os
from collections.abc import Callable

# Read when jax and libtpu are loaded: no device but the described one, and no search for a metadata server.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # nobody owns a device, so nobody needs the lock
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels._common.tpu_devices import Device, device_named


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One TPU generation, as its device: a v4 or v5p chip is one device of two cores, a 7x chip two devices of one.

    Its clock is the peak rate over the multiplications of the matrix units in a cycle: 4 of 128 x 128 a core up to v5p,
    then 2 of 256 x 256 that take two bfloat16 rows a cycle.
    """

    name: str
    topology: str
    kind: str  # as JAX reports it
    bf16_tflops: float  # of a device

    @property
    def device(self) -> Device:
        """What the kernels know of it."""
        return device_named(f"tpu-{self.name}")


GENERATIONS = {
    row.name: row
    for row in (
        Generation(name="v4", topology="v4:2x2x1", kind="TPU v4", bf16_tflops=275),
        Generation(name="v5e", topology="v5e:2x2", kind="TPU v5 lite", bf16_tflops=197),
        Generation(name="v5p", topology="v5p:2x2x1", kind="TPU v5", bf16_tflops=459),
        Generation(name="v6e", topology="v6e:2x2", kind="TPU v6 lite", bf16_tflops=918),
        Generation(name="v7x", topology="tpu7x:2x2x1", kind="TPU7x", bf16_tflops=1153),
    )
}


class Compiler:
    """Compiles for one device of a generation."""

    def __init__(self, generation: Generation):
        topology = topologies.get_topology_desc(platform="tpu", topology_name=generation.topology)
        device = topology.devices[0]
        if device.device_kind != generation.kind:
            raise ValueError(f"topology {generation.topology} is of {device.device_kind}: want {generation.kind}")
        self._sharding = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())
        described = AbstractDevice(device_kind=generation.kind, num_cores=generation.device.cores, platform="tpu")
        self._mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=described)

    def described(self) -> contextlib.AbstractContextManager:
        """Within it `pltpu.get_tpu_info()` answers for this generation."""
        return jax.sharding.use_abstract_mesh(self._mesh)

    def compile(self, function: Callable, arrays, *, donate: tuple[int, ...] = ()) -> jax.stages.Compiled:
        """`function(arrays)`, compiled. Args: arrays: a pytree of shapes. donate: argument numbers, as in `jax.jit`."""
        args = arrays if isinstance(arrays, tuple) else (arrays,)
        jitted = jax.jit(function, in_shardings=self._sharding, out_shardings=self._sharding, donate_argnums=donate)
        with self.described():
            traced = jitted.trace(*args)
            lowered = traced.lower(lowering_platforms=("tpu",))
        return lowered.compile()
