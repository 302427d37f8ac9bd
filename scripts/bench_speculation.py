"""What the draft head of SmolLM2-135M gives: tokens a target step on MT-Bench and HumanEval, and tokens a second.

    python scripts/bench_speculation.py accepted --mt-bench question.jsonl --human-eval HumanEval.jsonl.gz --dir work
    python scripts/bench_speculation.py speed --mt-bench question.jsonl --human-eval HumanEval.jsonl.gz

`accepted`: the model answers every prompt greedily (chat template, first 128 tokens; MT-Bench's first turns) and reads
its answers once; both are kept in work/. Rounds of chains and trees then run as they do in serving, with what the model
computed looked up instead of computed again: greedy decoding takes a draft where it is the model's own next token, so
only those rows of a tree matter that are on the known text. Every node is verified, none left out for its cost. With
--engine N the first N prompts of each file, in a drawn order, are served for real, without drafts, by chain and tree of
the head and by n-grams: the ids are compared, and where they differ the gap between the model's two best logits is
printed. With --arms 0 nothing is replayed.

`speed`: tokens a second at each batch of --batch (prefill included), without drafts, with n-grams and with the head as
`generate` runs it, each group of prompts by all in turn; and the parts of a round: catching up on the newest tokens
(extend), drafting, verifying, accepting, the host.

Writes scripts/results/speculation_cpu.json (another name with --to) and a plot beside it; an arm that is there is kept.
"""

import argparse
import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path

import jax
import matplotlib
import numpy as np
from bench_speculation_accepted import accepted
from bench_speculation_arms import ARMS
from bench_speculation_speed import WAYS, speed
from eval_prompts import read_eval

from jattn.loaders.chat import render_chat
from jattn.serving.loaded import DTYPES, LoadedModel, Options, load

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (after the backend is chosen)

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Run a stage, print its table, write JSON and a plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("accepted", "speed"))
    parser.add_argument("--mt-bench", type=Path, required=True, help="MT-Bench's question.jsonl")
    parser.add_argument("--human-eval", type=Path, required=True, help="HumanEval.jsonl, or .jsonl.gz")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of weights and cache")
    parser.add_argument("--prefer", nargs="*", default=[], help="kernel sets; float32 on a GPU wants xla")
    parser.add_argument("--dir", type=Path, help="accepted: where answers and features are kept")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens a prompt")
    parser.add_argument("--arms", type=int, default=len(ARMS), help="accepted: how many of the arms, the first ones")
    parser.add_argument("--every", type=int, default=1, help="accepted: every n-th prompt by length only")
    parser.add_argument(
        "--engine", type=int, default=0, metavar="N", help="accepted: prompts of each file that are served"
    )
    parser.add_argument("--slots", type=int, default=8, help="accepted, --engine: requests that run together")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8], help="speed: requests that run together")
    parser.add_argument("--prompts", type=int, default=8, help="speed: prompts, half of each file, drawn")
    parser.add_argument("--repeats", type=int, default=3, help="speed: runs over all prompts")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS), help="speed: what is compared")
    parser.add_argument("--parts", type=int, default=2, help="speed: how many of the two arms' rounds are taken apart")
    parser.add_argument("--to", type=Path, default=RESULTS / "speculation_cpu.json")
    args = parser.parse_args()
    loaded = load(Options(dtype=args.dtype, draft="eagle", prefer=tuple(args.prefer)))
    files = {"MT-Bench": read_eval(args.mt_bench), "HumanEval": read_eval(args.human_eval)}
    prompts = {name: [_asked(loaded, text) for text in texts] for name, texts in files.items()}
    report = json.loads(args.to.read_text()) if args.to.exists() else {}
    report |= {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": f"{jax.devices()[0].device_kind}, {platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "settings": report.get("settings", {})
        | {
            "dtype": args.dtype,
            "greedy": True,
            "new_tokens": args.tokens,
            "prompts": {n: len(p) for n, p in prompts.items()},
        },
    }
    keep = lambda: args.to.write_text(json.dumps(report, indent=1) + "\n")  # noqa: E731
    {"accepted": accepted, "speed": speed}[args.stage](args, loaded, prompts, report, keep)
    keep()
    _plot(report, args.to.with_suffix(".png"))


def _asked(loaded: LoadedModel, text: str) -> list[int]:
    return loaded.tokenizer.encode(render_chat(loaded.metadata, [{"role": "user", "content": text}]))


def _plot(report: dict, path: Path) -> None:
    rows = list(report.get("accepted", {}).values())
    speeds = {name: row for name, row in report.get("speed", {}).items() if name.startswith("batch")}
    panels = [panel for panel, has in ((_plot_accepted, rows), (_plot_speeds, speeds)) if has]
    if not panels:
        return
    figure, axes = plt.subplots(ncols=len(panels), figsize=(5.5 * len(panels), 4), layout="constrained", squeeze=False)
    for panel, ax in zip(panels, axes[0], strict=True):
        panel(ax, rows if panel is _plot_accepted else speeds)
    figure.suptitle(f"SmolLM2-135M, {report['settings']['dtype']}, greedy, {report['device']}", fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _plot_accepted(ax, rows) -> None:
    for topk in sorted({row["topk"] for row in rows} - {0}):
        points = sorted((row["num_steps"], row["all"]) for row in rows if row["topk"] == topk)
        ax.plot(*zip(*points, strict=True), marker="o", label="chain" if topk == 1 else f"topk {topk}, up to 16 nodes")
    for row in rows:
        if row["topk"] == 0:
            ax.axhline(row["all"], color="grey", linestyle=":", label=f"n-gram, up to {row['num_steps']}")
    ax.set(xlabel="draft steps", ylabel="tokens a target step, bonus included", title="MT-Bench and HumanEval")
    ax.legend(fontsize=8)


def _plot_speeds(ax, speeds) -> None:
    for at, (name, ways) in enumerate(speeds.items()):
        places = np.arange(len(ways)) + at * 0.8 / len(speeds)
        bars = ax.bar(places, [way["tokens a second"] for way in ways.values()], 0.8 / len(speeds), label=name)
        ax.bar_label(bars, [f"{way.get('over none', 1.0):.2f}x" for way in ways.values()], fontsize=8)
        ax.set_xticks(np.arange(len(ways)) + 0.2, list(ways), fontsize=8)
    ax.set(ylabel="tokens a second", title="end to end")
    ax.legend(fontsize=8)


if __name__ == "__main__":
    main()
