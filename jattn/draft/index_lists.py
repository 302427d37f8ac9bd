"""Slots that each row of a draft forward reads, as packed lists: for kernels that address single tokens."""

import dataclasses

import jax
import jax.numpy as jnp

from jattn.draft.slots import DraftShape, branch_starts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IndexLists:
    """Lists of every draft forward: row z = b * topk + t of forward i is kv_indices[i, indptr[z]:indptr[z+1]]."""

    kv_indptr: jax.Array  # i32[num_steps, seqs * topk + 1]
    kv_indices: jax.Array  # i32[num_steps, seqs * topk * max_context_len]; 0 past the last list

    @property
    def kv_lens(self) -> jax.Array:
        """Length of each list, i32[num_steps, seqs * topk]."""
        return self.kv_indptr[:, 1:] - self.kv_indptr[:, :-1]


def used_len(sum_seq_lens: int, num_seqs: int, step: int, topk: int) -> int:
    """Entries that the lists of forward `step` fill: its prefixes, once a branch, and step + 1 own tokens a row."""
    return sum_seq_lens * topk + num_seqs * topk * (step + 1)


def kv_lists(
    token_slots: jax.Array,
    seq_lens: jax.Array,
    shape: DraftShape,
    *,
    max_context_len: int | None = None,
    window: int | None = None,
    num_sink_tokens: int = 0,
) -> IndexLists:
    """Lists for every forward of a draft: the prefix's slots, then the branch's own up to and including this step.

    Args:
      token_slots: i32[seqs, width]. seq_lens: i32[seqs], tokens cached before drafting.
      max_context_len: longest list (default: width). The buffer is topk times as wide as one list a request would need,
        since every branch lists the prefix again.
      window: where given, the prefix is its first `num_sink_tokens` and its last `window` tokens.

    >>> slots = jnp.array([[100], [200]]) + jnp.arange(12)[None]
    >>> lists = kv_lists(slots, jnp.array([3, 2]), DraftShape(topk=2, num_steps=3))
    >>> lists.kv_indptr[0].tolist(), lists.kv_indices[0, :8].tolist()
    ([0, 4, 8, 11, 14], [100, 101, 102, 103, 100, 101, 102, 106])
    """
    lens = jnp.asarray(seq_lens, jnp.int32)
    table = jnp.asarray(token_slots, jnp.int32)
    num_rows = table.shape[0] * shape.topk
    width = num_rows * (max_context_len or table.shape[1])
    kept = lens if window is None else jnp.minimum(lens, num_sink_tokens + window)
    own = (lens % shape.page_size)[:, None] + branch_starts(lens, shape)  # sequence index of each branch's step 0
    row_kept, row_lens = jnp.repeat(kept, shape.topk), jnp.repeat(lens, shape.topk)
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(row_kept, dtype=jnp.int32)])
    entries = jnp.arange(width, dtype=jnp.int32)

    def of_step(step: jax.Array) -> tuple[jax.Array, jax.Array]:
        indptr = before + jnp.arange(num_rows + 1, dtype=jnp.int32) * (step + 1)
        row = jnp.clip(jnp.searchsorted(indptr, entries, side="right") - 1, 0, num_rows - 1)
        offset = entries - indptr[row]
        recent = offset + row_lens[row] - row_kept[row]  # past the sinks, the newest tokens
        idx = jnp.where(offset < num_sink_tokens, offset, recent)
        idx = jnp.where(offset < row_kept[row], idx, own.reshape(-1)[row] + offset - row_kept[row])
        slots = table[row // shape.topk, jnp.clip(idx, 0, table.shape[1] - 1)]
        return indptr, jnp.where(entries < indptr[-1], slots, 0)

    indptr, indices = jax.vmap(of_step)(jnp.arange(shape.num_steps, dtype=jnp.int32))
    return IndexLists(kv_indptr=indptr, kv_indices=indices)
