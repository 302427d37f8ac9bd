"""Time the Hopper attention kernels on a GPU, against the card's two roofs and JAX's own alternatives.

    python3 scripts/bench_attention.py --families decode,tree --out rows.jsonl --plot attention.png --peers

Rows are JSON lines {family, peer, shape, dtype, ms, tflops, gbps, pct_of_roof, max_rel_err, ...}:

  ms           sum of the kernels' own times read through CUPTI over many calls, divided; from 0.3 ms on, wall time of
               calls that are enqueued together, divided. Both are kept (ms_cupti, ms_wall). The schedule, which depends
               on lengths alone and is made once a step for all layers, is timed apart (ms_schedule).
  tflops, gbps useful operations, and the fewest bytes, over ms
  pct_of_roof  100 * max(operations / matmul roof, bytes / copy roof) / ms, roofs measured in the same run
  max_rel_err  worst |out - ref| / |ref| over checked rows, ref in float64 from the same inputs

Inputs are random normals. Calls rotate over enough input sets to leave the L2; a figure is the median of --runs.
"""

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lib import mosaic_gpu as _mosaic_gpu  # its CUPTI reader has no public name

from pallas_kernels._common import masks
from pallas_kernels._common.masks import Rules
from pallas_kernels.attention import mosaic_gpu_sm90 as sm90
from pallas_kernels.attention import mosaic_gpu_sm90_schedule as schedules
from pallas_kernels.attention.mosaic_gpu_sm90_config import Config, heuristic

_ROTATION_BYTES = 200e6  # over three times the L2
_MAX_SETS = 48
_WALL_FROM_MS = 0.3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A batch of equal requests."""

    batch: int
    ctx: int  # keys before a tree, or all keys of a decode step
    q_heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    page: int = 64
    nodes: int = 0  # of a tree; 0: decode

    @property
    def family(self) -> str:
        """decode or tree."""
        return "tree" if self.nodes else "decode"

    @property
    def q_len(self) -> int:
        """Query tokens a request."""
        return self.nodes or 1

    @property
    def keys(self) -> int:
        """Keys a request."""
        return self.ctx + self.nodes

    @property
    def label(self) -> str:
        """Name of the row, as the published peers' page has it."""
        heads = f"H{self.q_heads}/{self.kv_heads}"
        if self.nodes:
            return f"B{self.batch} T{self.nodes} ctx{self.ctx} {heads} p{self.page}"
        return f"B{self.batch} ctx{self.ctx} {heads} D{self.dim} p{self.page}"

    @property
    def flops(self) -> float:
        """Useful operations."""
        return 4.0 * self.batch * self.q_len * self.keys * self.q_heads * self.dim

    @property
    def nbytes(self) -> float:
        """Fewest bytes: each input read once, each output written once, 2 bytes each."""
        return 4.0 * self.batch * self.dim * (self.keys * self.kv_heads + self.q_len * self.q_heads)


def _decode_shapes() -> list[Shape]:
    grid = [(b, c) for c in (1024, 8192, 32768) for b in (1, 16, 64, 256) if (b, c) != (256, 32768)]
    shapes = [Shape(batch=b, ctx=c) for b, c in grid]
    shapes += [Shape(batch=b, ctx=8192, page=16) for b in (16, 64)]
    shapes += [Shape(batch=b, ctx=c, kv_heads=32) for b, c in ((1, 8192), (16, 1024), (16, 8192), (64, 8192))]
    return shapes + [Shape(batch=b, ctx=4096, page=16) for b in (1, 16, 64)]


FAMILIES: dict[str, Callable[[], list[Shape]]] = {
    "decode": _decode_shapes,
    "tree": lambda: [Shape(batch=b, ctx=4096, page=16, nodes=t) for b in (1, 16, 64) for t in (16, 64)],
}


