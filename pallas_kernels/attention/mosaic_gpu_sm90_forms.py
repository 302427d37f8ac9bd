"""Which Hopper kernel attends: that of few query rows a request (decode, verify, trees), or that of many (prefill)."""

import jax

from pallas_kernels._common import float8
from pallas_kernels.attention import mosaic_gpu_sm90 as decode
from pallas_kernels.attention import mosaic_gpu_sm90_prefill as prefill

MOST_DECODE_ROWS = 64
"""Query tokens a request up to which the decode kernel serves: it cuts keys among programs where queries are few."""
_TREE = ("tree_bits", "tree_starts", "tree_kv_positions", "q_positions")


def is_prefill(*, max_q_len: int, mask: str, narrow_kv: bool) -> bool:
    """Whether a call over pages is the prefill kernel's.

    narrow_kv: 8-bit pages. They are the decode kernel's at any length: only that one's form for them has run on a GPU.
    """
    return max_q_len > MOST_DECODE_ROWS and mask != "tree" and not narrow_kv


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
    if not is_prefill(max_q_len=max_q_len, mask=mask, narrow_kv=narrow):
        return decode.paged_attention(q, k_pages, v_pages, **common, **more)
    if more.get("tree_bits") is not None:
        raise ValueError(f"tree_bits given with mask={mask!r}: want mask='tree', or no bits")
    more = {name: x for name, x in more.items() if name not in _TREE}
    return prefill.paged_attention(q, k_pages, v_pages, **common, **more)
