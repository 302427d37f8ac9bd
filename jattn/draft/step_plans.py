"""How each backend expresses a draft forward, as rows, and the plan of a forward by name."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jattn.draft.block_tables import BlockTable, Cascade, branch_tables, cascade_step
from jattn.draft.index_lists import IndexLists, kv_lists
from jattn.draft.slots import DraftShape
from jattn.platforms.lookup import named


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """The form of one variant's draft forwards."""

    form: str  # "index_lists", "block_table" (one pass), or "cascade" (one pass for a chain, two for a tree)
    trees: bool = True  # topk > 1
    by_token: bool = False  # reads single slots, whatever the page size
    # In the original the query's own token and those drafted this round are seen. Where they are not, only acceptance
    # suffers, since the target verifies.
    sees_own: bool = True


_LISTS = StepRow(form="index_lists")
_CASCADE = StepRow(form="cascade")
_CHAIN = StepRow(form="block_table", trees=False)
_BLIND_CHAIN = dataclasses.replace(_CHAIN, sees_own=False)

STEP_ROWS: Mapping[str, StepRow] = {
    "triton": _LISTS,
    "flashinfer": _LISTS,
    "flashinfer_mla": dataclasses.replace(_LISTS, trees=False),
    "aiter": _LISTS,
    "fa3": _CASCADE,
    "fa4": _CASCADE,
    "fa3_musa": _CASCADE,
    "fa4_musa": _CASCADE,
    "intel_xpu": _CASCADE,
    "intel_amx": StepRow(form="block_table", by_token=True),
    "trtllm_mha": _CHAIN,
    "flashmla": _BLIND_CHAIN,
    "trtllm_mla": _BLIND_CHAIN,
    "cutedsl_mla": _BLIND_CHAIN,
    "tokenspeed_mla": _BLIND_CHAIN,
    "dsa": _BLIND_CHAIN,
    "dsv4": _BLIND_CHAIN,
    "dsv4_hip": _CHAIN,
    "dsv4_npu": _CHAIN,
    "ascend": StepRow(form="block_table"),
    "qsa": _CHAIN,
}


def step_kv_lens(
    variant: str, seq_lens: jax.Array, step: int | jax.Array, topk: int, *, parity: bool = False
) -> jax.Array:
    """Keys that each row of draft forward `step` reads, i32[seqs * topk]: the prefix and step + 1 own tokens.

    Args: parity: leave the own tokens out where the original does, to draft bit for bit what it drafts.
    Raises: ValueError for a variant without a row.

    >>> step_kv_lens("flashmla", jnp.array([5]), 1, 1).tolist()
    [7]
    >>> step_kv_lens("flashmla", jnp.array([5]), 1, 1, parity=True).tolist()
    [5]
    """
    row = step_row(variant)
    own = step + 1 if row.sees_own or not parity else 0
    return jnp.repeat(jnp.asarray(seq_lens, jnp.int32), topk) + own


def plan_step(
    variant: str,
    token_slots: jax.Array,
    seq_lens: jax.Array,
    step: int | jax.Array,
    shape: DraftShape,
    *,
    parity: bool = False,
) -> IndexLists | BlockTable | Cascade:
    """What draft forward `step` reads, in the form of the variant's kernels. Runs inside jit; `step` may be traced.

    Args:
      token_slots: i32[seqs, width], a slot for each sequence index, drafts included.
      seq_lens: i32[seqs], tokens cached before drafting; the same for every step.

    Returns: for index lists, those of this forward alone (leading axis 1).
    Raises: ValueError for a variant without a row (`native` reads its tree through ancestor bits: it needs no plan
      here), or topk > 1 where it drafts chains.
    """
    row = step_row(variant)
    if shape.topk > 1 and not row.trees:
        raise ValueError(f"topk={shape.topk}: {variant} drafts chains, so it needs topk=1")
    if row.form == "index_lists":
        lists = kv_lists(token_slots, seq_lens, shape)
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, step, 1), lists)
    if row.form == "cascade" and shape.topk > 1:
        return cascade_step(token_slots, seq_lens, step, shape)
    kv_lens = step_kv_lens(variant, seq_lens, step, shape.topk, parity=parity)
    return branch_tables(token_slots, seq_lens, kv_lens, shape, by_token=row.by_token)


def step_row(variant: str) -> StepRow:
    """The row of a variant. Raises: ValueError with the list of variants."""
    return named(STEP_ROWS, variant, what="draft variant")