class Timer:
    """Times calls on this GPU; see the head of this file."""

    def __init__(self, runs: int):
        self.runs = runs
        self.cupti = _mosaic_gpu._mosaic_gpu_ext  # pyright: ignore[reportPrivateImportUsage]

    def __call__(self, call: Callable, sets: list) -> dict[str, Any]:
        for one in sets[:2]:
            jax.block_until_ready(call(*one))
        estimate = self._wall(call, sets, max(len(sets), 3))
        count = int(max(len(sets), 5, min(1000, 60 / max(estimate, 1e-3))))
        walls = [self._wall(call, sets, count) for _ in range(self.runs)]
        kernels: list[float] = []
        self.kernels: dict[str, float] = {}
        if estimate < 10:
            kernels = [self._kernels(call, sets, min(count, 200)) for _ in range(self.runs)]
        wall = statistics.median(walls)
        own = statistics.median(kernels) if kernels else math.nan
        best, taken = (own, kernels) if kernels and own < _WALL_FROM_MS else (wall, walls)
        spread = (max(taken) - min(taken)) / best
        return dict(ms=best, ms_wall=wall, ms_cupti=own, spread=spread, kernels=self.kernels)

    def _wall(self, call, sets, count: int) -> float:
        start = time.perf_counter()
        out = None
        for i in range(count):
            out = call(*sets[i % len(sets)])
        jax.block_until_ready(out)
        return (time.perf_counter() - start) * 1e3 / count

    def _kernels(self, call, sets, count: int) -> float:
        self.cupti._cupti_init()
        try:
            out = None
            for i in range(count):
                out = call(*sets[i % len(sets)])
            jax.block_until_ready(out)
        finally:
            timings = self.cupti._cupti_get_timings(True)
        for name, _ in timings:
            self.kernels[name] = sum(ms for other, ms in timings if other == name) / count
        return sum(ms for _, ms in timings) / count


def roofs(timer: Timer) -> dict[str, float]:
    """Copy and read bandwidth in GB/s and bf16 matmul rate in TFLOP/s of this card."""
    big = jax.random.bits(jax.random.key(0), (1 << 30,), jnp.uint32)
    copy = timer(jax.jit(lambda x: x + jnp.uint32(1)), [(big,)])["ms"]
    read = timer(jax.jit(lambda x: jnp.max(x)), [(big,)])["ms"]
    del big
    a, b = (jax.random.normal(jax.random.key(i), (8192, 8192), jnp.bfloat16) for i in range(2))
    matmul = timer(jax.jit(lambda a, b: a @ b), [(a, b)])["ms"]
    nbytes = 4.0 * (1 << 30)
    return dict(copy_gbps=2 * nbytes / copy / 1e6, read_gbps=nbytes / read / 1e6, tflops=2 * 8192**3 / matmul / 1e9)


