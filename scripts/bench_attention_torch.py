"""Peers of `bench_attention.py` in torch: cuDNN over a dense cache, and FlashAttention-3 over the same pages.

They read the arrays that JAX made, without a copy.
"""
# torch is no dependency of the project, and types its operators loosely.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from bench_attention_shapes import Shape

Call = tuple[Callable, list, Callable, Callable | None, str]


def calls(shape: Shape, sets: list, plan: dict, *, fa3: str | None, cudnn: bool) -> dict[str, Call]:
    """Name -> (call, input sets, what waits, what gives the output to JAX or None if it is another's, note)."""
    import torch

    def wait(_):
        torch.cuda.synchronize()

    found: dict[str, Call] = {}
    if shape.kv != "bf16":
        return found
    tensors = [tuple(torch.from_dlpack(x) for x in one) for one in sets]
    queries = [one[0].view(shape.batch, shape.q_len, shape.q_heads, shape.dim) for one in tensors]
    table, lens = (torch.from_dlpack(plan[name]) for name in ("page_table", "seq_lens"))
    if fa3:
        call, meta = _fa3(shape, fa3, lens, table)
        note = "" if not shape.nodes else "causal, as it takes no tree: timed, not checked"
        every = [(q, k, v, meta) for q, (_, k, v) in zip(queries, tensors, strict=True)]
        found["fa3"] = (call, every, wait, None if shape.nodes else jnp.from_dlpack, note)
    if cudnn and not shape.nodes:
        every = [
            (q.transpose(1, 2), *(_dense(shape, x, table) for x in kv))
            for q, (_, *kv) in zip(queries, tensors, strict=True)
        ]
        found["torch_cudnn_dense"] = (_sdpa(shape), every, wait, _tokens_first, "dense cache")
    return found


def _dense(shape: Shape, pages, table):
    # [batch, kv_heads, keys, dim]
    picked = pages[table.long().flatten()].view(shape.batch, -1, shape.kv_heads, shape.dim)
    return picked[:, : shape.keys].transpose(1, 2).contiguous()


def _tokens_first(out):
    return jnp.from_dlpack(out.transpose(1, 2).contiguous())


def _sdpa(shape: Shape) -> Callable:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def call(q, k, v):
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            return scaled_dot_product_attention(
                q, k, v, scale=shape.dim**-0.5, enable_gqa=shape.q_heads != shape.kv_heads
            )

    return call


def _fa3(shape: Shape, path: str, lens, table) -> tuple[Callable, Any]:
    import torch

    torch.ops.load_library(path)
    ops, nothing = torch.ops._vllm_fa3_C, None
    meta = ops.get_scheduler_metadata(
        shape.batch, shape.q_len, shape.keys, shape.q_heads, shape.kv_heads, shape.dim, shape.dim, torch.bfloat16, lens,
        *[nothing] * 5, shape.page, 0, True, -1, -1, False, 0, nothing, 0,
    )  # fmt: skip

    def call(q, k, v, meta):
        return ops.fwd(
            q, k, v, *[nothing] * 8, lens, nothing, nothing, table, *[nothing] * 8, shape.dim**-0.5, True, -1, -1, 0.0,
            True, meta, 0, nothing, 0, nothing, 1, 0, nothing,
        )[0]  # fmt: skip

    return call, meta
