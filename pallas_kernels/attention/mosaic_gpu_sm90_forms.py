"""Which Hopper kernel attends: that of few query rows a request (decode, verify, trees), or that of many (prefill)."""

import jax
import jax.numpy as jnp

from pallas_kernels._common import float8
from pallas_kernels.attention import mosaic_gpu_sm90 as decode
from pallas_kernels.attention import mosaic_gpu_sm90_prefill as prefill
from pallas_kernels.attention import xla

MOST_DECODE_ROWS = 64
"""Query tokens a request up to which the decode kernel serves: it cuts keys among programs where queries are few."""
_TREE = ("tree_bits", "tree_starts", "tree_kv_positions", "q_positions")


def is_prefill(*, max_q_len: int, mask: str, narrow_kv: bool, dtype, k_dim: int, v_dim: int) -> bool:
    """Whether a call over pages is the prefill kernel's.

    narrow_kv: 8-bit pages, which the prefill kernel widens beside float16 queries and heads of up to 192 and 128; other
    ones are the decode kernel's at any length.
    """
    if max_q_len <= MOST_DECODE_ROWS or mask == "tree":
        return False
    return not narrow_kv or (jnp.dtype(dtype) == jnp.float16 and k_dim <= 192 and v_dim <= 128)


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    *,
    max_q_len: int,
    mask: str = "causal",
    kv_dtype: jax.typing.DTypeLike | None = None,
    **more,
) -> tuple[jax.Array, jax.Array]:
    """Attention over pages; arguments, results and errors as in `pallas_kernels.attention.xla.paged_attention`."""
    narrow = float8.kind_of(k_pages, kv_dtype) in float8.KINDS
    common = dict(max_q_len=max_q_len, mask=mask, kv_dtype=kv_dtype)
    of_prefill = is_prefill(
        max_q_len=max_q_len, mask=mask, narrow_kv=narrow, dtype=q.dtype, k_dim=q.shape[2], v_dim=v_pages.shape[3]
    )
    if not of_prefill:
        return decode.paged_attention(q, k_pages, v_pages, **common, **more)
    return prefill.paged_attention(q, k_pages, v_pages, **common, **_without_tree(mask, more))


def ragged_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, mask: str = "causal", **more
) -> tuple[jax.Array, jax.Array]:
    """Attention over packed keys; arguments, results and errors as in `pallas_kernels.attention.xla.ragged_attention`.

    The prefill kernel's at any length. Trees are plain JAX's: what verifies a tree has its keys in pages, but for the
    expanded forms of latent attention, which are for more query tokens than trees have.
    """
    if mask == "tree":
        return xla.ragged_attention(q, k, v, mask=mask, **more)
    return prefill.ragged_attention(q, k, v, mask=mask, **_without_tree(mask, more))


def _without_tree(mask: str, more: dict) -> dict:
    if mask != "tree" and more.get("tree_bits") is not None:
        raise ValueError(f"tree_bits given with mask={mask!r}: want mask='tree', or no bits")
    return {name: x for name, x in more.items() if name not in _TREE}
