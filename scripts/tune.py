"""Measure sizes of the Hopper attention beside those of the heuristic, and keep those that are faster.

    python3 scripts/tune.py --families decode,tree --only B1

Each shape of `bench_attention.py` is run with its heuristic's sizes and with some that differ in one thing. Where the
fastest takes under 98 % of the heuristic's time (medians of --runs), it becomes a row of
`pallas_kernels/attention/tuned/h200.json`, with both times; a row of a shape that is measured again is replaced.
"""

import argparse
import dataclasses
import json
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
from bench_attention import bench
from bench_attention_peers import ours
from bench_attention_shapes import FAMILIES, Shape, facts
from bench_attention_timer import Timer, roofs

from pallas_kernels.attention.mosaic_gpu_sm90_config import Config, heuristic

FILE = Path(__file__).resolve().parents[1] / "pallas_kernels" / "attention" / "tuned" / "h200.json"
_BETTER = 0.98  # of the heuristic's time: less is noise


def candidates(shape: Shape, base: Config) -> list[Config]:
    """Sizes that differ from `base` in one thing."""
    changes: list[dict] = [dict(stages=base.stages + step) for step in (-1, 1) if base.stages + step > 0]
    whole = dict(splits=False, parts=0)
    if base.splits:
        changes += [dict(parts=2 * base.parts), dict(parts=max(base.parts // 2, 1)), whole]
    elif base.cluster == 1:
        changes += [dict(splits=True, parts=parts) for parts in (shape.batch * 2, shape.batch * 4)]
    if base.sharers > 1:
        changes.append(dict(sharers=1, parts=2 * base.parts))
    if base.groups == 1 and shape.page >= 8 and shape.kv == "bf16":
        changes.append(dict(copier=not base.copier))
    if shape.batch == 1 and base.groups == 1:
        changes += [whole | dict(cluster=cluster) for cluster in (4, 8, 16) if cluster != base.cluster]
    return [dataclasses.replace(base, **change) for change in changes]


def main() -> None:
    """Measure, and write the file."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--only", default="", help="shapes whose label contains this")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--budget-s", type=float, default=1e9, help="start no shape after so many seconds")
    parser.add_argument("--out", default=str(FILE))
    args = parser.parse_args()
    warnings.simplefilter("ignore", DeprecationWarning)
    start, timer = time.time(), Timer(args.runs)
    roof = roofs(timer)
    kept = {json.dumps(row["facts"]): row for row in json.loads(FILE.read_text())["rows"]}
    for shape in (shape for family in args.families.split(",") for shape in FAMILIES[family]()):
        if args.only not in shape.label or time.time() - start > args.budget_s:
            continue
        base = heuristic(**facts(shape))
        configs = {str(config): config for config in (base, *candidates(shape, base))}
        rows = bench(shape, {text: (*ours(shape, config), text) for text, config in configs.items()}, timer, roof)
        times = {row["config"]: row["ms"] for row in rows if row.get("max_rel_err", 1) < 1e-2}
        for text, ms in times.items():
            print(f"{shape.label:36} {ms:9.4f}  {text}", flush=True)
        best = min(times, key=lambda text: times[text])
        kept.pop(json.dumps(facts(shape)), None)
        if times[best] < _BETTER * times[str(base)]:
            kept[json.dumps(facts(shape))] = dict(
                facts=facts(shape),
                config=dataclasses.asdict(configs[best]),
                ms=round(times[best], 5),
                heuristic_ms=round(times[str(base)], 5),
            )
    device = jax.devices()[0].device_kind
    found = dict(device=device, jax=jax.__version__, date=time.strftime("%Y-%m-%d"), rows=list(kept.values()))
    Path(args.out).write_text(json.dumps(found, indent=1) + "\n")
    print(f"{len(kept)} shapes are faster with other sizes than the heuristic's: {args.out}")


if __name__ == "__main__":
    main()
