"""What the TPU compiler schedules for each kernel: the steady-state loop, its units, and a lower bound of time.

Needs libtpu (extra `aot-tpu`), and no TPU. With tokamax's kernels beside ours:

    uv run --isolated --extra aot-tpu --with matplotlib --with rich --with tokamax==0.0.17 scripts/tpu_schedule.py

The bound is max(trips x bundles / clock, products / peak rate, bytes / bandwidth): nothing stalls, prologues and the
write of results are free, copies are hidden. It ranks kernels on the same work; it is not a measurement.
"""

import argparse
import datetime
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from tpu_dump import DUMP_ARGS, Loop, steady_loop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
_RESULTS = Path(__file__).resolve().parent / "results"
_MXU_ROWS = 16  # bfloat16 rows of one instruction that feeds a matrix unit


def main() -> int:
    """Compile each row for each generation in a process of its own, then write the table, the JSON and the plot."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--generations", default="v5e,v6e,v7x", help="names, comma between them")
    parser.add_argument("--only", default="", help="rows whose kernel or work contains this")
    parser.add_argument(
        "--out", type=Path, default=_RESULTS / "tpu_schedule", help="without suffix; rows are merged in"
    )
    parser.add_argument("--keep", type=Path, help="keep the compiler's dumps in this folder")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(_child(args.one, args.generations, args.keep)))
        return 0
    found, failed = [], 0
    for index, row in enumerate(_rows()):
        if args.only not in f"{row.kernel} {row.work.name}":
            continue
        if row.needs and importlib.util.find_spec(row.needs) is None:
            print(f"skipped {row.kernel}: {row.needs} is not installed")
            continue
        for generation in args.generations.split(","):
            result = _parent(index, generation, args.keep)
            if "skipped" in result:
                continue
            if "error" in result:
                failed += 1
                print(f"FAILED {row.kernel}, {row.work.name}, {generation}: {result['error']}", flush=True)
                continue
            found.append(result)
            print(_line(result), flush=True)
    if found:
        _save(args.out, found)
    print(f"{len(found)} schedules read, {failed} failed")
    return 1 if failed else 0


def _rows() -> list:
    import tpu_ours
    import tpu_peers

    return tpu_ours.rows() + tpu_peers.rows()


def _parent(index: int, generation: str, keep: Path | None) -> dict:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if keep is None else keep / f"{index}-{generation}"
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        command = [sys.executable, __file__, "--one", str(index), "--generations", generation, "--keep", str(folder)]
        env = os.environ | {"LIBTPU_INIT_ARGS": DUMP_ARGS.format(folder)}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        wanted = [line for line in lines if "Error" in line or "error" in line]
        return {"error": (wanted or lines or ["no output"])[-1][:300]}
    return json.loads(done.stdout.splitlines()[-1])


def _child(index: int, name: str, folder: Path) -> dict:
    from tpu_target import GENERATIONS, Compiler

    row, generation = _rows()[index], GENERATIONS[name]
    compiler = Compiler(generation)
    try:
        with compiler.described():
            call = row.call(generation)
    except NotImplementedError as error:
        return {"skipped": str(error)}
    compiler.compile(call.function, call.arrays, donate=call.donate)
    loop = steady_loop(folder, call.inside, call.copies)
    return _result(row, call, loop, generation)


def _result(row, call, loop: Loop, generation) -> dict:
    device = generation.device
    trips = call.trips / min(call.cores, device.cores)
    rate = generation.bf16_tflops * 1e12 / device.cores / (device.ghz * 1e9)  # FLOP a cycle and core
    size = 128 if generation.name in ("v4", "v5e", "v5p") else 256
    fed = loop.matmuls * _MXU_ROWS * 2 * size * size / rate  # cycles that the matrix units need at their peak
    times = {
        "bundles_us": trips * loop.bundles / device.ghz * 1e-3,
        "products_us": trips * fed / device.ghz * 1e-3,
        "hbm_us": (call.hbm_bytes or row.work.hbm_bytes) / device.hbm_gbps * 1e-3,
    }
    return dict(
        kernel=row.kernel,
        work=row.work.name,
        generation=generation.name,
        sizes=call.sizes,
        trips=call.trips,
        cores=min(call.cores, device.cores),
        bundles=loop.bundles,
        bundles_of_copies=loop.copies,
        bundles_with_skipped=loop.all_bundles,
        matmuls=loop.matmuls,
        shares={unit: round(share, 3) for unit, share in loop.shares.items()},
        limiting_unit=loop.limiting_unit,
        spills=loop.spills,
        vmem_bytes=loop.vmem_bytes,
        **{key: round(value, 2) for key, value in times.items()},
        bundles_over_hbm=round(times["bundles_us"] / times["hbm_us"], 3),
        bound_us=round(max(times.values()), 2),
        bound_by=max(times, key=lambda key: times[key]).removesuffix("_us"),
        versions={name: metadata.version(name) for name in ("jax", "libtpu", *filter(None, [row.needs]))},
        date=datetime.date.today().isoformat(),
    )


def _line(x: dict) -> str:
    return (
        f"{x['kernel']}, {x['work']}, {x['generation']}: {x['bundles']} bundles x {x['trips']:g} trips, busiest "
        f"{x['limiting_unit']} {max(v for u, v in x['shares'].items() if ':' not in u):.0%}, {x['spills']} spills, "
        f"VMEM {x['vmem_bytes'] / 2**20:.1f} MiB; bundles {x['bundles_us']:.0f} us, products "
        f"{x['products_us']:.0f} us, HBM {x['hbm_us']:.0f} us: bound {x['bound_us']:.0f} us by {x['bound_by']}"
    )


def _save(out: Path, found: list[dict]) -> None:
    # new rows replace those of the same kernel, work and generation
    path = out.with_suffix(".json")
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    key = lambda x: (x["work"], x["generation"], x["kernel"])  # noqa: E731
    rows = {key(x): x for x in old} | {key(x): x for x in found}
    ordered = [rows[k] for k in sorted(rows)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dict(bound=str(__doc__).split("\n\n")[-1].strip(), rows=ordered), indent=1) + "\n")
    if importlib.util.find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed")
        return
    import tpu_plot

    tpu_plot.plot(ordered, out.with_suffix(".png"))


if __name__ == "__main__":
    sys.exit(main())
