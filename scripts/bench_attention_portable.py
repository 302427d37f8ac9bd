"""The portable GPU set beside the Hopper kernels, for `bench_attention.py --portable`."""

# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false

from collections.abc import Callable

import jax.numpy as jnp
from bench_attention_mla import Latent
from bench_attention_prefill import Prefill
from bench_attention_shapes import Shape, static

from pallas_kernels.attention import gpu as attention
from pallas_kernels.mla import gpu as mla


def portable(shape: Shape | Prefill | Latent) -> Callable:
    """The portable kernel by (q, keys, ..., plan, schedule); it makes no schedule."""
    if isinstance(shape, Latent):
        return lambda q, pages, plan, _: mla.attend_latent(q, pages, **plan, **shape.static)
    if isinstance(shape, Prefill):
        function = attention.ragged_attention if shape.page is None else attention.paged_attention
        return lambda q, k, v, plan, _: function(q, k, v, **plan, **shape.static)
    scales = {} if shape.kv == "bf16" else dict(k_scale=jnp.float32(1), v_scale=jnp.float32(1))
    return lambda q, k, v, plan, _: attention.paged_attention(q, k, v, **plan, **static(shape), **scales)
