"""Expanded against absorbed latent attention over fresh tokens and prefix, and what each policy picks.

    uv run --extra bench python scripts/bench_mla_forms.py

One layer at DeepSeek-V2-Lite's widths (16 heads, latent 512, key 128 + 64, value 128), float32, one request. The forms
take turns at each point, so that a drift of the machine hits both alike; medians count. `native` is right where what it
picks takes at most 10 % longer than the better form. Writes scripts/results/mla_forms_cpu.json and .png, and prints the
points and the rates that fit them (for `RATES` in jattn/dispatch/form_costs.py).
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import platform
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import matplotlib.patches
import numpy as np

from jattn import ForwardMode, MLACache, MLASpec, make_plan, resolve
from jattn.backends.table import POLICIES
from jattn.combinators.latent_chunks import make_chunks
from jattn.combinators.mla import choose_method, mla_attend
from jattn.dispatch import AttnForwardMethod as M
from jattn.dispatch import DispatchFacts
from jattn.dispatch.form_costs import RATES

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (after the backend is chosen)

RESULT = Path(__file__).parent / "results" / "mla_forms_cpu.json"
SPEC = MLASpec(num_q_heads=16, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
FRESH, PREFIX = (1, 16, 64, 128, 256, 512, 1024), (512, 2048, 8192)
PAGE = 64
ABSORBED, EXPANDED = M.MLA, M.MHA_ONE_SHOT
PAIR_FLOPS = {
    ABSORBED: 2 * (2 * SPEC.kv_lora_rank + SPEC.qk_rope_head_dim),
    EXPANDED: 2 * (SPEC.qk_head_dim + SPEC.v_head_dim),
}
ROW_FLOPS = 2 * SPEC.kv_lora_rank * (SPEC.qk_nope_head_dim + SPEC.v_head_dim)


def main() -> None:
    """Measure every point, print and plot, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=4, help="timed calls of each form at each point")
    parser.add_argument("--fresh", type=int, nargs="+", default=FRESH)
    parser.add_argument("--prefix", type=int, nargs="+", default=PREFIX)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    if args.repeats < 2:
        parser.error(f"--repeats {args.repeats}: want at least 2, for quartiles")
    choice = resolve(SPEC)
    points = []
    for prefix in args.prefix:
        for fresh in args.fresh:
            points.append(_point(fresh, prefix, jnp.dtype(args.dtype), args.repeats, choice))
            print(_line(points[-1]), flush=True)
    right = sum(point["native_over_better"] <= 1.1 for point in points)
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "platform": choice.platform,
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "settings": {**dataclasses.asdict(SPEC), "dtype": args.dtype, "page_size": PAGE, "repeats": args.repeats},
        "native_within_10_percent": f"{right} of {len(points)}",
        "fitted_gflops": _fit(points),
        "points": points,
    }
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    _plot(report, args.out.with_suffix(".png"))
    print(f"native within 10 % of the better form: {report['native_within_10_percent']}")
    print(f"fitted GFLOP/s: {report['fitted_gflops']}; in use: {RATES.get('cpu')}")


