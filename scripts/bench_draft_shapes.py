"""Time of a round by what it drafts, over one without drafts: the tables of `jattn.combinators.draft_shapes`.

    python scripts/bench_draft_shapes.py --batch 1 4 16

One engine a batch, SmolLM2-135M with the head that comes with the package, has a program for each shape. Requests are
in the middle of their texts; shapes take turns in bursts of rounds, so that a drift of the machine hits all alike, and
the lower quartile counts, since other processes only add. Writes jattn/combinators/round_costs/KIND.json, KIND being
the platform's, "cpu" or "cuda": batches that are there already and not asked for are kept. Without a table a kind has
`accelerator.json`, an estimate. With --turns FILE several of these scripts, a batch each, compile side by side and take
turns at measuring and writing.
"""

import argparse
import dataclasses
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
from bench_attention_timer import TURNS
from bench_engine import engine_of

import jattn.combinators.draft_shapes
from jattn.combinators.draft_shapes import ACCEPTED, NO_DRAFTS, DraftShape
from jattn.loaders.chat import render_chat
from jattn.serving.loaded import LoadedModel, Options, load
from jattn.serving.request import Request

TABLES = Path(jattn.combinators.draft_shapes.__file__).parent / "round_costs"
TOPICS = ("a lighthouse", "the history of bread", "sorting a list in Python", "how rain forms")


def main() -> None:
    """Measure each batch, print its row, write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--repeats", type=int, default=15, help="bursts of each shape")
    parser.add_argument("--burst", type=int, default=2, help="rounds of a shape in one go")
    parser.add_argument("--dtype", help="of the weights (default: the platform's)")
    parser.add_argument("--to", type=Path, help="where the table goes, if not to the package")
    parser.add_argument("--turns", help="a file that processes side by side lock while they measure")
    args = parser.parse_args()
    TURNS.path = args.turns
    loaded = load(Options(draft="eagle", dtype=args.dtype))
    path = args.to or TABLES / f"{loaded.platform.kind}.json"
    for batch in args.batch:
        run = _prepared(loaded, batch)
        with TURNS.taken():
            took = run(args.repeats, args.burst)
            ms = json.loads(path.read_text())["ms"] if path.exists() else {}
            ms[str(batch)] = took
            path.write_text(json.dumps(_table(loaded, ms), indent=1) + "\n")
        for name, each in took.items():
            print(f"batch {batch}, {name}: {each:.2f} ms, {each / took[str(NO_DRAFTS)]:.2f}", flush=True)


def _table(loaded: LoadedModel, ms: dict[str, dict[str, float]]) -> dict[str, Any]:
    batches = sorted(map(int, ms))

    def over_plain(shape: DraftShape) -> list[float]:
        return [round(ms[str(batch)][str(shape)] / ms[str(batch)][str(NO_DRAFTS)], 3) for batch in batches]

    return {
        "evidence": "measured",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": f"{jax.devices()[0].device_kind}, {platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "model": f"smollm2-135m-instruct, {loaded.model.embed.dtype}, greedy",
        "load average": round(os.getloadavg()[0], 1),
        "batches": batches,
        "rows": [dataclasses.asdict(shape) | {"over_plain": over_plain(shape)} for shape in ACCEPTED],
        "ms": {str(batch): ms[str(batch)] for batch in batches},
    }


def _prepared(loaded: LoadedModel, batch: int) -> Callable[[int, int], dict[str, float]]:
    # compiled, and in the middle of texts -> what measures so many bursts of so many rounds, ms a round
    shapes = (NO_DRAFTS, *ACCEPTED)
    engine = engine_of(
        loaded,
        num_slots=batch,
        num_steps=0,
        kind=loaded.platform.kind,
        drafter=loaded.drafter,
        draft_shapes=shapes,
        kv_dtype=loaded.model.embed.dtype,
    )
    for at in range(batch):
        text = f"Write a long story about {TOPICS[at % len(TOPICS)]}, part {at}."
        ids = loaded.tokenizer.encode(render_chat(loaded.metadata, [{"role": "user", "content": text}]))
        engine.submit(Request(prompt_ids=ids, max_new_tokens=1024 - len(ids), stop_ids=()))
    deltas = engine.run()
    for _ in range(2 * batch):
        next(deltas)

    def measured(turns: int, burst: int) -> dict[str, float]:
        # the programs run without the engine, over pages that belong to each slot for all its context
        each = 1024 // loaded.page_size
        pages = jax.numpy.arange(batch * each, dtype=jax.numpy.int32).reshape(batch, each)
        state = dataclasses.replace(engine._settled(), page_table=pages)
        start, report = jax.tree.map(lambda x: x.copy(), (state.seq_lens, state.status)), engine._held
        times: dict[str, list[float]] = {str(shape): [] for shape in shapes}
        for _ in range(turns):
            # each turn begins at the same length
            state = dataclasses.replace(state, **_again(state, *start))
            for shape, program in zip(shapes, engine.programs.rounds, strict=True):
                jax.block_until_ready(state)
                begun = time.perf_counter()
                for _ in range(burst):
                    state, report = program(engine._weights, state, report)
                jax.block_until_ready((state, report))
                times[str(shape)].append(1e3 * (time.perf_counter() - begun) / burst)
        return {name: round(statistics.quantiles(every[1:], n=4)[0], 3) for name, every in times.items()}

    return measured


def _again(state, seq_lens, status) -> dict[str, Any]:
    draft = dataclasses.replace(state.draft, cached=seq_lens - 1, missed=0 * seq_lens, features=state.draft.features)
    return dict(seq_lens=seq_lens + 0, status=status + 0, draft=draft)


if __name__ == "__main__":
    main()
