"""How each backend reads a draft that the target scores, as rows, and the plan of a verification by name."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jattn.draft.block_tables import BlockTable, Cascade
from jattn.draft.verify import (
    ListVerify,
    verify_cascade,
    verify_chain,
    verify_chain_by_row,
    verify_lists,
    verify_window,
)
from jattn.platforms.lookup import named


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRow:
    """The form of one variant's verification."""

    form: (
        str  # "chain" (one causal pass), "rows" (a query a row), "lists" (flat mask), "cascade" (a tree in two passes)
    )
    with_nodes: bool = False  # of lists: the nodes' slots are listed too
    mla_form: str | None = None  # for MLA models, where it is another


_CHAIN = VerifyRow(form="chain")
_CASCADE = VerifyRow(form="cascade")

VERIFY_ROWS: Mapping[str, VerifyRow] = {
    "triton": VerifyRow(form="lists"),
    "flashinfer": VerifyRow(form="lists", with_nodes=True),
    "aiter": VerifyRow(form="lists", mla_form="chain"),
    "fa3": _CASCADE,
    "fa4": _CASCADE,
    "fa3_musa": _CASCADE,
    "fa4_musa": _CASCADE,
    "intel_xpu": _CASCADE,
    "flashinfer_mla": _CHAIN,
    "flashmla": _CHAIN,
    "trtllm_mha": _CHAIN,
    "trtllm_mla": _CHAIN,
    "cutedsl_mla": _CHAIN,
    "tokenspeed_mla": _CHAIN,
    "ascend": _CHAIN,
    "dsa": VerifyRow(form="rows"),
}


def plan_verify(
    variant: str,
    token_slots: jax.Array,
    seq_lens: jax.Array,
    num_nodes: int,
    page_size: int,
    *,
    tree_mask: jax.Array | None = None,
    depths: jax.Array | None = None,
    window: int | None = None,
    use_mla: bool = False,
) -> BlockTable | Cascade | ListVerify:
    """What the target reads to score `num_nodes` tokens a request, in the form of the variant's kernels.

    Args:
      token_slots: i32[seqs, width], a slot for each sequence index, nodes included. seq_lens: i32[seqs], without them.
      tree_mask: bool[seqs, num_nodes, num_nodes], node i sees node j; None for a chain.
      depths: i32[seqs, num_nodes], read with `window` (keys seen by position, the query's own included) alone.

    Raises: ValueError for a variant without a row, a tree for a chain's variant, or a windowed tree over pages.

    >>> plan_verify("flashmla", jnp.arange(64)[None], jnp.array([5]), 4, 64).cache_seqlens.tolist()
    [9]
    """
    row = named(VERIFY_ROWS, variant, what="verifying variant")
    form = row.mla_form if use_mla and row.mla_form else row.form
    if tree_mask is not None and form in ("chain", "rows"):
        raise ValueError(f"{variant} verifies chains, so it takes no tree_mask: draft with topk=1")
    if form == "lists":
        chain = jnp.tril(jnp.ones((1, num_nodes, num_nodes), bool))
        mask = jnp.broadcast_to(chain, (seq_lens.shape[0], *chain.shape[1:])) if tree_mask is None else tree_mask
        return verify_lists(token_slots, seq_lens, mask, with_nodes=row.with_nodes)
    if form == "rows":
        return verify_chain_by_row(token_slots, seq_lens, num_nodes, page_size)
    if tree_mask is None:
        return verify_chain(token_slots, seq_lens, num_nodes, page_size)
    if window is None:
        return verify_cascade(token_slots, seq_lens, tree_mask, page_size)
    if page_size != 1 or depths is None:
        raise ValueError(f"a windowed tree with page_size={page_size} under {variant}: want page_size=1, and depths")
    return verify_window(token_slots, seq_lens, tree_mask, depths, window)
