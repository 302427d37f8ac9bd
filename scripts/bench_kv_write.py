"""Time of the KV write in a decode step on a GPU: its kernel against all kernels of the step.

    python3 scripts/bench_kv_write.py --out rows.jsonl

The step is one layer of Llama 3 8B (width 4096, 32 query and 8 KV heads of 128, feed-forward 14336), bfloat16, pages of
16, run --layers times in one program with the cache in place: norms, projections, write, attention and feed-forward.
Times are of kernels, through CUPTI; a row's figures are medians of --runs.
"""

import argparse
import functools
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from bench_attention_timer import Timer

import jattn
from jattn import AttnSpec, ForwardMode, PagedKV, make_plan

_WIDTH, _HIDDEN, _PAGE = 4096, 14336, 16


def weights(key) -> dict:
    """One layer's."""
    shapes = dict(qkv=(_WIDTH, 48 * 128), o=(_WIDTH, _WIDTH), up=(_WIDTH, 2 * _HIDDEN), down=(_HIDDEN, _WIDTH))
    keys = jax.random.split(key, len(shapes))
    return {
        name: 0.02 * jax.random.normal(one, shape, jnp.bfloat16)
        for one, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def norm(x):
    """Root mean square norm, without weights."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)).astype(x.dtype)


def step(x, weights, plan, cache, *, layers: int, spec, choice):
    """A decode step of `layers` layers over two layers of cache."""

    def layer(i, carry):
        x, cache = carry
        rows = (norm(x) @ weights["qkv"]).reshape(-1, 48, 128)
        q, k, v = jnp.split(rows, (32, 40), axis=1)
        out, _, cache = jattn.write_attend(q, k, v, cache, plan, layer=i % 2, spec=spec, choice=choice)
        x = x + out.reshape(x.shape) @ weights["o"]
        gate, up = jnp.split(norm(x) @ weights["up"], 2, axis=1)
        return x + (jax.nn.silu(gate) * up) @ weights["down"], cache

    return jax.lax.fori_loop(0, layers, layer, (x, cache))


def measure(batch: int, ctx: int, kv_dtype: str | None, layers: int, runs: int, timer: Timer) -> dict:
    """A row."""
    spec = AttnSpec(num_q_heads=32, num_kv_heads=8, head_dim=128, kv_dtype=kv_dtype)
    choice = jattn.resolve(spec, "native", "cuda-sm90")
    pages = -(-ctx // _PAGE)
    table = np.random.default_rng(0).permutation(batch * pages).astype(np.int32).reshape(batch, pages)
    plan = make_plan(ForwardMode.DECODE, np.full(batch, ctx), np.ones(batch, int), table, page_size=_PAGE)
    cache = PagedKV.create(spec, num_layers=2, num_pages=batch * pages, page_size=_PAGE, dtype=jnp.bfloat16)
    x = jax.random.normal(jax.random.key(0), (batch, _WIDTH), jnp.bfloat16)
    given = weights(jax.random.key(1))
    run = jax.jit(functools.partial(step, layers=layers, spec=spec, choice=choice), donate_argnums=3)
    _, cache = run(x, given, plan, cache)
    found: dict[str, list[float]] = dict(write=[], step=[])
    for _ in range(runs):
        jax.block_until_ready(cache)
        timer.cupti._cupti_init()
        for _ in range(10):
            _, cache = run(x, given, plan, cache)
        jax.block_until_ready(cache)
        times = timer.cupti._cupti_get_timings(True)
        found["write"].append(sum(ms for name, ms in times if "kv_write" in name) / (10 * layers))
        found["step"].append(sum(ms for _, ms in times) / (10 * layers))
    write, whole = (statistics.median(found[name]) for name in ("write", "step"))
    return dict(
        family="kv_write",
        peer="jattn",
        shape=f"B{batch} ctx{ctx} H32/8 D128 p{_PAGE}",
        dtype=kv_dtype or "bf16",
        ms=write,
        ms_layer=whole,
        pct_of_step=100 * write / whole,
        spread=(max(found["write"]) - min(found["write"])) / write,
    )


def main() -> None:
    """Measure, and print rows as they come."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", help="JSON lines")
    args = parser.parse_args()
    timer, rows = Timer(args.runs), []
    versions = dict(jax=jax.__version__, device=jax.devices()[0].device_kind, date=time.strftime("%Y-%m-%d"))
    for kv_dtype in (None, "fp8_e4m3"):
        for batch, ctx in ((1, 1024), (1, 8192), (16, 4096), (64, 4096)):
            rows.append(measure(batch, ctx, kv_dtype, args.layers, args.runs, timer) | versions)
            print(json.dumps(rows[-1]), flush=True)
    if args.out:
        Path(args.out).write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
