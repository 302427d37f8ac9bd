"""Expanded against absorbed latent attention over fresh tokens and prefix, and what each policy picks.

    uv run --extra bench python scripts/bench_mla_forms.py
    python3 scripts/bench_mla_forms.py --dtype bfloat16 --heads 128 --calls 20 --threads 12    # on a GPU, DeepSeek V3's

One layer at the widths of DeepSeek V2 and V3 (latent 512, key 128 + 64, value 128; 16 heads are V2-Lite's), one
request: the up-projections, the write and attention. The forms take turns at each point, so that a drift of the machine
hits all alike; medians count. `native` is right where what it picks takes at most 10 % longer than the best form (5 %
on a GPU). Writes scripts/results/mla_forms_cpu.json and .png, or those of the platform and the heads, and prints the
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
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn import ForwardMode, MLACache, MLASpec, make_plan, resolve
from jattn.backends.table import POLICIES
from jattn.combinators.latent_chunks import make_chunks
from jattn.combinators.mla import choose_method, mla_attend
from jattn.dispatch import AttnForwardMethod as M
from jattn.dispatch import DispatchFacts
from jattn.dispatch.form_costs import RATES

RESULTS = Path(__file__).parent / "results"
SPEC = MLASpec(num_q_heads=16, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
FRESH, PREFIX = (1, 16, 64, 128, 256, 512, 1024), (512, 2048, 8192)
PAGE = 64
ABSORBED, EXPANDED, CHUNKED = M.MLA, M.MHA_ONE_SHOT, M.MHA_CHUNKED_KV
FORMS = (ABSORBED, EXPANDED, CHUNKED)
PAIR_FLOPS = {
    ABSORBED: 2 * (2 * SPEC.kv_lora_rank + SPEC.qk_rope_head_dim),
    EXPANDED: 2 * (SPEC.qk_head_dim + SPEC.v_head_dim),
}
ROW_FLOPS = 2 * SPEC.kv_lora_rank * (SPEC.qk_nope_head_dim + SPEC.v_head_dim)


def main() -> None:
    """Measure every point, print and plot, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=4, help="timed turns of each form at each point")
    parser.add_argument("--calls", type=int, default=1, help="calls a turn, enqueued together: on a GPU some")
    parser.add_argument("--threads", type=int, default=1, help="programs compiled at once, before the first is timed")
    parser.add_argument("--fresh", type=int, nargs="+", default=FRESH)
    parser.add_argument("--prefix", type=int, nargs="+", default=PREFIX)
    parser.add_argument("--heads", type=int, default=SPEC.num_q_heads)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, help="JSON; the plot beside it where matplotlib is installed")
    args = parser.parse_args()
    if args.repeats < 2:
        parser.error(f"--repeats {args.repeats}: want at least 2, for quartiles")
    spec = dataclasses.replace(SPEC, num_q_heads=args.heads)
    choice = resolve(spec)
    name = "mla_forms_cpu" if choice.platform.startswith("cpu") else f"mla_forms_{choice.platform}_h{args.heads}"
    out = args.out or RESULTS / f"{name}.json"
    layers = [
        _Layer(fresh, prefix, spec, jnp.dtype(args.dtype), choice) for prefix in args.prefix for fresh in args.fresh
    ]
    with ThreadPoolExecutor(args.threads) as pool:
        built = [(layer, method, pool.submit(layer.compiled, method)) for layer in layers for method in FORMS]
        calls = {(layer, method): call.result() for layer, method, call in built}
    points = []
    for layer in layers:
        points.append(_point(layer, {method: calls[layer, method] for method in FORMS}, args.repeats, args.calls))
        print(_line(points[-1]), flush=True)
    within = {n: f"{sum(p['native_over_best'] <= 1 + n / 100 for p in points)} of {len(points)}" for n in (5, 10)}
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "device": jax.devices()[0].device_kind,
        "platform": choice.platform,
        "kernels": [row.name for row in choice.rows],
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "settings": {**dataclasses.asdict(spec), "dtype": args.dtype, "page_size": PAGE, "repeats": args.repeats},
        **{f"native_within_{n}_percent": text for n, text in within.items()},
        "fitted_gflops": _fit(points, args.heads),
        "points": points,
    }
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    try:
        _plot(report, out.with_suffix(".png"))
    except ImportError:
        print("no plot: matplotlib is not installed")
    print(f"native within 5 % of the best form: {within[5]}; within 10 %: {within[10]}")
    print(f"fitted GFLOP/s: {report['fitted_gflops']}; in use: {RATES.get(choice.platform.split('-')[0])}")


