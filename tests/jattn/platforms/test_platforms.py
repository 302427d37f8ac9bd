"""Platform rows: predicates typed out by row, evidence, look-up by name and by what a device reports."""

import jax
import pytest

from jattn.kernel_sets import KERNELS
from jattn.platforms import PLATFORMS, Evidence, detect, platform_named
from jattn.platforms.detect import _has_amx, platform_row

NAMES = (
    "cpu cpu-amx cuda-sm80 cuda-sm90 cuda-sm100 cuda-sm120 rocm-gfx942 rocm-gfx950 "
    "tpu-v4 tpu-v5e tpu-v5p tpu-v6e tpu-v7x npu xpu musa"
).split()

# predicate -> the rows where it holds
HOLDS = {
    "is_cpu": "cpu cpu-amx",
    "is_cuda": "cuda-sm80 cuda-sm90 cuda-sm100 cuda-sm120",
    "is_hip": "rocm-gfx942 rocm-gfx950",
    "is_tpu": "tpu-v4 tpu-v5e tpu-v5p tpu-v6e tpu-v7x",
    "is_npu": "npu",
    "is_xpu": "xpu",
    "is_musa": "musa",
    "cpu_has_amx_support": "cpu-amx",
    "xpu_has_xmx_support": "xpu",
    "is_sm90": "cuda-sm90",
    "is_sm100": "cuda-sm100",
    "is_sm100_or_sm110": "cuda-sm100",
    "is_sm120": "cuda-sm120",
    "is_blackwell": "cuda-sm100 cuda-sm120",
    "is_gfx942": "rocm-gfx942",
    "is_gfx95": "rocm-gfx950",
}


def test_rows_and_their_names():
    assert list(PLATFORMS) == NAMES
    assert all(row.name == name for name, row in PLATFORMS.items())
    assert len(set(map(hash, PLATFORMS.values()))) == len(NAMES)


@pytest.mark.parametrize("predicate", HOLDS)
def test_predicate_holds_where_the_table_says(predicate):
    assert [name for name, row in PLATFORMS.items() if getattr(row, predicate)] == HOLDS[predicate].split()


def test_device_sm_follows_the_capability():
    got = {name: row.get_device_sm for name, row in PLATFORMS.items() if row.get_device_sm}
    assert got == {
        "cuda-sm80": 80,
        "cuda-sm90": 90,
        "cuda-sm100": 100,
        "cuda-sm120": 120,
        "rocm-gfx942": 94,
        "rocm-gfx950": 95,
        "musa": 31,
    }


def test_kernel_sets_are_tried_in_this_order():
    for name, row in PLATFORMS.items():
        want = ("xla",)
        if name == "cuda-sm90":
            want = ("hopper", "gpu", "xla")
        elif row.is_cuda or row.is_hip:
            want = ("gpu", "xla")
        elif row.is_tpu:
            want = ("tpu", "xla")
        assert row.kernel_sets == want


def test_every_kernel_of_a_row_has_evidence_and_nothing_else_does():
    for row in PLATFORMS.values():
        assert set(row.evidence) == {kernel.name for kernel in KERNELS if kernel.set in row.kernel_sets}
    assert set(PLATFORMS["cpu"].evidence.values()) == {Evidence.MEASURED}
    assert set(PLATFORMS["cpu-amx"].evidence.values()) == {Evidence.LOWERED}
    assert PLATFORMS["cuda-sm90"].evidence["hopper/merge_states"] is Evidence.MEASURED
    assert PLATFORMS["cuda-sm90"].evidence["hopper/attend"] is Evidence.MEASURED
    assert PLATFORMS["cuda-sm100"].evidence["gpu/attend"] is Evidence.COMPILED
    assert PLATFORMS["rocm-gfx942"].evidence["gpu/attend"] is Evidence.LOWERED
    assert PLATFORMS["tpu-v6e"].evidence["xla/attend"] is Evidence.LOWERED
    assert PLATFORMS["npu"].evidence["xla/attend"] is Evidence.DECLARED


def test_limits_are_positive_where_known():
    for row in PLATFORMS.values():
        for limit in ("num_cores", "shared_memory_bytes", "vmem_bytes", "hbm_gbps", "bf16_tflops"):
            assert getattr(row, limit) is None or getattr(row, limit) > 0
    assert PLATFORMS["cuda-sm90"].shared_memory_bytes == 232448
    assert PLATFORMS["tpu-v5p"].vmem_bytes == 64 * 2**20


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        (dict(platform="cpu"), "cpu"),
        (dict(platform="cpu", has_amx=True), "cpu-amx"),
        (dict(platform="gpu", kind="NVIDIA H200", capability="9.0"), "cuda-sm90"),
        (dict(platform="cuda", kind="NVIDIA A100", capability="8.0"), "cuda-sm80"),
        (dict(platform="gpu", kind="NVIDIA L4", capability="8.9"), "cuda-sm80"),
        (dict(platform="gpu", kind="NVIDIA B300", capability="10.3"), "cuda-sm100"),
        (dict(platform="gpu", kind="NVIDIA Thor", capability="11.0"), "cuda-sm100"),
        (dict(platform="gpu", kind="NVIDIA GB10", capability="12.1"), "cuda-sm120"),
        (dict(platform="rocm", capability="gfx942:sramecc+:xnack-"), "rocm-gfx942"),
        (dict(platform="gpu", capability="gfx950", is_rocm=True), "rocm-gfx950"),
        (dict(platform="tpu", kind="TPU v4"), "tpu-v4"),
        (dict(platform="tpu", kind="TPU v5 lite"), "tpu-v5e"),
        (dict(platform="tpu", kind="TPU v5"), "tpu-v5p"),
        (dict(platform="tpu", kind="TPU v6 lite"), "tpu-v6e"),
        (dict(platform="tpu", kind="TPU7x"), "tpu-v7x"),
        (dict(platform="xpu"), "xpu"),
    ],
)
def test_a_reported_device_finds_its_row(reported, name):
    assert platform_row(**reported).name == name


@pytest.mark.parametrize(
    "reported",
    [
        dict(platform="gpu", kind="NVIDIA T4", capability="7.5"),
        dict(platform="gpu", kind="a GPU", capability=""),
        dict(platform="gpu", capability="gfx90a", is_rocm=True),
        dict(platform="tpu", kind="TPU v3"),
        dict(platform="METAL", kind="M4"),
    ],
)
def test_a_device_without_a_row_is_refused_with_what_it_said(reported):
    with pytest.raises(ValueError, match=f"no platform row for the device .{reported['platform']}.*one of cpu,"):
        platform_row(**reported)


def test_detect_asks_this_device():
    assert detect() is PLATFORMS[detect().name]
    assert detect().is_cpu == (jax.devices()[0].platform == "cpu")


def test_amx_is_read_from_the_flags(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    assert not _has_amx(cpuinfo)
    cpuinfo.write_text("processor : 0\nflags\t\t: fpu avx512f\n")
    assert not _has_amx(cpuinfo)
    cpuinfo.write_text("processor : 0\nflags\t\t: fpu amx_bf16 amx_tile amx_int8\n")
    assert _has_amx(cpuinfo)


def test_an_unknown_name_lists_the_names_closest_first():
    assert platform_named("tpu-v6e") is PLATFORMS["tpu-v6e"]
    with pytest.raises(ValueError) as error:
        platform_named("cuda-sm9")
    assert str(error.value).startswith("unknown platform 'cuda-sm9': want one of cuda-sm90, ")
    assert all(name in str(error.value) for name in NAMES)