def _point(fresh: int, prefix: int, dtype, repeats: int, choice) -> dict:
    seq_len = fresh + prefix
    table = np.random.default_rng(0).permutation(-(-seq_len // PAGE))[None]
    draw = functools.partial(_draw, dtype=dtype)
    plan = make_plan(ForwardMode.EXTEND, [seq_len], [fresh], table, page_size=PAGE)
    cache = MLACache.create(SPEC, num_layers=1, num_pages=table.size, page_size=PAGE, dtype=dtype)
    cache = dataclasses.replace(cache, latent=draw(1, *cache.latent.shape))
    step = (draw(2, fresh, 16, 128), draw(3, fresh, 16, 64), draw(4, fresh, 512), draw(5, fresh, 64))
    weights = dict(w_kc=draw(6, 16, 128, 512) * 512**-0.5, w_vc=draw(7, 16, 512, 128) * 512**-0.5)
    runs = {}
    for method in (ABSORBED, EXPANDED):
        chunks = make_chunks(method, [seq_len], [fresh], table, page_size=PAGE)
        static = dict(layer=0, spec=SPEC, choice=choice, method=method)
        call = jax.jit(functools.partial(_call, static), donate_argnums=1)
        runs[method] = (functools.partial(_timed, call, step, plan, chunks, weights), [])
    for turn in range(repeats + 1):
        for run, times in runs.values():
            cache, ms = run(cache)
            if turn:  # the first compiles
                times.append(ms)
    medians = {method: statistics.median(times) for method, (_, times) in runs.items()}
    facts = DispatchFacts(mode=ForwardMode.EXTEND, sum_prefix_lens=prefix, sum_seq_lens=seq_len)
    native = choose_method("native", facts, SPEC, platform=choice.platform)
    return {
        "fresh": fresh,
        "prefix": prefix,
        "ms": {str(method): round(ms, 3) for method, ms in medians.items()},
        "quartiles_ms": {str(m): [round(x, 3) for x in statistics.quantiles(run[1], n=4)] for m, run in runs.items()},
        "native_over_better": round(medians[native] / min(medians.values()), 3),
        "picks": _picks(facts, choice.platform),
    }


def _draw(seed: int, *shape: int, dtype):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def _call(static, step, cache, plan, chunks, weights):
    q_nope, q_rope, latent, k_rope = step
    return mla_attend(q_nope, q_rope, latent, k_rope, cache, plan, chunks=chunks, **weights, **static)


def _timed(call, step, plan, chunks, weights, cache):
    start = time.perf_counter()
    out, cache = call(step, cache, plan, chunks, weights)
    out.block_until_ready()
    return cache, 1e3 * (time.perf_counter() - start)


def _picks(facts: DispatchFacts, name: str) -> dict[str, str]:
    served = [row.name for row in POLICIES.values() if row.supports_mla and row.refused is None]
    return {policy: str(choose_method(policy, facts, SPEC, platform=name)) for policy in served}


def _fit(points: list[dict]) -> dict[str, float]:
    # times as a constant, the pairs and the rows of a form; each point counts by its relative error
    rates = {}
    for method, name in ((ABSORBED, "absorbed"), (EXPANDED, "expanded")):
        rows, times = [], []
        for point in points:
            q, p, ms = point["fresh"], point["prefix"], point["ms"][str(method)]
            made = q if method is ABSORBED else p + q
            gflops = 1e-9 * SPEC.num_q_heads * np.array([PAIR_FLOPS[method] * (q * p + q * q / 2), ROW_FLOPS * made])
            rows.append([*gflops, 1.0])
            times.append(1e-3 * ms)
        weight = 1 / np.array(times)
        found = np.linalg.lstsq(np.array(rows) * weight[:, None], np.ones(len(times)), rcond=None)[0]
        rates[name] = round(float(1 / found[0]), 1)
        if method is EXPANDED:
            rates["expand"] = round(float(1 / found[1]), 1)
    return rates


def break_even(prefix: float, saved: float = PAIR_FLOPS[ABSORBED] - PAIR_FLOPS[EXPANDED], row: float = ROW_FLOPS):
    """Fresh tokens from which expanding `prefix` cached ones pays: q p + q^2 / 2 pairs save what the rows cost."""
    return math.sqrt(prefix**2 + 2 * prefix * row / saved) - prefix if saved > 0 else math.inf


def _line(point: dict) -> str:
    ms = point["ms"]
    return (
        f"| {point['fresh']} | {point['prefix']} | {ms['MLA']:.1f} | {ms['MHA_ONE_SHOT']:.1f} | "
        f"{point['picks']['native']} | {point['native_over_better']:.2f} |"
    )


def _plot(report: dict, path: Path) -> None:
    rates = RATES.get("cpu")
    figure, (axes, grid) = plt.subplots(2, figsize=(8, 8), height_ratios=(3, 2), layout="constrained")
    for at, prefix in enumerate(sorted({point["prefix"] for point in report["points"]})):
        mine = [point for point in report["points"] if point["prefix"] == prefix]
        ratio = [point["ms"]["MLA"] / point["ms"]["MHA_ONE_SHOT"] for point in mine]
        axes.plot([point["fresh"] for point in mine], ratio, color=f"C{at}", label=f"{prefix} cached")
        for pick, marker in (("MLA", "o"), ("MHA_ONE_SHOT", "s")):
            chosen = [(p["fresh"], r) for p, r in zip(mine, ratio, strict=True) if p["picks"]["native"] == pick]
            axes.plot(*zip(*chosen, strict=True), marker, color=f"C{at}") if chosen else None
        axes.axvline(break_even(prefix), color=f"C{at}", linestyle=":", linewidth=1)
        if rates:
            saved = PAIR_FLOPS[ABSORBED] / rates.absorbed - PAIR_FLOPS[EXPANDED] / rates.expanded
            axes.axvline(
                break_even(prefix, saved, ROW_FLOPS / rates.expand), color=f"C{at}", linestyle="--", linewidth=1
            )
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="fresh tokens", ylabel="absorbed time / expanded time")
    title = "native picks: circle absorbed, square expanded. Break-even: dotted by FLOPs, dashed by measured rates"
    axes.set_title(title, fontsize=9)
    axes.legend()
    _plot_picks(grid, report["points"])
    figure.savefig(path, dpi=120)


def _plot_picks(axes, points: list[dict]) -> None:
    # a row a policy, a column a point
    policies, forms = list(points[0]["picks"]), sorted({form for point in points for form in point["picks"].values()})
    picks = [[forms.index(point["picks"][policy]) for point in points] for policy in policies]
    axes.imshow(picks, aspect="auto", cmap="Set3", vmin=0, vmax=11, interpolation="nearest")
    axes.set_yticks(range(len(policies)), policies, fontsize=7)
    labels = [f"{point['fresh']}/{point['prefix']}" for point in points]
    axes.set_xticks(range(len(points)), labels, rotation=90, fontsize=7)
    axes.set_xlabel("fresh / cached tokens, and the form that each policy picks")
    handles = [
        matplotlib.patches.Rectangle((0, 0), 1, 1, color=plt.get_cmap("Set3")(at / 11)) for at in range(len(forms))
    ]
    axes.legend(handles, forms, fontsize=7, ncols=len(forms), loc="lower center", bbox_to_anchor=(0.5, 1.0))


if __name__ == "__main__":
    main()
