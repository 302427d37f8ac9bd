"""What `bench_attention.py` times: shapes, inputs, and the error against float64."""

# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_attention_timer import input_sets

from pallas_kernels.attention.mosaic_gpu_sm90_config import Config, heuristic
from pallas_kernels.attention.mosaic_gpu_sm90_tuned import tuned

_ROTATION_BYTES = 200e6  # over three times the L2
_MAX_SETS = 48


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
    kv: str = "bf16"  # or "fp8": e4m3 with one scale for keys and one for values
    ordered: bool = False  # whether pages lie in the order of the requests, as a dense cache has them; else anywhere

    @property
    def family(self) -> str:
        """decode, decode_fp8 or tree."""
        return "tree" if self.nodes else "decode" if self.kv == "bf16" else "decode_fp8"

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
        more = (" fp8" if self.kv == "fp8" else "") + (" in order" if self.ordered else "")
        if self.nodes:
            return f"B{self.batch} T{self.nodes} ctx{self.ctx} {heads} p{self.page}{more}"
        return f"B{self.batch} ctx{self.ctx} {heads} D{self.dim} p{self.page}{more}"

    @property
    def flops(self) -> float:
        """Useful operations."""
        return 4.0 * self.batch * self.q_len * self.keys * self.q_heads * self.dim

    @property
    def nbytes(self) -> float:
        """Fewest bytes: each input read once, each output written once."""
        keys = (4.0 if self.kv == "bf16" else 2.0) * self.keys * self.kv_heads
        return self.batch * self.dim * (keys + 4.0 * self.q_len * self.q_heads)


def _decode_shapes() -> list[Shape]:
    grid = [(b, c) for c in (1024, 8192, 32768) for b in (1, 16, 64, 256) if (b, c) != (256, 32768)]
    shapes = [Shape(batch=b, ctx=c) for b, c in grid]
    shapes += [Shape(batch=b, ctx=8192, page=16) for b in (16, 64)]
    shapes += [Shape(batch=b, ctx=c, kv_heads=32) for b, c in ((1, 8192), (16, 1024), (16, 8192), (64, 8192))]
    return shapes + [Shape(batch=b, ctx=4096, page=16) for b in (1, 16, 64)]


FAMILIES: dict[str, Callable[[], list[Shape]]] = {
    "decode": _decode_shapes,
    "decode_fp8": lambda: [
        *(Shape(batch=b, ctx=8192, kv="fp8") for b in (1, 16, 64)),
        *(Shape(batch=b, ctx=4096, page=16, kv="fp8") for b in (1, 16, 64)),
    ],
    "tree": lambda: [Shape(batch=b, ctx=4096, page=16, nodes=t) for b in (1, 16, 64) for t in (16, 64)],
}


def data(shape: Shape) -> tuple[list, dict, Any]:
    """Input sets, the plan's arrays, and the oracle's view: (bits bool [batch, nodes, nodes] or None)."""
    rng = np.random.default_rng(0)
    pages = -(-shape.keys // shape.page)
    every = np.arange(shape.batch * pages, dtype=np.int32)
    table = (every if shape.ordered else rng.permutation(every)).reshape(shape.batch, pages)
    kind = jnp.bfloat16 if shape.kv == "bf16" else jnp.float8_e4m3fn
    count = int(min(_MAX_SETS, max(1, math.ceil(_ROTATION_BYTES / shape.nbytes))))

    def one(key):
        kq, kk, kv = jax.random.split(key, 3)
        pool = (shape.batch * pages, shape.page, shape.kv_heads, shape.dim)
        q = jax.random.normal(kq, (shape.batch * shape.q_len, shape.q_heads, shape.dim), jnp.bfloat16)
        keys, values = (jax.random.normal(key, pool, jnp.bfloat16).astype(kind) for key in (kk, kv))
        return q, *(x if shape.kv == "bf16" else jax.lax.bitcast_convert_type(x, jnp.uint8) for x in (keys, values))

    sets = input_sets(one, count)
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
    kind = None if shape.kv == "bf16" else jnp.float8_e4m3fn
    return dict(max_q_len=shape.q_len, sm_scale=shape.dim**-0.5, mask=mask, kv_dtype=kind)


def facts(shape: Shape) -> dict[str, Any]:
    """What sizes are chosen from."""
    return dict(
        max_q_len=shape.q_len,
        group=shape.q_heads // shape.kv_heads,
        kv_heads=shape.kv_heads,
        num_seqs=shape.batch,
        head_dim=shape.dim,
        kv_room=-(-shape.keys // shape.page) * shape.page,
        page_size=shape.page,
        plain_tree=shape.nodes > 0,
        narrow_kv=shape.kv != "bf16",
    )


def default_config(shape: Shape) -> Config:
    """What the kernel takes by itself."""
    return tuned(**facts(shape)) or heuristic(**facts(shape))


def max_rel_err(shape: Shape, out, one, plan, seen) -> float:
    """Worst relative error of some rows."""
    q, k, v = one
    if shape.kv != "bf16":
        k, v = (jax.lax.bitcast_convert_type(x, jnp.float8_e4m3fn).astype(jnp.bfloat16) for x in (k, v))
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
