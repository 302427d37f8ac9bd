"""Time the Hopper attention kernels on a GPU, against the card's two roofs and JAX's own alternatives.

    python3 scripts/bench_attention.py --families decode,tree --out rows.jsonl --plot attention.png --peers

Rows are JSON lines {family, peer, shape, dtype, ms, tflops, gbps, pct_of_roof, max_rel_err, ...}:

  ms           sum of the kernels' own times read through CUPTI over many calls, divided; from 0.3 ms on, wall time of
               calls that are enqueued together, divided. Both are kept (ms_cupti, ms_wall). The schedule, which depends
               on lengths alone and is made once a step for all layers, is timed apart (ms_schedule).
  tflops, gbps useful operations, and the fewest bytes, over ms
  pct_of_roof  100 * max(operations / matmul roof, bytes / copy roof) / ms, roofs measured in the same run
  max_rel_err  worst |out - ref| / |ref| over checked rows, ref in float64 from the same inputs

Inputs are random normals. Calls rotate over enough input sets to leave the L2; a figure is the median of --runs.
"""

import argparse
import dataclasses
import json
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
from bench_attention_peers import PEERS, ours
from bench_attention_report import plot, table
from bench_attention_shapes import FAMILIES, Shape, data, default_config, max_rel_err
from bench_attention_timer import Timer, roofs

from pallas_kernels.attention.mosaic_gpu_sm90_config import Config


def bench(shape: Shape, calls: dict[str, tuple[Callable, Any, str]], timer: Timer, roof: dict) -> list[dict]:
    """Rows of one shape. calls: name -> (attend, schedule or None, configuration as text)."""
    sets, plan, seen = data(shape)
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (sets[0], plan))

    def build(item):
        attend, schedule, _ = item[1]
        try:
            made = None if schedule is None else jax.eval_shape(schedule, structs[1])
            return jax.jit(attend).lower(*structs[0], structs[1], made).compile()
        except Exception as error:  # a peer that cannot run a shape costs its row, not the run
            return f"{type(error).__name__}: {str(error)[:200]}"

    with ThreadPoolExecutor(8) as pool:
        compiled = list(pool.map(build, calls.items()))
    rows = []
    for (name, (_, schedule, text)), call in zip(calls.items(), compiled, strict=True):
        row: dict[str, Any] = dict(family=shape.family, peer=name, shape=shape.label, dtype=shape.kv, config=text)
        if isinstance(call, str):
            rows.append(row | dict(error=call))
            continue
        try:
            made = None
            if schedule is not None:
                jitted = jax.jit(schedule)
                made = jitted(plan)
                row["ms_schedule"] = timer(jitted, [(plan,)])["ms_cupti"]
            every = [(*one, plan, made) for one in sets]
            error = max_rel_err(shape, call(*every[0])[0], sets[0], plan, seen)
            row |= timer(call, every)
        except Exception as problem:
            rows.append(row | dict(error=f"{type(problem).__name__}: {str(problem)[:200]}"))
            continue
        bound = max(shape.flops / roof["tflops"] / 1e9, shape.nbytes / roof["copy_gbps"] / 1e6)
        row |= dict(
            tflops=shape.flops / row["ms"] / 1e9,
            gbps=shape.nbytes / row["ms"] / 1e6,
            pct_of_roof=100 * bound / row["ms"],
            max_rel_err=error,
        )
        rows.append(row)
    return rows


def main() -> None:
    """Measure, print rows as they come, then the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--only", default="", help="shapes whose label contains this")
    parser.add_argument("--peers", action="store_true", help="JAX's own alternatives too")
    parser.add_argument(
        "--variant", action="append", default=[], help="changes to the default sizes, as stages=4,splits=False"
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--budget-s", type=float, default=1e9)
    parser.add_argument("--out", help="JSON lines")
    parser.add_argument("--plot", help="PNG")
    args = parser.parse_args()
    warnings.simplefilter("ignore", DeprecationWarning)
    start, timer = time.time(), Timer(args.runs)
    roof = roofs(timer)
    device = jax.devices()[0]
    versions = dict(jax=jax.__version__, device=device.device_kind, date=time.strftime("%Y-%m-%d"))
    rows: list[dict] = [dict(family="roof", **roof, **versions)]
    print(json.dumps(rows[0]), flush=True)
    sink = open(args.out, "w") if args.out else None
    if sink:
        sink.write(json.dumps(rows[0]) + "\n")
    for shape in (shape for family in args.families.split(",") for shape in FAMILIES[family]()):
        if args.only not in shape.label or time.time() - start > args.budget_s:
            continue
        base = default_config(shape)
        calls: dict[str, Any] = {"jattn": (*ours(shape, base), str(base))}
        for text in args.variant:
            config = changed(base, text)
            if config is not None and config != base:
                calls[f"jattn {text}"] = (*ours(shape, config), str(config))
        if args.peers:
            for name, (families, make, note) in PEERS.items():
                if shape.family in families.split():
                    calls[name] = (make(shape), None, note)
        for row in bench(shape, calls, timer, roof):
            rows.append(row)
            print(json.dumps(row), flush=True)
            if sink:
                sink.write(json.dumps(row) + "\n")
                sink.flush()
    print(table(rows[1:]))
    if args.plot:
        plot(rows[1:], args.plot)


def changed(base: Config, text: str) -> Config | None:
    """Sizes with some of them set, as "stages=4,splits=False"; None where that means nothing."""
    changes = {}
    for part in text.split(","):
        name, value = part.split("=")
        kind = {field.name: field.type for field in dataclasses.fields(Config)}[name]
        changes[name] = value == "True" if kind in (bool, "bool") else int(value)
    if "parts" in changes and not changes.get("splits", base.splits):
        return None
    try:
        return dataclasses.replace(base, **changes)
    except ValueError:
        return None


if __name__ == "__main__":
    main()
