"""Page tables of draft forwards: one pass over a table a branch, or a shared prefix and a short table a branch."""

import dataclasses

import jax
import jax.numpy as jnp

from jattn.draft.slots import DraftShape, branch_starts, slots_at


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockTable:
    """One attention pass over pages."""

    cu_q_lens: jax.Array  # i32[rows + 1]
    cache_seqlens: jax.Array  # i32[rows], keys that a row's queries read
    page_table: jax.Array  # i32[rows, pages]; entries past cdiv(cache_seqlens, page_size) are never read
    causal: bool = dataclasses.field(metadata=dict(static=True))  # bottom-right; else every key is seen

    @property
    def cu_kv_lens(self) -> jax.Array:
        """i32[rows + 1], offsets of packed keys."""
        return offsets_of(self.cache_seqlens)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cascade:
    """Two passes whose states are merged by log-sum-exp: what all branches share, then what each has alone."""

    prefix: BlockTable
    branch: BlockTable


def page_table_of(token_slots: jax.Array, page_size: int) -> jax.Array:
    """Page ids behind a slot table, i32[seqs, cdiv(width, page_size)]: the page of every page_size-th slot."""
    return jnp.asarray(token_slots, jnp.int32)[:, ::page_size] // page_size


def branch_tables(
    token_slots: jax.Array, seq_lens: jax.Array, kv_lens: jax.Array, shape: DraftShape, *, by_token: bool = False
) -> BlockTable:
    """A table a branch, from the first token to its last page, so that one pass of one query a row reads all.

    For a chain it is the request's own table. With topk > 1 and longer pages it needs `tail_copies` first.

    Args:
      kv_lens: i32[seqs * topk], keys of each row.
      by_token: table entries are slots, as if pages had one token; the prefix then is read where it lies.

    Returns: tables of cdiv(width, page_size) entries.
    """
    lens = jnp.asarray(seq_lens, jnp.int32)
    view = 1 if by_token else shape.page_size
    first = jnp.arange(0, token_slots.shape[1], view, dtype=jnp.int32)[None, None]  # sequence index of each entry
    shared = (lens - lens % view)[:, None, None]
    own = branch_starts(lens, shape)[:, :, None] + first - (lens - lens % shape.page_size)[:, None, None]
    entries = slots_at(token_slots, jnp.where(first < shared, first, own)) // view
    rows = kv_lens.shape[0]
    return BlockTable(
        cu_q_lens=jnp.arange(rows + 1, dtype=jnp.int32),
        cache_seqlens=kv_lens,
        page_table=entries.reshape(rows, -1),
        causal=True,
    )


def cascade_step(token_slots: jax.Array, seq_lens: jax.Array, step: int | jax.Array, shape: DraftShape) -> Cascade:
    """The two passes of draft forward `step` with topk > 1.

    The prefix pass has the request's topk queries over its full pages, unmasked; the branch pass one query a row over
    the branch's own pages, the prefix's partial page among them (`tail_copies` has put it there).

    >>> slots = jnp.array([[400], [800]]) + jnp.arange(40)[None]
    >>> step = cascade_step(slots, jnp.array([6, 4]), 0, DraftShape(topk=2, num_steps=3, page_size=4))
    >>> step.prefix.cache_seqlens.tolist(), step.branch.cache_seqlens.tolist(), step.branch.page_table[:, 0].tolist()
    ([4, 4], [3, 3, 1, 1], [101, 103, 201, 202])
    """
    lens = jnp.asarray(seq_lens, jnp.int32)
    num_seqs, page_size = lens.shape[0], shape.page_size
    tail = lens % page_size
    pages = jnp.arange(shape.max_branch_pages, dtype=jnp.int32)[None, None] * page_size
    own = slots_at(token_slots, branch_starts(lens, shape)[:, :, None] + pages) // page_size
    rows = num_seqs * shape.topk
    return Cascade(
        prefix=BlockTable(
            cu_q_lens=jnp.arange(num_seqs + 1, dtype=jnp.int32) * shape.topk,
            cache_seqlens=lens - tail,
            page_table=page_table_of(token_slots, page_size),
            causal=False,
        ),
        branch=BlockTable(
            cu_q_lens=jnp.arange(rows + 1, dtype=jnp.int32),
            cache_seqlens=jnp.repeat(tail, shape.topk) + step + 1,
            page_table=own.reshape(rows, -1),
            causal=False,
        ),
    )


def offsets_of(lens: jax.Array) -> jax.Array:
    """[0, cumsum(lens)] as i32."""
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lens, dtype=jnp.int32)])
