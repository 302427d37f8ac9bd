"""Time the Hopper attention kernels on a GPU, against the card's two roofs and JAX's own alternatives.

    python3 scripts/bench_attention.py --families decode,tree --out rows.jsonl --plot attention.png --peers

Rows are JSON lines {family, peer, shape, dtype, ms, tflops, gbps, pct_of_roof, max_rel_err, ...}:

  ms           sum of the kernels' own times read through CUPTI over many calls, divided; from 0.3 ms on, wall time of
               calls that are enqueued together, divided. Both are kept (ms_cupti, ms_wall). The schedule, which depends
               on lengths alone and is made once a step for all layers, is timed apart (ms_schedule).
  tflops, gbps useful operations, and the fewest bytes, over ms
  pct_of_roof  100 * max(operations / matmul roof, bytes / copy roof) / ms, roofs measured in the same run
  max_rel_err  worst |out - ref| / |ref| over checked rows, ref in float64 from the same inputs

Inputs are random normals. Calls rotate over enough input sets to leave the L2; a figure is the median of --runs, which
take turns with those of the peers. With `--jobs N`, N processes compile side by side and take turns on the card.
With them, and with torch's peers (`--torch`, `--fa3 PATH`), run with XLA_PYTHON_CLIENT_PREALLOCATE=false; all are read
by the same timer.
"""

import argparse
import dataclasses
import json
import math
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import bench_attention_mla as mla
import bench_attention_prefill as prefill
import jax
from bench_attention_mla import Latent
from bench_attention_peers import PEERS, ours
from bench_attention_portable import portable
from bench_attention_prefill import Prefill
from bench_attention_report import plot, table
from bench_attention_shapes import FAMILIES, Shape, data, default_config, max_rel_err
from bench_attention_timer import TURNS, Timer, roofs

from pallas_kernels.attention.mosaic_gpu_sm90_config import Config


def bench(
    shape: Shape | Prefill | Latent, calls: dict[str, tuple[Callable, Any, str]], timer: Timer, roof: dict, others=None
) -> list[dict]:
    """Rows of one shape. calls: name -> (attend, schedule or None, configuration as text).

    others: by (shape, input sets, plan), another framework's: name -> (call, sets, finish, to JAX or None, note).
    """
    sets, plan, seen = data(shape) if isinstance(shape, Shape) else shape.data()
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (sets[0], plan))

    def build(item):
        attend, schedule, _ = item[1]
        try:
            planned = made = None
            if schedule is not None:
                planned = jax.jit(schedule).lower(structs[1]).compile()
                made = jax.eval_shape(schedule, structs[1])
            return jax.jit(attend).lower(*structs[0], structs[1], made).compile(), planned
        except Exception as error:  # a peer that cannot run a shape costs its row, not the run
            return error

    with ThreadPoolExecutor(8) as pool:
        compiled = dict(zip(calls, pool.map(build, calls.items()), strict=True))
    with TURNS.taken():
        return _timed(shape, calls, compiled, (sets, plan, seen), timer, roof, others)


def _timed(shape, calls: dict, compiled: dict, inputs: tuple, timer: Timer, roof: dict, others) -> list[dict]:
    sets, plan, seen = inputs
    rows, timed = {}, {}
    for name, (*_, text) in calls.items():
        rows[name] = dict(family=shape.family, peer=name, shape=shape.label, dtype=shape.kv, config=text)
        try:
            if isinstance(compiled[name], Exception):
                raise compiled[name]
            call, schedule = compiled[name]
            made = None
            if schedule is not None:
                made = schedule(plan)
                rows[name]["ms_schedule"] = timer(schedule, [(plan,)])["ms_cupti"]
            every = [(*one, plan, made) for one in sets]
            rows[name]["max_rel_err"] = _error(shape, call(*every[0])[0], sets[0], plan, seen)
            timed[name] = (call, every, jax.block_until_ready)
        except Exception as problem:
            rows[name]["error"] = _short(problem)
    for name, (call, every, finish, to_jax, note) in (others(shape, sets, plan) if others else {}).items():
        rows[name] = dict(family=shape.family, peer=name, shape=shape.label, dtype=shape.kv, config=note)
        try:
            error = math.nan if to_jax is None else _error(shape, to_jax(call(*every[0])), sets[0], plan, seen)
            rows[name]["max_rel_err"] = error
            timed[name] = (call, every, finish)
        except Exception as problem:
            rows[name]["error"] = _short(problem)
    for name, found in timer.compare(timed).items():
        rows[name] |= dict(error=_short(found)) if isinstance(found, Exception) else _rates(shape, found, roof)
    return list(rows.values())


def _error(shape: Shape | Prefill | Latent, out, one, plan, seen) -> float:
    if isinstance(shape, Shape):
        return max_rel_err(shape, out, one, plan, seen)
    return shape.max_rel_err(out, one, plan, seen)


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"


def _rates(shape: Shape | Prefill | Latent, found: dict, roof: dict) -> dict:
    ms = found["ms"]
    bound = max(shape.flops / roof["tflops"] / 1e9, shape.nbytes / roof["copy_gbps"] / 1e6)
    rates = dict(tflops=shape.flops / ms / 1e9, gbps=shape.nbytes / ms / 1e6, pct_of_roof=100 * bound / ms)
    return found | rates


