"""The reader of the TPU compiler's dump, on a dump small enough to count by hand."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import tpu_dump  # pyright: ignore[reportMissingImports]

# Bundle 1 begins the outer loop, 2 the inner one. From 3 on, seven bundles are skipped at times; 10 makes products.
BUNDLES = """\
= control target key start
LH: loop header
= control target key end

     0   :  { %s0 = smov 0 } /* Start region 1 */
   0x1 LB: > { %s1 = smov 0 } /* Start region 2 */
   0x2 LB: >> { %s2 = smov 0 } /* Start region 3 */
   0x3   : >> { %4 = sbr.rel (%p1) target = $region4 }
   0x4   : >> { %5 = vst [vmem:[%s2]] %v1 }
   0x5   : >> { %6 = vst [vmem:[%s2]] %v1 /* a comment
with a line break */ }
   0x6   : >> { %7 = nop }
   0x7   : >> { %8 = nop }
   0x8   : >> { %9 = nop }
   0x9   :  { %10 = nop }
   0xa PF: >> { %11 = vmatmul.mubr.bf16.gmra.mxu0 %v1 ;;  %12 = vmatmul.mubr.bf16.gmra.mxu1 %v2 } /* Start region 4 */
   0xb   : >> { %13 = sbr.rel (!%p2) target = $region3 }
   0xc   : >> { %14 = nop }
   0xd   : >> { %15 = nop }
   0xe   : >> { %16 = nop }
   0xf   : >> { %17 = nop }
  0x10   : > { %18 = sbr.rel (!%p3) target = $region2 }
  0x11   : > { %19 = nop }
"""
USE = "== CAPACTIY:\nMXU, VALU, VSTORE, VSTORE:SPILL\n 2 4 2 2\n== UTILIZATION:\n" + "".join(
    f"{2 * (i == 10)} {3 * (i == 10)} {int(i in (4, 5))} {int(i == 5)}\n" for i in range(18)
)
LLO = "#allocation2 [shape = 'u32[144,128]', space=vmem, size = 0x12000, scoped]\n#allocation3 [space=smem, size = 0x4]"


@pytest.fixture
def dump(tmp_path):
    for number, (kind, text) in enumerate(
        {"original": LLO, "final_hlo-static-per-bundle-utilization": USE, "final_bundles": BUNDLES}.items()
    ):
        (tmp_path / f"17-attention.1-{number:02}-{kind}.txt").write_text(text)
    (tmp_path / "17-TLP-99-final_bundles.txt").write_text(BUNDLES)
    return tmp_path


def test_the_steady_loop_is_the_innermost_and_skips_what_it_may(dump):
    loop = tpu_dump.steady_loop(dump, "attention")
    # 2 and 3, the four bundles that run after a branch, then 10 to 15
    assert (loop.kernel, loop.bundles, loop.all_bundles, loop.matmuls) == ("attention.1", 12, 14, 2)
    assert loop.used == {"MXU": 2, "VALU": 3, "VSTORE": 2, "VSTORE:SPILL": 1}
    assert loop.spills == 1 and loop.vmem_bytes == 0x12000
    assert loop.limiting_unit == "MXU" and loop.shares["MXU"] == pytest.approx(2 / 24)


def test_the_path_that_starts_the_copies_counts(dump):
    text = BUNDLES.replace("%9 = nop", "%9 = dma.hbm_to_vmem %s1")  # in code that is skipped at times
    (dump / "17-attention.1-02-final_bundles.txt").write_text(text)
    assert tpu_dump.steady_loop(dump, "attention").bundles == 12
    assert tpu_dump.steady_loop(dump, "attention", copies=1).bundles == 14
    with pytest.raises(ValueError, match="starts 1 copies of 2"):
        tpu_dump.steady_loop(dump, "attention", copies=2)


def test_a_copy_more_than_a_trip_starts_is_no_reason_for_a_detour(dump):
    # two copies in code that always runs, one more in code that is skipped at times
    text = BUNDLES.replace("%9 = nop", "%9 = dma.hbm_to_vmem %s1")
    text = text.replace("%14 = nop", "%14 = dma.hbm_to_vmem %s1").replace("%15 = nop", "%15 = dma.hbm_to_vmem %s1")
    (dump / "17-attention.1-02-final_bundles.txt").write_text(text)
    assert [tpu_dump.steady_loop(dump, "attention", copies=n).bundles for n in (1, 2, 3)] == [12, 12, 14]


def test_a_loop_that_starts_copies_runs_until_all_are_started(dump):
    # the inner loop makes no product here, and starts a copy each time: bundles 2 to 15 but for two
    text = BUNDLES.replace("vmatmul", "vmul").replace("%17 = nop", "%17 = dma.hbm_to_vmem %s1")
    text = text.replace("%18 = sbr", "%20 = vmatmul %v1 ;; %18 = sbr")
    (dump / "17-attention.1-02-final_bundles.txt").write_text(text)
    once = tpu_dump.steady_loop(dump, "attention", copies=1)
    assert tpu_dump.steady_loop(dump, "attention", copies=3).bundles == once.bundles + 2 * 14


def test_code_for_one_case_excludes_the_other(dump):
    # bundle 8 runs when %p1 is false, bundle 16 when it is true: a product in either, never two
    text = BUNDLES.replace("%13 = sbr.rel (!%p2) target = $region3", "%13 = sbr.rel (!%p1) target = $region5")
    text = text.replace("vmatmul", "vmul").replace("%9 = nop", "%9 = vmatmul %v1")
    more = [f"  {hex(16 + i)}   : >> {{ %{20 + i} = {'nop' if i else 'vmatmul %v1'} }}" for i in range(4)]
    more.append("  0x14 PF: >> { %30 = nop } /* Start region 5 */")
    more.append("  0x15   : >> { %31 = sbr.rel (!%p2) target = $region3 }")
    lines: list[str] = [*text.splitlines()]
    at = next(i for i, line in enumerate(lines) if "0x10 " in line)
    lines[at:at] = more
    (dump / "17-attention.1-02-final_bundles.txt").write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match="24 bundles but 18 rows"):
        tpu_dump.steady_loop(dump, "attention")
    path = dump / "17-attention.1-01-final_hlo-static-per-bundle-utilization.txt"
    path.write_text(USE + "0 0 0 0\n" * 6)
    assert tpu_dump.steady_loop(dump, "attention").matmuls == 1


def test_a_dump_without_the_kernel_says_what_it_has(dump):
    with pytest.raises(ValueError, match=r"attention\.1"):
        tpu_dump.steady_loop(dump, "another")
