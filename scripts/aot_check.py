"""Compile every kernel for devices that are not here, at the shapes of real models, and report what compilers say.

cuda (Hopper's kernels) and gpu (the portable set): need the CUDA plug-in and NVIDIA's compiler wheels at the plug-in's
own jax version (extra `aot-cuda`), and no GPU; cuda reports registers and spills, gpu lowers for ROCm too. tpu: needs
libtpu (extra `aot-tpu`), and no TPU; reports memory.

    uv run --isolated --extra aot-cuda scripts/aot_check.py --platform cuda --summary
    uv run --isolated --extra aot-tpu scripts/aot_check.py --platform tpu --summary

The last line counts kernels, configurations and failures; the exit code is 1 if any fails to compile, or a GPU kernel
spills a register.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> int:
    """Compile all, print a line each (or failures alone), and the count."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--platform", choices=("cuda", "gpu", "tpu"), default="cuda")
    parser.add_argument("--summary", action="store_true", help="print failures, spills and the last line only")
    parser.add_argument("--only", default="", help="kernels whose name or case contains this")
    parser.add_argument("--generations", default="", help="TPUs or GPUs, comma between them; all by default")
    parser.add_argument(
        "--subset", type=int, default=1, metavar="N", help="TPU, gpu: every Nth case, another N each generation"
    )
    args = parser.parse_args()
    if args.platform == "cuda":
        import aot_cuda as aot

        targets = aot.targets()
    elif args.platform == "gpu":
        import aot_gpu as aot

        targets = aot.targets(args.generations)
    else:
        import aot_tpu as aot

        targets = aot.targets(args.generations)
    cases = [(name, case) for name, make in aot.KERNELS.items() for case in make() if args.only in f"{name} {case}"]
    failed = spilling = 0
    for at, target in enumerate(targets):
        # each generation takes other cases of a subset, so that together they take more of them
        for name, case in cases[at % args.subset :: args.subset]:
            start = time.time()
            try:
                report, spills = target.compile(case)
            except Exception as error:  # a compile error of any kind is what this looks for
                failed += 1
                said = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
                print(f"FAILED {name} {case} on {target.name}: {said}", flush=True)
                continue
            spilling += spills
            if spills or not args.summary:
                mark = "SPILLS " if spills else ""
                print(f"{mark}{name} {case} on {target.name} {time.time() - start:.1f} s: {report}", flush=True)
    kernels = len({name for name, _ in cases})
    if args.platform == "cuda":
        print(f"{kernels} kernels × {len(cases)} configs compiled, {failed} failed, {spilling} spilling")
    else:
        print(
            f"{kernels} kernels × {len(cases)} configs compiled for {len(targets)} generations, {failed} failed"
            + (f" (each generation 1 in {args.subset})" if args.subset > 1 else "")
        )
    return 1 if failed or spilling else 0


if __name__ == "__main__":
    sys.exit(main())
