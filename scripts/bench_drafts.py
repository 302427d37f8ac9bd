"""What drafts give and what they cost: accepted tokens a target step, and a round's time in draft, verify and accept.

    uv run --extra bench --extra demo python scripts/bench_drafts.py --mt-bench question.jsonl

By kind of draft, topk and num_steps; SmolLM2-135M, float32, greedy, batch 1. Rows of the target step are priced as
nearly free, so that drafts of a small chance are verified, too. Draft models are the model itself and its first 20
layers: what they accept is shown, not a gain, since neither is cheap. Each stage of a round is a program of its own,
run in turn on copies of one state in the middle of a text, with every node verified; medians count (an n-gram chain is
timed as a tree of one branch). An arm takes a minute or two and is written when it is done: --first begins later and
keeps those before. Also run by `bench_generate.py --drafts`. Writes scripts/results/drafts_cpu.json and .png.
"""

import argparse
import dataclasses
import json
import os
import platform
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
from bench_engine import GREEDY, engine_of
from flax import nnx

from jattn.combinators.budget import accept_chance
from jattn.combinators.costs import Variant
from jattn.combinators.drafter import LanguageModel
from jattn.combinators.model_drafts import Lineage, propose
from jattn.combinators.ngram import find_many, ngram_tree
from jattn.combinators.round import advance, to_the_front
from jattn.combinators.tree import link, prune_ranked, walk
from jattn.combinators.verify import verify_tree
from jattn.loaders.chat import render_chat
from jattn.models.load import first_layers
from jattn.serving.engine import Engine
from jattn.serving.loaded import LoadedModel, Options, load
from jattn.serving.request import Request

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (after the backend is chosen)

RESULTS = Path(__file__).parent / "results"
STAGES = ("draft", "verify", "accept")
WARM_ROUNDS = 8  # before a state is taken
PASSAGE = (
    "Order 4471: two lamps, blue, 18 euro each; one desk, oak, 240 euro; four chairs, beech, 65 euro each; one rug, "
    "grey, 90 euro. Delivery on Tuesday between nine and noon. Please ring the second bell."
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to draft."""

    kind: str  # "n-gram" | "itself" | "20 layers"
    topk: int
    num_steps: int
    num_nodes: int
    lineage: Lineage = "parent"

    @property
    def name(self) -> str:
        """As it is printed."""
        slot = ", lineage by slot" if self.lineage == "slot" else ""
        return f"{self.kind}, topk {self.topk}, steps {self.num_steps}, nodes {self.num_nodes}{slot}"


ARMS = (
    *(Arm(kind="n-gram", topk=topk, num_steps=s, num_nodes=n) for topk, s, n in ((1, 7, 8), (2, 7, 12), (4, 7, 16))),
    *(
        Arm(kind="itself", topk=topk, num_steps=steps, num_nodes=nodes)
        for topk, steps, nodes in ((1, 1, 2), (1, 3, 4), (1, 5, 6), (4, 3, 12), (4, 5, 16))
    ),
    Arm(kind="itself", topk=4, num_steps=5, num_nodes=16, lineage="slot"),
    Arm(kind="20 layers", topk=1, num_steps=3, num_nodes=4),
)


def main() -> None:
    """Run every arm, print the table, write JSON and a plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mt-bench", type=Path, help="MT-Bench question.jsonl; without it, one prompt that repeats")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens a prompt")
    parser.add_argument("--repeats", type=int, default=7, help="timed runs of each stage")
    parser.add_argument("--first", type=int, default=0, help="arm to begin with; those before it are kept")
    args = parser.parse_args()
    loaded = load(Options(dtype="float32"))
    run(loaded, mt_bench=args.mt_bench, tokens=args.tokens, repeats=args.repeats, first=args.first)