@dataclasses.dataclass(frozen=True, eq=False)
class _Layer:
    """One layer's step: fresh tokens of one request behind a prefix."""

    fresh: int
    prefix: int
    spec: MLASpec
    dtype: Any
    choice: Any

    @functools.cached_property
    def inputs(self) -> tuple:
        """Step, plan, weights; as `_call` takes them."""
        heads, fresh, draw = self.spec.num_q_heads, self.fresh, functools.partial(_draw, dtype=self.dtype)
        seq_len = fresh + self.prefix
        plan = make_plan(ForwardMode.EXTEND, [seq_len], [fresh], self.table, page_size=PAGE)
        step = (draw(2, fresh, heads, 128), draw(3, fresh, heads, 64), draw(4, fresh, 512), draw(5, fresh, 64))
        return step, plan, dict(w_kc=draw(6, heads, 128, 512) * 512**-0.5, w_vc=draw(7, heads, 512, 128) * 512**-0.5)

    @property
    def table(self):
        """Page table of the request."""
        return np.random.default_rng(0).permutation(-(-(self.fresh + self.prefix) // PAGE))[None]

    def cache(self) -> MLACache:
        """A cache whose latents are drawn."""
        cache = MLACache.create(self.spec, num_layers=1, num_pages=self.table.size, page_size=PAGE, dtype=self.dtype)
        return dataclasses.replace(cache, latent=_draw(1, *cache.latent.shape, dtype=self.dtype))

    def chunks(self, method: M):
        """What `method` expands."""
        return make_chunks(method, [self.fresh + self.prefix], [self.fresh], self.table, page_size=PAGE)

    def compiled(self, method: M):
        """The layer in the form of `method`, of (step, cache, plan, chunks, weights)."""
        static = dict(layer=0, spec=self.spec, choice=self.choice, method=method)
        step, plan, weights = self.inputs
        call = jax.jit(functools.partial(_call, static), donate_argnums=1)
        return call.lower(step, self.cache(), plan, self.chunks(method), weights).compile()


def _point(layer: _Layer, calls: dict, repeats: int, count: int) -> dict:
    step, plan, weights = layer.inputs
    cache, runs = layer.cache(), {}
    for method, call in calls.items():
        runs[method] = (functools.partial(_timed, call, step, plan, layer.chunks(method), weights, count), [])
    for turn in range(repeats + 1):
        for run, times in runs.values():
            cache, ms = run(cache)
            if turn:  # the first warms up
                times.append(ms)
    medians = {method: statistics.median(times) for method, (_, times) in runs.items()}
    facts = DispatchFacts(
        mode=ForwardMode.EXTEND, sum_prefix_lens=layer.prefix, sum_seq_lens=layer.fresh + layer.prefix
    )
    name = layer.choice.platform
    native = choose_method("native", facts, layer.spec, platform=name)
    return {
        "fresh": layer.fresh,
        "prefix": layer.prefix,
        "ms": {str(method): round(ms, 4) for method, ms in medians.items()},
        "quartiles_ms": {str(m): [round(x, 4) for x in statistics.quantiles(run[1], n=4)] for m, run in runs.items()},
        "native_over_best": round(medians[native] / min(medians.values()), 3),
        "picks": _picks(facts, layer.spec, name),
    }


def _draw(seed: int, *shape: int, dtype):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def _call(static, step, cache, plan, chunks, weights):
    q_nope, q_rope, latent, k_rope = step
    return mla_attend(q_nope, q_rope, latent, k_rope, cache, plan, chunks=chunks, **weights, **static)


def _timed(call, step, plan, chunks, weights, count: int, cache):
    start = time.perf_counter()
    out = None
    for _ in range(count):
        out, cache = call(step, cache, plan, chunks, weights)
    jax.block_until_ready(out)
    return cache, 1e3 * (time.perf_counter() - start) / count


def _picks(facts: DispatchFacts, spec: MLASpec, name: str) -> dict[str, str]:
    served = [row.name for row in POLICIES.values() if row.supports_mla and row.refused is None]
    return {policy: str(choose_method(policy, facts, spec, platform=name)) for policy in served}


def _fit(points: list[dict], heads: int) -> dict[str, float]:
    # times as a constant, the pairs and the rows of a form; each point counts by its relative error
    rates = {}
    for method, name in ((ABSORBED, "absorbed"), (EXPANDED, "expanded")):
        rows, times = [], []
        for point in points:
            q, p, ms = point["fresh"], point["prefix"], point["ms"][str(method)]
            made = q if method is ABSORBED else p + q
            gflops = 1e-9 * heads * np.array([PAIR_FLOPS[method] * (q * p + q * q / 2), ROW_FLOPS * made])
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
        f"| {point['fresh']} | {point['prefix']} | {ms['MLA']:.3f} | "
        f"{ms['MHA_ONE_SHOT']:.3f} | {ms['MHA_CHUNKED_KV']:.3f} | "
        f"{point['picks']['native']} | {point['native_over_best']:.2f} |"
    )


def _plot(report: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rates = RATES.get(report["platform"].split("-")[0])
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
    _plot_picks(plt, grid, report["points"])
    figure.savefig(path, dpi=120)


def _plot_picks(plt, axes, points: list[dict]) -> None:
    # a row a policy, a column a point
    policies, forms = list(points[0]["picks"]), sorted({form for point in points for form in point["picks"].values()})
    picks = [[forms.index(point["picks"][policy]) for point in points] for policy in policies]
    axes.imshow(picks, aspect="auto", cmap="Set3", vmin=0, vmax=11, interpolation="nearest")
    axes.set_yticks(range(len(policies)), policies, fontsize=7)
    labels = [f"{point['fresh']}/{point['prefix']}" for point in points]
    axes.set_xticks(range(len(points)), labels, rotation=90, fontsize=7)
    axes.set_xlabel("fresh / cached tokens, and the form that each policy picks")
    handles = [plt.Rectangle((0, 0), 1, 1, color=plt.get_cmap("Set3")(at / 11)) for at in range(len(forms))]
    axes.legend(handles, forms, fontsize=7, ncols=len(forms), loc="lower center", bbox_to_anchor=(0.5, 1.0))


if __name__ == "__main__":
    main()
