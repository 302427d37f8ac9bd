"""Time of a round by what it drafts, over one without drafts: the tables of `jattn.combinators.draft_shapes`.

    python scripts/bench_draft_shapes.py --batch 1 4 16

One engine a batch, SmolLM2-135M with the head that comes with the package, has a program for each shape. Requests are
in the middle of their texts; shapes take turns in bursts of rounds, so that a drift of the machine hits all alike, and
the lower quartile counts, since other processes only add. Writes jattn/combinators/round_costs/KIND.json, KIND being
the platform's, "cpu" or "cuda": batches that are there already and not asked for are kept. Without a table a kind has
`accelerator.json`, an estimate.
"""

import argparse
import dataclasses
import json
import os
import platform
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
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
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--burst", type=int, default=2, help="rounds of a shape in one go")
    parser.add_argument("--dtype", help="of the weights (default: the platform's)")
    parser.add_argument("--to", type=Path, help="where the table goes, if not to the package")
    args = parser.parse_args()
    loaded = load(Options(draft="eagle", dtype=args.dtype))
    path = args.to or TABLES / f"{loaded.platform.kind}.json"
    held = json.loads(path.read_text()) if path.exists() else {}
    ms: dict[str, dict[str, float]] = held.get("ms", {})
    for batch in args.batch:
        ms[str(batch)] = _measured(loaded, batch, args.turns, args.burst)
        plain = ms[str(batch)][str(NO_DRAFTS)]
        for name, took in ms[str(batch)].items():
            print(f"batch {batch}, {name}: {took:.2f} ms, {took / plain:.2f}", flush=True)
        path.write_text(json.dumps(_table(loaded, ms), indent=1) + "\n")


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


def _measured(loaded: LoadedModel, batch: int, turns: int, burst: int) -> dict[str, float]:
    shapes = (NO_DRAFTS, *ACCEPTED)
    engine = engine_of(
        loaded,
        num_slots=batch,
        page_size=16,
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
    # from here on the programs run without the engine, over pages that belong to each slot for all its context
    pages = jax.numpy.arange(batch * 64, dtype=jax.numpy.int32).reshape(batch, 64)
    state = dataclasses.replace(engine._settled(), page_table=pages)
    start, report = jax.tree.map(lambda x: x.copy(), (state.seq_lens, state.status)), engine._held
    times: dict[str, list[float]] = {str(shape): [] for shape in shapes}
    for _ in range(turns):
        # each turn begins at the same length
        state = dataclasses.replace(state, **_again(state, *start))
        for shape, program in zip(shapes, engine.programs.rounds, strict=True):
            begun = time.perf_counter()
            for _ in range(burst):
                state, report = program(engine._weights, state, report)
            jax.block_until_ready((state, report))
            times[str(shape)].append(1e3 * (time.perf_counter() - begun) / burst)
    return {name: round(statistics.quantiles(every[1:], n=4)[0], 3) for name, every in times.items()}


def _again(state, seq_lens, status) -> dict[str, Any]:
    draft = dataclasses.replace(state.draft, cached=seq_lens - 1, missed=0 * seq_lens, features=state.draft.features)
    return dict(seq_lens=seq_lens + 0, status=status + 0, draft=draft)


if __name__ == "__main__":
    main()