def run(loaded: LoadedModel, *, mt_bench: Path | None, tokens: int, repeats: int, first: int = 0) -> None:
    """Measure with a model that is loaded; arms before `first` are kept as an earlier run left them."""
    prompts = [f"Repeat the following text word for word:\n\n{PASSAGE}"]
    if mt_bench is not None:
        prompts += [json.loads(line)["turns"][0] for line in mt_bench.read_text(encoding="utf-8").splitlines()[:4]]
    texts = [render_chat(loaded.metadata, [{"role": "user", "content": prompt}]) for prompt in prompts]
    requests = [Request(prompt_ids=loaded.tokenizer.encode(text), max_new_tokens=tokens, stop_ids=()) for text in texts]
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / "drafts_cpu.json"
    rows = json.loads(file.read_text())["arms"][:first] if first else []
    report = {}
    for arm in ARMS[len(rows) :]:
        rows.append(_measure(loaded, arm, requests, repeats))
        print(json.dumps(rows[-1]), file=sys.stderr)
        report = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "versions": {"python": platform.python_version(), "jax": jax.__version__},
            "settings": {"prompts": len(prompts), "new_tokens": tokens, "dtype": "float32", "batch": 1},
            "arms": rows,
        }
        file.write_text(json.dumps(report, indent=1) + "\n")
    _plot(report)
    print("| draft | accepted tokens a step | drafts a step | draft, ms | verify, ms | accept, ms |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        ms = " | ".join(f"{row['ms'][stage]:.1f}" for stage in STAGES)
        print(f"| {row['name']} | {row['accepted']:.2f} | {row['drafted']:.1f} | {ms} |")


def _measure(loaded: LoadedModel, arm: Arm, requests: list[Request], repeats: int) -> dict:
    drafter = {
        "n-gram": lambda: None,
        "itself": lambda: loaded.model,
        "20 layers": lambda: first_layers(loaded.model, 20),
    }[arm.kind]()
    engine = engine_of(
        loaded,
        num_steps=arm.num_steps,
        topk=arm.topk,
        num_nodes=arm.num_nodes,
        kind="cuda",  # rows count as nearly free there, so every draft is verified
        drafter=drafter,
        lineage=arm.lineage,
    )
    sequences = []
    for request in requests:
        sequences.append(engine.submit(request))
        for _ in engine.run():
            pass
    rounds = sum(s.num_rounds for s in sequences)
    return {
        "name": arm.name,
        **dataclasses.asdict(arm),
        "repeats": repeats,
        "accepted": sum(s.num_round_tokens for s in sequences) / rounds,
        "drafted": sum(s.num_drafted for s in sequences) / rounds,
        "ms": _stages(engine, loaded.model, drafter, arm, requests[0], repeats),
    }


def _stages(engine: Engine, model, drafter, arm: Arm, request: Request, repeats: int) -> dict[str, float]:
    engine.submit(request)
    for at, _ in enumerate(engine.run()):
        if at == WARM_ROUNDS:
            break
    state = engine._state  # the text so far, with its cache
    graphdef, params = nnx.split((model,) if drafter is None else (model, drafter))
    shape = Variant(rows=arm.num_nodes, max_q_len=arm.num_nodes, cost=1.0)

    def with_models(stage):
        def call(params, state, *args):
            return stage(nnx.merge(graphdef, params), state, *args)

        return jax.jit(call, donate_argnums=1)

    def draft(models, state):
        if drafter is None:
            found = find_many(state.tokens, state.seq_lens + 1, topk=arm.topk, num_steps=arm.num_steps)
            chance = jax.vmap(accept_chance, in_axes=(None, 1), out_axes=1)(state.draft, found.match_len)
            tree = ngram_tree(found, state.newest, chance, num_nodes=arm.num_nodes).tree
        else:
            made, candidates, _ = propose(
                LanguageModel(models[1], models[1].config.vocab_size),
                state,
                topk=arm.topk,
                num_steps=arm.num_steps,
                lineage=arm.lineage,
            )
            state = dataclasses.replace(state, draft=made)
            tree, _ = prune_ranked(candidates, state.newest, num_nodes=arm.num_nodes)
        return state, tree, link(tree).bits

    def verify(models, state, tree, bits):
        cache, chosen, _ = verify_tree(
            models[0], state, tree, bits, rows=shape.rows, max_q_len=shape.max_q_len, sampler=GREEDY
        )
        return dataclasses.replace(state, cache=cache), chosen.tokens

    def accept(_, state, tree, targets):
        path, new, accepted = walk(tree, targets, max_depth=arm.num_steps)
        moved = dataclasses.replace(state, cache=to_the_front(state.cache, state, path, accepted))
        return advance(moved, new, accepted)[0]

    programs = dict(zip(STAGES, map(with_models, (draft, verify, accept)), strict=True))
    times: dict[str, list[float]] = {stage: [] for stage in STAGES}

    def timed(stage, *args):
        start = time.perf_counter()
        out = jax.block_until_ready(programs[stage](params, *args))
        times[stage].append(1e3 * (time.perf_counter() - start))
        return out

    for _ in range(repeats + 1):
        copied = jax.block_until_ready(jax.tree.map(jnp.copy, state))
        copied, tree, bits = timed("draft", copied)
        copied, targets = timed("verify", copied, tree, bits)
        timed("accept", copied, tree, targets)
    return {stage: statistics.median(ms[1:]) for stage, ms in times.items()}  # the first compiles


def _plot(report: dict) -> None:
    rows = report["arms"]
    names = [row["name"] for row in rows]
    figure, (left, right) = plt.subplots(
        ncols=2, figsize=(13, 0.45 * len(rows) + 1.6), sharey=True, layout="constrained"
    )
    left.bar_label(left.barh(names, [row["accepted"] for row in rows]), fmt="%.2f", padding=3)
    left.set_xlabel("accepted tokens a target step, bonus included")
    base = [0.0] * len(rows)
    for stage in STAGES:
        ms = [row["ms"][stage] for row in rows]
        right.barh(names, ms, left=base, label=stage)
        base = [a + b for a, b in zip(base, ms, strict=True)]
    right.set_xlabel("ms a round")
    right.legend()
    left.invert_yaxis()
    left.margins(x=0.12)
    figure.suptitle(f"SmolLM2-135M, float32, batch 1, {report['machine']}", fontsize=10)
    figure.savefig(RESULTS / "drafts_cpu.png", dpi=120)


if __name__ == "__main__":
    main()
