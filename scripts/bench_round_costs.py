"""Time of a target step by number of rows: where the cost table of `jattn.combinators.costs` comes from.

    uv run --extra bench --extra demo python scripts/bench_round_costs.py

Each step is the verification program of a round (`combinators.verify`, greedy, logits of every row included) over
requests of CONTEXT cached tokens, at most 16 rows a request. Sizes take turns, so that a drift of the machine hits all
alike; medians count. Writes scripts/results/round_costs_cpu.json and prints the rows of the table.
"""

import argparse
import dataclasses
import functools
import json
import os
import platform
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.cache import PagedKV
from jattn.combinators.state import DecodeState, Status
from jattn.combinators.verify import verify
from jattn.sampling import SamplerConfig
from jattn.serving.loaded import Options, load

RESULT = Path(__file__).parent / "results" / "round_costs_cpu.json"
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
STEPS = 15
CONTEXT = 256


def main() -> None:
    """Measure every size, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="timed steps of each size")
    args = parser.parse_args()
    loaded = load(Options(dtype="float32"))
    graphdef, params = nnx.split(loaded.model)
    runs = {}
    for rows in ROWS:
        state, seqs = _state(loaded, rows)
        take = jnp.full((seqs,), rows // seqs - 1, jnp.int32)
        step = jax.jit(functools.partial(_step, graphdef, rows=rows, max_q_len=min(rows, STEPS + 1)), donate_argnums=1)
        runs[rows] = [step, state, take, []]
    for turn in range(args.repeats + 1):
        for run in runs.values():
            step, state, take, times = run
            start = time.perf_counter()
            run[1], tokens = step(params, state, take)
            tokens.block_until_ready()
            if turn:  # the first compiles
                times.append(1e3 * (time.perf_counter() - start))
    medians = {rows: statistics.median(run[3]) for rows, run in runs.items()}
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "settings": {"model": "smollm2-135m-instruct", "dtype": "float32", "context": CONTEXT, "repeats": args.repeats},
        "ms": medians,
        "quartiles_ms": {rows: statistics.quantiles(run[3], n=4) for rows, run in runs.items()},
        "over_one_row": {rows: round(ms / medians[1], 2) for rows, ms in medians.items()},
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(report, indent=1) + "\n")
    print("| rows | ms | over one row |\n|---|---|---|")
    for rows, ms in medians.items():
        print(f"| {rows} | {ms:.1f} | {report['over_one_row'][rows]} |")


def _state(loaded, rows: int) -> tuple[DecodeState, int]:
    # requests in the middle of decoding, each with CONTEXT cached tokens and pages of its own
    seqs = -(-rows // (STEPS + 1))
    max_context = CONTEXT + STEPS + 1
    pages = -(-max_context // loaded.page_size)
    config = loaded.config
    cache = PagedKV.create(
        loaded.model.spec, num_layers=config.num_layers, num_pages=seqs * pages, page_size=loaded.page_size
    )
    state = DecodeState.create(cache, num_seqs=seqs, max_context=max_context, max_stops=1, num_classes=1)
    return dataclasses.replace(
        state,
        page_table=jnp.arange(seqs * pages, dtype=jnp.int32).reshape(seqs, pages),
        seq_lens=jnp.full((seqs,), CONTEXT, jnp.int32),
        status=jnp.full((seqs,), int(Status.DECODE), jnp.int32),
    ), seqs


def _step(graphdef, params, state: DecodeState, take, *, rows: int, max_q_len: int):
    drafts = jnp.zeros((take.shape[0], STEPS), jnp.int32)
    model = nnx.merge(graphdef, params)
    cache, chosen = verify(
        model, state, drafts, take, rows=rows, max_q_len=max_q_len, sampler=SamplerConfig(random=False)
    )
    return dataclasses.replace(state, cache=cache), chosen.tokens


if __name__ == "__main__":
    main()
