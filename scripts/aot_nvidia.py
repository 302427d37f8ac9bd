"""NVIDIA GPUs that are not here, for the compile checks. Import this before jax.

Descriptions are XLA's `GpuTargetConfigProto` in text form.
"""

import os
import sysconfig

# Read when jax is imported: no look-up of cuDNN, and no device but the described ones.
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["PATH"] = f"{sysconfig.get_paths()['purelib']}/nvidia/cu13/bin:{os.environ['PATH']}"  # ptxas

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_DEVICE = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: {cores}
  fpus_per_core: 128 shared_memory_per_block: 49152 shared_memory_per_core: {core_memory}
  shared_memory_per_block_optin: {memory} block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 150000000000
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{kind}"
"""
GPUS = {  # multiprocessors, bytes of shared memory for a program, compute capability, device kind
    "sm80": (108, 166912, (8, 0), "NVIDIA A100-SXM4-80GB"),
    "sm89": (58, 101376, (8, 9), "NVIDIA L4"),
    "sm90": (132, 232448, (9, 0), "NVIDIA H200"),
    "sm100": (148, 232448, (10, 0), "NVIDIA B200"),
    "sm120": (188, 101376, (12, 0), "NVIDIA RTX PRO 6000 Blackwell Server Edition"),
}


def mesh_of(name: str) -> Mesh:
    """A mesh of one GPU of `GPUS`."""
    cores, memory, (major, minor), kind = GPUS[name]
    sizes = dict(cores=cores, memory=memory, core_memory=memory + 1024, major=major, minor=minor)
    text = _DEVICE.format(**sizes, kind=kind)
    found = topologies.get_topology_desc(platform="cuda", topology_name=name, topology="1x1x1", target_config=text)
    return Mesh(np.array(found.devices[:1]), ("x",))


def compile_for(mesh: Mesh, case) -> None:
    """Compile a case's call for a mesh."""
    function, arrays = case.build()
    sharding = NamedSharding(mesh, PartitionSpec())
    structs = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), arrays)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # Triton's lowering asks it for the device's kind
        jax.jit(function).trace(structs).lower(lowering_platforms=("cuda",)).compile()
