"""What `bench_attention.py` times of absorbed latent attention: shapes, inputs, the error, and the kernels."""

# Settings are passed on as mappings, which the checker cannot follow. torch is no dependency of the project.
# pyright: reportArgumentType=false, reportMissingImports=false, reportPrivateImportUsage=false

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_attention_timer import input_sets

from pallas_kernels._common import masks
from pallas_kernels._common.masks import Rules
from pallas_kernels.attention import mosaic_gpu_sm90_schedule as schedules
from pallas_kernels.mla import mosaic_gpu_sm90 as mla
from pallas_kernels.mla.mosaic_gpu_sm90_config import Config, heuristic

_ROTATION_BYTES = 200e6  # over three times the L2
_MAX_SETS = 48
_LATENT, _ROPE = 512, 64
_SCALE = 192**-0.5  # of DeepSeek's expanded heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
    """A batch of equal requests: some query tokens each, the newest of `ctx` keys, or a tree behind them."""

    batch: int
    ctx: int
    heads: int
    tokens: int = 1
    page: int = 64
    tree: bool = False
    kv: str = "bf16"

    @property
    def family(self) -> str:
        """mla_decode or mla_tree."""
        return "mla_tree" if self.tree else "mla_decode"

    @property
    def label(self) -> str:
        """Name of the row, as the published peers' page has it."""
        if self.tree:
            return f"B{self.batch} T{self.tokens} ctx{self.ctx} H{self.heads} p{self.page}"
        return f"B{self.batch} ctx{self.ctx} H{self.heads} sq{self.tokens} p{self.page}"

    @property
    def keys(self) -> int:
        """Keys a request."""
        return self.ctx + self.tokens * self.tree

    @property
    def flops(self) -> float:
        """Useful operations; each node of a tree counts as if it saw all of it."""
        pairs = self.keys if self.tree else self.keys - (self.tokens - 1) / 2
        return 2.0 * self.batch * self.tokens * self.heads * pairs * (2 * _LATENT + _ROPE)

    @property
    def nbytes(self) -> float:
        """Fewest bytes: each input read once, each output written once."""
        rows = self.batch * self.tokens * self.heads
        return 2.0 * (self.batch * self.keys * (_LATENT + _ROPE) + rows * (2 * _LATENT + _ROPE))

    @property
    def static(self) -> dict[str, Any]:
        """Keyword arguments that are static."""
        mask = "tree" if self.tree else "causal"
        return dict(latent_dim=_LATENT, max_q_len=self.tokens, sm_scale=_SCALE, mask=mask)

    @property
    def pages(self) -> int:
        """Pages a request."""
        return -(-self.keys // self.page)

    def default_config(self) -> Config:
        """What the kernel takes by itself."""
        return heuristic(
            max_q_len=self.tokens,
            num_heads=self.heads,
            num_seqs=self.batch,
            k_dim=_LATENT + _ROPE,
            kv_room=self.pages * self.page,
        )

    def data(self) -> tuple[list, dict, Any]:
        """Input sets, the plan's arrays, and which nodes each node of a tree sees, bool [batch, nodes, nodes]."""
        rng = np.random.default_rng(0)
        total = self.batch * self.pages
        cu = np.arange(self.batch + 1, dtype=np.int32) * self.tokens
        plan: dict[str, Any] = dict(
            page_table=jnp.asarray(rng.permutation(total).astype(np.int32).reshape(self.batch, self.pages)),
            seq_lens=jnp.full((self.batch,), self.keys, jnp.int32),
            cu_q_lens=jnp.asarray(cu),
        )

        def one(key):
            kq, kp = jax.random.split(key)
            width = _LATENT + _ROPE
            q = jax.random.normal(kq, (self.batch * self.tokens, self.heads, width), jnp.bfloat16)
            return q, jax.random.normal(kp, (total, self.page, width), jnp.bfloat16)

        count = int(min(_MAX_SETS, max(1, math.ceil(_ROTATION_BYTES / self.nbytes))))
        sets = input_sets(one, count)
        if not self.tree:
            return sets, plan, None
        seen = np.zeros((self.batch, self.tokens, self.tokens), bool)
        for b in range(self.batch):
            for i in range(self.tokens):
                if i:
                    seen[b, i] = seen[b, rng.integers(max(0, i - 8), i)]
                seen[b, i, i] = True
        words = -(-self.tokens // 32)
        padded = np.pad(seen, ((0, 0), (0, 0), (0, 32 * words - self.tokens))).reshape(-1, words, 32)
        bits = (padded.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(-1).astype(np.uint32)
        plan |= dict(tree_bits=jnp.asarray(bits), tree_starts=jnp.full((self.batch,), self.ctx, jnp.int32))
        return sets, plan, seen

    def max_rel_err(self, out, one, plan, seen) -> float:
        """Worst relative error of some rows."""
        q, pages = one
        if not bool(jnp.isfinite(out).all()):
            return math.inf
        out, q = (x.reshape(self.batch, self.tokens, self.heads, -1) for x in (out, q))
        worst, last = 0.0, self.tokens - 1
        for b, t, h in ((0, 0, 0), (self.batch - 1, last, self.heads - 1), (self.batch // 2, self.tokens // 2, 5)):
            rows = pages[plan["page_table"][b]].reshape(-1, pages.shape[-1])[: self.keys]
            rows, query, got = (np.asarray(x.astype(jnp.float32), np.float64) for x in (rows, q[b, t, h], out[b, t, h]))
            scores = rows @ query * _SCALE
            if seen is None:
                scores[self.keys - last + t :] = -np.inf
            else:
                scores[self.ctx :][~seen[b, t]] = -np.inf
            weights = np.exp(scores - scores.max())
            want = weights @ rows[:, :_LATENT] / weights.sum()
            worst = max(worst, float(np.linalg.norm(got - want) / np.linalg.norm(want)))
        return worst


def ours(shape: Latent, config: Config) -> tuple[Callable, Callable]:
    """The kernel by (q, pages, plan, schedule), and the schedule by (plan)."""
    rules = Rules(sm_scale=_SCALE, mask=shape.static["mask"])

    def schedule(plan):
        tokens = shape.batch * shape.tokens
        return schedules.make(
            config,
            rules,
            masks.make_tree(rules, tokens, plan.get("tree_bits"), plan.get("tree_starts"), None, None),
            seq_lens=plan["seq_lens"],
            cu_q_lens=plan["cu_q_lens"],
            num_tokens=tokens,
            max_q_len=shape.tokens,
            group=shape.heads,
            page_table=plan["page_table"],
            page_size=shape.page,
        )

    def attend(q, pages, plan, schedule):
        return mla.attend_latent(q, pages, **plan, **shape.static, config=config, schedule=schedule)

    return attend, schedule


def einsum(shape: Latent) -> Callable:
    """Two products and a softmax under XLA. There are no pages: rows are read in their order in the pool."""

    def attend(q, pages, plan, schedule):
        q = q.reshape(shape.batch, shape.tokens, shape.heads, -1)
        rows = pages.reshape(shape.batch, -1, pages.shape[-1])[:, : shape.keys]
        scores = jnp.einsum("bqhd,bkd->bhqk", q, rows, preferred_element_type=jnp.float32) * _SCALE
        if shape.tokens > 1:
            key = jnp.arange(shape.keys)[None]
            seen = key <= shape.keys - shape.tokens + jnp.arange(shape.tokens)[:, None]
            scores = jnp.where(seen, scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
        return jnp.einsum("bhqk,bkd->bqhd", weights, rows[..., :_LATENT]), None

    return attend


def _einsum_fits(shape: Latent) -> bool:
    # its scores, in float32, under 2.2 GB
    return not shape.tree and 4 * shape.batch * shape.tokens * shape.heads * shape.keys < 2.2e9


PEERS: dict[str, tuple[Callable[[Latent], bool], Callable[[Latent], Callable], str]] = {
    "xla_einsum_dense": (_einsum_fits, einsum, "rows read in the pool's order: timed, not checked"),
}


def torch_calls(shape: Latent, sets: list, plan: dict, *, fa3: str | None, flashmla: str | None) -> dict:
    """Peers in torch over the same pages, for causal shapes: as `bench_attention_torch.calls`.

    fa3, flashmla: paths of libraries with vLLM's torch bindings of FlashAttention-3 and FlashMLA.
    """
    import torch

    def wait(_):
        torch.cuda.synchronize()

    found: dict[str, Any] = {}
    if shape.tree:
        return found
    queries = [torch.from_dlpack(q).view(shape.batch, shape.tokens, shape.heads, -1) for q, _ in sets]
    pools = [torch.from_dlpack(pages).unsqueeze(2) for _, pages in sets]
    table, lens = (torch.from_dlpack(plan[name]) for name in ("page_table", "seq_lens"))
    every = list(zip(queries, pools, strict=True))
    if fa3:
        found["fa3"] = (_fa3(shape, fa3, lens, table), every, wait, jnp.from_dlpack, "")
    if flashmla:
        found["flashmla"] = (_flashmla(shape, flashmla, lens, table), every, wait, jnp.from_dlpack, "")
    return found


def _fa3(shape: Latent, path: str, lens, table) -> Callable:
    import torch

    torch.ops.load_library(path)
    ops, nothing = torch.ops._vllm_fa3_C, None
    meta = ops.get_scheduler_metadata(
        shape.batch, shape.tokens, shape.keys, shape.heads, 1, _ROPE, _LATENT, torch.bfloat16, lens,
        *[nothing] * 5, shape.page, 0, True, -1, -1, False, 0, nothing, 0,
    )  # fmt: skip

    def call(q, rows):
        latent, key = rows[..., :_LATENT], rows[..., _LATENT:]
        return ops.fwd(
            q[..., _LATENT:], key, latent, nothing, nothing, q[..., :_LATENT], *[nothing] * 5, lens, nothing, nothing,
            table, *[nothing] * 8, _SCALE, True, -1, -1, 0.0, True, meta, 0, nothing, 0, nothing, 1, 0, nothing,
        )[0]  # fmt: skip

    return call


def _flashmla(shape: Latent, path: str, lens, table) -> Callable:
    import torch

    torch.ops.load_library(path)
    decode, held = torch.ops._flashmla_C.dense_decode_fwd, [None, None]  # its schedule, made by the first call

    def call(q, rows):
        out, _, *held[:] = decode(q, rows, _LATENT, lens, table, _SCALE, shape.tokens > 1, *held, None)
        return out

    return call


FAMILIES: dict[str, Callable[[], list[Latent]]] = {
    "mla_decode": lambda: [
        Latent(batch=batch, ctx=ctx, heads=heads, tokens=tokens)
        for batch in (1, 16, 64, 128)
        for ctx in (4096, 16384)
        for heads in (16, 128)
        for tokens in (1, 4)
    ],
    "mla_tree": lambda: [
        Latent(batch=batch, ctx=4096, heads=heads, tokens=nodes, tree=True)
        for batch in (1, 16, 64)
        for nodes in (16, 64)
        for heads in (16, 128)
    ],
}