def data(shape: Shape) -> tuple[list, dict, Any]:
    """Input sets, the plan's arrays, and the oracle's view: (bits bool [batch, nodes, nodes] or None)."""
    rng = np.random.default_rng(0)
    pages = -(-shape.keys // shape.page)
    table = rng.permutation(shape.batch * pages).astype(np.int32).reshape(shape.batch, pages)
    key = jax.random.key(1)
    count = int(min(_MAX_SETS, max(1, math.ceil(_ROTATION_BYTES / shape.nbytes))))

    @jax.jit
    def one(key):
        kq, kk, kv = jax.random.split(key, 3)
        pool = (shape.batch * pages, shape.page, shape.kv_heads, shape.dim)
        q = jax.random.normal(kq, (shape.batch * shape.q_len, shape.q_heads, shape.dim), jnp.bfloat16)
        return q, jax.random.normal(kk, pool, jnp.bfloat16), jax.random.normal(kv, pool, jnp.bfloat16)

    sets = [one(jax.random.fold_in(key, i)) for i in range(count)]
    cu = np.arange(shape.batch + 1, dtype=np.int32) * shape.q_len
    plan: dict[str, Any] = dict(
        page_table=jnp.asarray(table),
        seq_lens=jnp.full((shape.batch,), shape.keys, jnp.int32),
        cu_q_lens=jnp.asarray(cu),
    )
    if not shape.nodes:
        return sets, plan, None
    seen = np.zeros((shape.batch, shape.nodes, shape.nodes), bool)
    for b in range(shape.batch):
        for i in range(shape.nodes):
            if i:
                seen[b, i] = seen[b, rng.integers(max(0, i - 8), i)]
            seen[b, i, i] = True
    words = -(-shape.nodes // 32)
    padded = np.pad(seen, ((0, 0), (0, 0), (0, 32 * words - shape.nodes))).reshape(-1, words, 32)
    bits = (padded.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(-1).astype(np.uint32)
    plan |= dict(tree_bits=jnp.asarray(bits), tree_starts=jnp.full((shape.batch,), shape.ctx, jnp.int32))
    return sets, plan, seen


def static(shape: Shape) -> dict[str, Any]:
    """Keyword arguments that are static."""
    mask = "tree" if shape.nodes else "causal"
    return dict(max_q_len=shape.q_len, sm_scale=shape.dim**-0.5, mask=mask)


def default_config(shape: Shape) -> Config:
    """What the kernel takes by itself."""
    group = shape.q_heads // shape.kv_heads
    return heuristic(
        max_q_len=shape.q_len,
        group=group,
        kv_heads=shape.kv_heads,
        num_seqs=shape.batch,
        head_dim=shape.dim,
        kv_room=-(-shape.keys // shape.page) * shape.page,
        page_size=shape.page,
        plain_tree=shape.nodes > 0,
    )


def ours(shape: Shape, config: Config) -> tuple[Callable, Callable]:
    """The kernel by (q, k, v, plan, schedule), and the schedule by (plan)."""
    rules = Rules(sm_scale=shape.dim**-0.5, mask=static(shape)["mask"])

    def schedule(plan):
        tokens = shape.batch * shape.q_len
        bits, starts = plan.get("tree_bits"), plan.get("tree_starts")
        return schedules.make(
            config,
            rules,
            masks.make_tree(rules, tokens, bits, starts, None, None),
            seq_lens=plan["seq_lens"],
            cu_q_lens=plan["cu_q_lens"],
            num_tokens=tokens,
            max_q_len=shape.q_len,
            group=shape.q_heads // shape.kv_heads,
            page_table=plan["page_table"],
            page_size=shape.page,
        )

    def attend(q, k, v, plan, schedule):
        return sm90.paged_attention(q, k, v, **plan, **static(shape), config=config, schedule=schedule)

    return attend, schedule


def cudnn_paged(shape: Shape) -> Callable:
    """JAX's private cuDNN paged attention, decode only."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    def attend(q, k, v, plan, schedule):
        batch, pages = plan["page_table"].shape
        table = plan["page_table"].reshape(batch, 1, pages, 1)
        ones = jnp.ones((batch,), jnp.int32)
        return cudnn.paged_attention(
            q[:, None], k, v, ones, plan["seq_lens"], table, table, scale=shape.dim**-0.5,
            mask_type=cudnn.MaskType.PADDING,
        ), None  # fmt: skip

    return attend


def triton_dense(shape: Shape) -> Callable:
    """JAX's decode kernel for the deprecated Triton path. It has no pages: they are read in their order in the pool."""
    from jax.experimental.pallas.ops.gpu import decode_attention

    rows, group = shape.batch * shape.kv_heads, shape.q_heads // shape.kv_heads
    splits = 1
    while splits < 64 and rows * splits < 264 and shape.ctx // (2 * splits) >= 128:
        splits *= 2

    def attend(q, k, v, plan, schedule):
        keys, values = (x.reshape(rows, shape.ctx, shape.dim) for x in (k, v))  # timing only
        out = decode_attention.mqa(
            q.reshape(rows, group, shape.dim), keys, values, sm_scale=shape.dim**-0.5, block_h=16, block_k=128,
            k_splits=splits,
        )  # fmt: skip
        return out, None

    return attend


# Plain JAX is no peer here: it takes minutes on the large shapes.
PEERS: dict[str, tuple[str, Callable[[Shape], Callable], str]] = {
    "jax_cudnn_paged": ("decode", cudnn_paged, ""),
    "jax_triton_dense": ("decode", triton_dense, "pages read in the pool's order: timed, not checked"),
}


def max_rel_err(shape: Shape, out, one, plan, seen) -> float:
    """Worst relative error of some rows."""
    q, k, v = one
    table = np.asarray(plan["page_table"])
    out = np.asarray(out.reshape(shape.batch, shape.q_len, shape.q_heads, shape.dim).astype(jnp.float32), np.float64)
    q = np.asarray(q.reshape(out.shape).astype(jnp.float32), np.float64)
    group, worst = shape.q_heads // shape.kv_heads, 0.0
    if not np.isfinite(out).all():
        return math.inf
    for b, t, h in ((0, 0, 0), (shape.batch - 1, shape.q_len - 1, shape.q_heads - 1), (shape.batch // 2, 0, 5)):
        keys, values = (
            np.asarray(x[table[b], :, h // group].astype(jnp.float32), np.float64).reshape(-1, shape.dim)[: shape.keys]
            for x in (k, v)
        )
        scores = keys @ q[b, t, h] * shape.dim**-0.5
        if seen is not None:
            scores[shape.ctx :][~seen[b, t]] = -np.inf
        weights = np.exp(scores - scores.max())
        want = weights @ values / weights.sum()
        worst = max(worst, float(np.linalg.norm(out[b, t, h] - want) / np.linalg.norm(want)))
    return worst


def bench(shape: Shape, calls: dict[str, tuple[Callable, Any, str]], timer: Timer, roof: dict) -> list[dict]:
    """Rows of one shape. calls: name -> (attend, schedule or None, configuration as text)."""
    sets, plan, seen = data(shape)
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (sets[0], plan))

    def build(item):
        attend, schedule, _ = item[1]
        try:
            made = None if schedule is None else jax.eval_shape(schedule, structs[1])
            return jax.jit(attend).lower(*structs[0], structs[1], made).compile()
        except Exception as error:  # a peer that cannot run a shape costs its row, not the run
            return f"{type(error).__name__}: {str(error)[:200]}"

    with ThreadPoolExecutor(8) as pool:
        compiled = list(pool.map(build, calls.items()))
    rows = []
    for (name, (_, schedule, text)), call in zip(calls.items(), compiled, strict=True):
        row: dict[str, Any] = dict(family=shape.family, peer=name, shape=shape.label, dtype="bf16", config=text)
        if isinstance(call, str):
            rows.append(row | dict(error=call))
            continue
        try:
            made = None
            if schedule is not None:
                jitted = jax.jit(schedule)
                made = jitted(plan)
                row["ms_schedule"] = timer(jitted, [(plan,)])["ms_cupti"]
            every = [(*one, plan, made) for one in sets]
            error = max_rel_err(shape, call(*every[0])[0], sets[0], plan, seen)
            row |= timer(call, every)
        except Exception as problem:
            rows.append(row | dict(error=f"{type(problem).__name__}: {str(problem)[:200]}"))
            continue
        bound = max(shape.flops / roof["tflops"] / 1e9, shape.nbytes / roof["copy_gbps"] / 1e6)
        row |= dict(
            tflops=shape.flops / row["ms"] / 1e9,
            gbps=shape.nbytes / row["ms"] / 1e6,
            pct_of_roof=100 * bound / row["ms"],
            max_rel_err=error,
        )
        rows.append(row)
    return rows


def table(rows: list[dict]) -> str:
    """A text table of the rows."""
    lines = [
        f"{'shape':36} {'peer':18} {'ms':>9} {'GB/s':>7} {'TF/s':>6} {'% roof':>6} {'error':>8} {'spread':>6}  config"
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"{row['shape']:36} {row['peer']:18} {row['error'][:100]}")
            continue
        lines.append(
            f"{row['shape']:36} {row['peer']:18} {row['ms']:9.4f} {row['gbps']:7.0f} {row['tflops']:6.1f} "
            f"{row['pct_of_roof']:6.1f} {row['max_rel_err']:8.1e} {row['spread']:6.3f}  {row['config']}"
        )
    return "\n".join(lines)


def plot(rows: list[dict], path: str) -> None:
    """Bars: percent of the roof, a shape a group, a peer a colour."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    rows = [row for row in rows if "ms" in row]
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    figure, axes = pyplot.subplots(figsize=(11, 0.32 * len(shapes) + 1.5))
    for i, peer in enumerate(peers):
        mine = {row["shape"]: row["pct_of_roof"] for row in rows if row["peer"] == peer}
        height = 0.8 / len(peers)
        places = [shapes.index(shape) + i * height for shape in mine]
        axes.barh(places, list(mine.values()), height=height, label=peer)
    axes.set_yticks([i + 0.4 for i in range(len(shapes))], shapes)
    axes.invert_yaxis()
    axes.set_xlabel("% of the roof (copy bandwidth or matmul rate, the larger bound)")
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure, print rows as they come, then the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--families", default="decode,tree")
    parser.add_argument("--only", default="", help="shapes whose label contains this")
    parser.add_argument("--peers", action="store_true", help="JAX's own alternatives too")
    parser.add_argument(
        "--variant", action="append", default=[], help="changes to the default sizes, as stages=4,splits=False"
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--budget-s", type=float, default=1e9)
    parser.add_argument("--out", help="JSON lines")
    parser.add_argument("--plot", help="PNG")
    args = parser.parse_args()
    warnings.simplefilter("ignore", DeprecationWarning)
    start, timer = time.time(), Timer(args.runs)
    roof = roofs(timer)
    device = jax.devices()[0]
    versions = dict(jax=jax.__version__, device=device.device_kind, date=time.strftime("%Y-%m-%d"))
    rows: list[dict] = [dict(family="roof", **roof, **versions)]
    print(json.dumps(rows[0]), flush=True)
    sink = open(args.out, "w") if args.out else None
    if sink:
        sink.write(json.dumps(rows[0]) + "\n")
    for shape in (shape for family in args.families.split(",") for shape in FAMILIES[family]()):
        if args.only not in shape.label or time.time() - start > args.budget_s:
            continue
        base = default_config(shape)
        calls: dict[str, Any] = {"jattn": (*ours(shape, base), str(base))}
        for text in args.variant:
            config = _changed(base, text)
            if config is not None and config != base:
                calls[f"jattn {text}"] = (*ours(shape, config), str(config))
        if args.peers:
            for name, (families, make, note) in PEERS.items():
                if shape.family in families.split():
                    calls[name] = (make(shape), None, note)
        for row in bench(shape, calls, timer, roof):
            rows.append(row)
            print(json.dumps(row), flush=True)
            if sink:
                sink.write(json.dumps(row) + "\n")
                sink.flush()
    print(table(rows[1:]))
    if args.plot:
        plot(rows[1:], args.plot)


def _changed(base: Config, text: str) -> Config | None:
    # None where the change means nothing
    changes = {}
    for part in text.split(","):
        name, value = part.split("=")
        kind = {field.name: field.type for field in dataclasses.fields(Config)}[name]
        changes[name] = value == "True" if kind in (bool, "bool") else int(value)
    if "parts" in changes and not changes.get("splits", base.splits):
        return None
    try:
        return dataclasses.replace(base, **changes)
    except ValueError:
        return None


if __name__ == "__main__":
    main()