def main() -> None:
    """Measure, print rows as they come, then the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--families", default=",".join(_EVERY))
    parser.add_argument("--only", default="", help="shapes whose label contains this")
    parser.add_argument("--peers", action="store_true", help="JAX's own alternatives too")
    parser.add_argument("--portable", action="store_true", help="the portable GPU set, too")
    parser.add_argument(
        "--torch", action="store_true", help="cuDNN through torch's SDPA too; give JAX no memory up front"
    )
    parser.add_argument("--fa3", help="FlashAttention-3 too: path of a library with vLLM's torch binding of it")
    parser.add_argument("--flashmla", help="FlashMLA too, for mla_decode: path of a library with vLLM's binding of it")
    parser.add_argument(
        "--variant", action="append", default=[], help="changes to the default sizes, as stages=4,splits=False"
    )
    parser.add_argument("--in-order", action="store_true", help="pages in the order of the requests, not anywhere")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--budget-s", type=float, default=1e9)
    parser.add_argument("--out", help="JSON lines")
    parser.add_argument("--plot", help="PNG")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--job", help=argparse.SUPPRESS)  # I/N:FILE of turns, of one of several processes
    parser.add_argument("--roof", help=argparse.SUPPRESS)  # JSON
    args = parser.parse_args()
    warnings.simplefilter("ignore", DeprecationWarning)
    job, jobs = 0, 1
    if args.job:
        numbers, TURNS.path = args.job.split(":", 1)
        job, jobs = map(int, numbers.split("/"))
    start, timer = time.time(), Timer(args.runs)
    roof = json.loads(args.roof) if args.roof else roofs(timer)
    rows: list[dict] = []
    sink = open(args.out, "a" if args.job else "w") if args.out else None

    def say(row: dict) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        if sink and (args.jobs == 1 or row["family"] == "roof"):  # else the process that made it has written it
            sink.write(json.dumps(row) + "\n")
            sink.flush()

    if not args.job:
        device, date = jax.devices()[0].device_kind, time.strftime("%Y-%m-%d")
        say(dict(family="roof", **roof, jax=jax.__version__, device=device, date=date))
    if args.jobs > 1:
        for row in _in_processes(args.jobs, roof):
            say(row)
    else:
        others, every = _others(args), _shapes(args)
        for shape in every[job::jobs]:
            if time.time() - start > args.budget_s:
                continue
            calls = _ours(shape, args.variant)
            if args.peers:
                calls |= _peers(shape)
            if args.portable:
                calls["jattn_gpu"] = (portable(shape), None, "the portable set")
            for row in bench(shape, calls, timer, roof, others):
                say(row)
    if not args.job:
        print(table(rows[1:]))
        if args.plot:
            plot(rows[1:], args.plot)


def _shapes(args) -> list:
    every = [shape for family in args.families.split(",") for shape in _EVERY[family]() if args.only in shape.label]
    if args.in_order:
        every = [dataclasses.replace(shape, ordered=True) if isinstance(shape, Shape) else shape for shape in every]
    return every


def _in_processes(jobs: int, roof: dict) -> Iterator[dict]:
    # rows of processes with this one's arguments and a part of the shapes each
    given = [x for x in sys.argv[1:] if not x.startswith("--jobs=")]
    if "--jobs" in given:
        del given[(at := given.index("--jobs")) : at + 2]
    with tempfile.NamedTemporaryFile() as turns:
        started = [
            subprocess.Popen(
                [sys.executable, sys.argv[0], *given, "--job", f"{i}/{jobs}:{turns.name}", "--roof", json.dumps(roof)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for i in range(jobs)
        ]
        for process in started:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
            process.wait()


_EVERY: dict[str, Callable[[], list]] = FAMILIES | prefill.FAMILIES | mla.FAMILIES


def _others(args) -> Callable | None:
    # what gives torch's peers of a shape, if any are asked for
    if not (args.torch or args.fa3 or args.flashmla):
        return None
    import bench_attention_torch

    def calls(shape, sets, plan):
        if isinstance(shape, Latent):
            return mla.torch_calls(shape, sets, plan, fa3=args.fa3, flashmla=args.flashmla)
        if isinstance(shape, Prefill) or not (args.torch or args.fa3):
            return {}
        return bench_attention_torch.calls(shape, sets, plan, fa3=args.fa3, cudnn=args.torch)

    return calls


def _ours(shape: Shape | Prefill | Latent, variants: list[str]) -> dict[str, Any]:
    base: Any = default_config(shape) if isinstance(shape, Shape) else shape.default_config()
    make: Any = mla.ours if isinstance(shape, Latent) else prefill.ours if isinstance(shape, Prefill) else ours
    calls: dict[str, Any] = {"jattn": (*make(shape, base), str(base))}
    for text in variants:
        config = changed(base, text)
        if config is not None and config != base:
            calls[f"jattn {text}"] = (*make(shape, config), str(config))
    return calls


def _peers(shape: Shape | Prefill | Latent) -> dict[str, Any]:
    calls: dict[str, Any] = {}
    if isinstance(shape, Shape):
        for name, (families, make, note) in PEERS.items():
            if shape.family in families.split():
                calls[name] = (make(shape), None, note)
        return calls
    peers: Any = mla.PEERS if isinstance(shape, Latent) else prefill.PEERS
    for name, (fits, make, note) in peers.items():
        if fits(shape):
            try:
                calls[name] = (make(shape), None, note)
            except ImportError:
                print(f"{name} is not installed")
    return calls


def changed[C: (Config, prefill.Config, mla.Config)](base: C, text: str) -> C | None:
    """Sizes with some of them set, as "stages=4,splits=False"; None where that means nothing."""
    changes = {}
    for part in text.split(","):
        name, value = part.split("=")
        kind = {field.name: field.type for field in dataclasses.fields(base)}.get(name)
        if kind is None:
            return None
        changes[name] = value == "True" if kind in (bool, "bool") else int(value)
    if "parts" in changes and not changes.get("splits", getattr(base, "splits", False)):
        return None
    try:
        return dataclasses.replace(base, **changes)
    except ValueError:
        return None


if __name__ == "__main__":
    main()
