"""What `bench_attention.py` times of prefill: shapes, inputs, the error against float64, and the kernels."""

# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false

import dataclasses
import importlib
import math
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_attention_timer import input_sets

from pallas_kernels._common.masks import Rules
from pallas_kernels.attention import mosaic_gpu_sm90_prefill as prefill
from pallas_kernels.attention import mosaic_gpu_sm90_prefill_schedule as schedules
from pallas_kernels.attention.mosaic_gpu_sm90_prefill_config import Config, heuristic

_ROTATION_BYTES = 200e6  # over three times the L2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefill:
    """Requests that attend to their own keys, fresh and packed, or with earlier ones behind pages."""

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    q_heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    v_dim: int = 128
    page: int | None = None  # None: packed
    causal: bool = True
    kv: str = "bf16"

    @property
    def family(self) -> str:
        """prefill (packed), prefill_ragged (paged) or mla_prefill."""
        if self.dim != self.v_dim:
            return "mla_prefill"
        return "prefill" if self.page is None else "prefill_ragged"

    @property
    def label(self) -> str:
        """Name of the row, as the published peers' page has it."""
        heads, mask = f"H{self.q_heads}/{self.kv_heads}", "causal" if self.causal else "full"
        if self.page is None:
            size = f"B{len(self.q_lens)}xS{self.q_lens[0]}"
            if self.dim != self.v_dim:
                return f"{size} H{self.q_heads} {self.dim}/{self.v_dim} {mask}"
            return f"{size} {heads} D{self.dim} {mask}"
        chunked = " chunked" if self.q_lens != self.kv_lens else ""
        total = f"q{sum(self.q_lens)} kv{sum(self.kv_lens)} n{len(self.q_lens)}"
        return f"{total} {heads} D{self.dim} p{self.page}{chunked}"

    @property
    def flops(self) -> float:
        """Useful operations, half a square counted for a causal one as the published peers' page does."""
        if self.page is None:
            pairs = sum(q * kv * (0.5 if self.causal else 1.0) for q, kv in zip(self.q_lens, self.kv_lens, strict=True))
        else:
            pairs = sum(q * (kv - q) + q * (q + 1) / 2 for q, kv in zip(self.q_lens, self.kv_lens, strict=True))
        return 2.0 * pairs * self.q_heads * (self.dim + self.v_dim)

    @property
    def nbytes(self) -> float:
        """Fewest bytes: each input read once, each output written once."""
        rows = sum(self.q_lens) * self.q_heads * 2 + sum(self.kv_lens) * self.kv_heads * 2
        return float(rows * (self.dim + self.v_dim))

    @property
    def static(self) -> dict[str, Any]:
        """Keyword arguments that are static."""
        mask = "causal" if self.causal else "full"
        return dict(max_q_len=max(self.q_lens), sm_scale=self.dim**-0.5, mask=mask)

    def default_config(self) -> Config:
        """What the kernel takes by itself."""
        return heuristic(k_dim=self.dim, v_dim=self.v_dim, gathers=(self.page or 8) < 8)

    def data(self) -> tuple[list, dict, None]:
        """Input sets, and the plan's arrays."""
        rng = np.random.default_rng(0)
        lead: tuple[int, ...] = (sum(self.kv_lens),)
        plan: dict[str, Any] = dict(cu_q_lens=jnp.asarray(np.cumsum([0, *self.q_lens]), jnp.int32))
        if self.page is None:
            plan["cu_kv_lens"] = jnp.asarray(np.cumsum([0, *self.kv_lens]), jnp.int32)
        else:
            need = [-(-n // self.page) for n in self.kv_lens]
            order, table = rng.permutation(sum(need)), np.zeros((len(need), max(need)), np.int32)
            for b, n in enumerate(need):
                table[b, :n] = order[sum(need[:b]) :][:n]
            plan |= dict(page_table=jnp.asarray(table), seq_lens=jnp.asarray(self.kv_lens, jnp.int32))
            lead = (sum(need), self.page)

        def one(key):
            kq, kk, kv = jax.random.split(key, 3)
            q = jax.random.normal(kq, (sum(self.q_lens), self.q_heads, self.dim), jnp.bfloat16)
            pools = [
                jax.random.normal(key, (*lead, self.kv_heads, dim), jnp.bfloat16)
                for key, dim in ((kk, self.dim), (kv, self.v_dim))
            ]
            return q, *pools

        count = max(1, math.ceil(_ROTATION_BYTES / self.nbytes))
        return input_sets(one, count), plan, None

    def max_rel_err(self, out, one, plan, seen=None) -> float:
        """Worst relative error of some rows."""
        q, k, v = one
        if not bool(jnp.isfinite(out).all()):
            return math.inf
        out = out.reshape(sum(self.q_lens), self.q_heads, self.v_dim)
        worst, last = 0.0, len(self.q_lens) - 1
        for b, t, h in ((0, 5, 0), (0, self.q_lens[0] // 2 + 3, self.q_heads - 1), (last, self.q_lens[last] - 1, 5)):
            row, head = sum(self.q_lens[:b]) + t, h // (self.q_heads // self.kv_heads)
            seen = self.kv_lens[b] - self.q_lens[b] + t + 1 if self.causal else self.kv_lens[b]
            if self.page is None:
                start = sum(self.kv_lens[:b])
                keys, values = (x[start : start + seen, head] for x in (k, v))
            else:
                pages = plan["page_table"][b, : -(-seen // self.page)]
                keys, values = (x[pages, :, head].reshape(-1, x.shape[-1])[:seen] for x in (k, v))
            keys, values, query, got = (
                np.asarray(x.astype(jnp.float32), np.float64) for x in (keys, values, q[row, h], out[row, h])
            )
            scores = keys @ query * self.dim**-0.5
            weights = np.exp(scores - scores.max())
            want = weights @ values / weights.sum()
            worst = max(worst, float(np.linalg.norm(got - want) / np.linalg.norm(want)))
        return worst


def ours(shape: Prefill, config: Config) -> tuple[Callable, Callable]:
    """The kernel by (q, k, v, plan, schedule), and the schedule by (plan)."""
    rules = Rules(sm_scale=shape.dim**-0.5, mask=shape.static["mask"])

    def schedule(plan):
        cu_kv = plan.get("cu_kv_lens")
        return schedules.make(
            config,
            rules,
            seq_lens=plan["seq_lens"] if cu_kv is None else cu_kv[1:] - cu_kv[:-1],
            cu_q_lens=plan["cu_q_lens"],
            cu_kv_lens=cu_kv,
            num_tokens=sum(shape.q_lens),
            max_q_len=max(shape.q_lens),
            group=shape.q_heads // shape.kv_heads,
        )

    def attend(q, k, v, plan, schedule):
        function = prefill.ragged_attention if shape.page is None else prefill.paged_attention
        return function(q, k, v, **plan, **shape.static, config=config, schedule=schedule)

    return attend, schedule


def _batched(shape: Prefill, call: Callable) -> Callable:
    # a peer of equal requests over [batch, seq, heads, dim]
    def attend(q, k, v, plan, schedule):
        return call(*(x.reshape(len(shape.q_lens), shape.q_lens[0], *x.shape[1:]) for x in (q, k, v))), None

    return attend


def cudnn(shape: Prefill) -> Callable:
    """cuDNN's fused attention, through JAX."""
    scale, causal = shape.dim**-0.5, shape.causal
    return _batched(
        shape,
        lambda q, k, v: jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=causal, implementation="cudnn"),
    )


def tokamax(shape: Prefill) -> Callable:
    """tokamax's Mosaic kernel."""
    for name in ("xprof", "xprof.cli", "xprof.cli.tools", "xprof.cli.tools.get_kernel_stats_tool", "tensorboardX"):
        if name not in sys.modules:  # its own benchmarking alone needs these
            module: Any = types.ModuleType(name)
            module.__path__ = []
            sys.modules[name] = module
            if "." in name:
                setattr(sys.modules[name.rsplit(".", 1)[0]], name.rsplit(".", 1)[1], module)
    attention = importlib.import_module("tokamax").dot_product_attention
    scale, causal = shape.dim**-0.5, shape.causal
    return _batched(shape, lambda q, k, v: attention(q, k, v, scale=scale, is_causal=causal, implementation="mosaic"))


def linear(shape: Prefill) -> Callable:
    """jax-linear-attention's Mosaic kernel: causal, equal requests."""
    attention = importlib.import_module("jla.ops.mosaic_gpu.attention").flash_attention
    return _batched(shape, lambda q, k, v: attention(q, k, v, scale=shape.dim**-0.5))


PEERS: dict[str, tuple[Callable[[Prefill], bool], Callable[[Prefill], Callable], str]] = {
    "jax_cudnn": (lambda s: s.page is None and s.dim == s.v_dim, cudnn, ""),
    "tokamax": (lambda s: s.page is None, tokamax, ""),
    "jla": (lambda s: s.page is None and s.causal and s.dim != 256, linear, ""),
}


def _square(batch: int, length: int, **more) -> Prefill:
    return Prefill(q_lens=(length,) * batch, kv_lens=(length,) * batch, **more)


_RAGGED = (509, 1021, 2053, 4099, 8702)
_CHUNKS = dict(q_lens=(2048,) * 8, kv_lens=(8192,) * 8)
FAMILIES: dict[str, Callable[[], list[Prefill]]] = {
    "prefill": lambda: [
        _square(1, 16384),
        _square(2, 8192),
        _square(2, 8192, causal=False),
        _square(2, 8192, dim=256, v_dim=256),
        _square(2, 8192, dim=64, v_dim=64),
        _square(8, 2048),
    ],
    "prefill_ragged": lambda: [
        Prefill(q_lens=_RAGGED, kv_lens=_RAGGED, page=16),
        Prefill(**_CHUNKS, page=16),
        Prefill(q_lens=_RAGGED, kv_lens=_RAGGED, page=64),
        Prefill(q_lens=_RAGGED, kv_lens=_RAGGED, page=1),
    ],
    "mla_prefill": lambda: [
        _square(batch, length, q_heads=heads, kv_heads=heads, dim=192)
        for batch, length in ((1, 8192), (2, 4096))
        for heads in (128, 16)
    ],
}
