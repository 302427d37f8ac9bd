"""The kernels that `bench_attention.py` times: ours, and JAX's own alternatives."""

# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false

from collections.abc import Callable

import jax.numpy as jnp
from bench_attention_shapes import Shape, static

from pallas_kernels._common import masks
from pallas_kernels._common.masks import Rules
from pallas_kernels.attention import mosaic_gpu_sm90 as sm90
from pallas_kernels.attention import mosaic_gpu_sm90_schedule as schedules
from pallas_kernels.attention.mosaic_gpu_sm90_config import Config


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
        scales = {} if shape.kv == "bf16" else dict(k_scale=jnp.float32(1), v_scale=jnp.float32(1))
        return sm90.paged_attention(q, k, v, **plan, **static(shape), **scales, config=config, schedule=schedule)

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
