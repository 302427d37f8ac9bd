"""Where the tokens of a draft are stored: slots behind each request's own, a run of them for each branch.

Everything here is arithmetic on lengths and slot tables, and runs on the host or inside jit. `token_slots` is a slot
for each sequence index, i32[seqs, width]: the rows of the original's req_to_token that a batch uses.
"""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    """The static shape of a draft. Raises: ValueError for sizes below 1."""

    topk: int
    num_steps: int
    page_size: int = 1

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"DraftShape.{field.name}={getattr(self, field.name)}: want at least 1")

    @property
    def max_branch_pages(self) -> int:
        """Pages that a branch may touch, the one of the prefix's tail included."""
        return -(-(self.page_size - 1 + self.num_steps) // self.page_size)


def reserved_slots(shape: DraftShape, num_draft_tokens: int) -> int:
    """Slots that a request owns past its tokens before it drafts: twice a round's need, so that the next can overlap.

    >>> reserved_slots(DraftShape(topk=2, num_steps=3, page_size=4), num_draft_tokens=5)
    32
    """
    if shape.page_size > 1 and shape.topk > 1:
        return 2 * max(shape.max_branch_pages * shape.page_size * shape.topk, num_draft_tokens)
    return 2 * max(shape.num_steps * shape.topk, num_draft_tokens)


def branch_starts(seq_lens: jax.Array, shape: DraftShape) -> jax.Array:
    """Sequence index where each branch's run begins, i32[seqs, topk].

    A run begins where the prefix's last partial page does, so that its first `seq_len % page_size` slots hold (branch
    0) or repeat (the others, see `tail_copies`) the prefix's tail. With pages of one token that is the prefix's end.

    Args: seq_lens: i32[seqs], tokens cached before drafting.
    """
    lens = jnp.asarray(seq_lens, jnp.int32)
    tail = lens % shape.page_size
    run = _cdiv(tail + shape.num_steps, shape.page_size) * shape.page_size
    return (lens - tail)[:, None] + run[:, None] * jnp.arange(shape.topk, dtype=jnp.int32)[None]


def draft_slots(token_slots: jax.Array, seq_lens: jax.Array, shape: DraftShape) -> jax.Array:
    """Slot of step s of branch t of request b, i32[seqs, topk, num_steps]; flattened, the original's out_cache_loc.

    >>> draft_slots(400 + jnp.arange(40)[None], jnp.array([6]), DraftShape(topk=2, num_steps=3, page_size=4)).tolist()
    [[[406, 407, 408], [414, 415, 416]]]
    """
    tail = jnp.asarray(seq_lens, jnp.int32) % shape.page_size
    first = branch_starts(seq_lens, shape) + tail[:, None]
    return slots_at(token_slots, first[:, :, None] + jnp.arange(shape.num_steps, dtype=jnp.int32)[None, None])


def by_step(slots: jax.Array) -> jax.Array:
    """[seqs, topk, num_steps] -> [num_steps, seqs * topk]: row i is what the i-th draft forward writes."""
    return slots.transpose(2, 0, 1).reshape(slots.shape[2], -1)


def draft_positions(seq_lens: jax.Array, step: int | jax.Array, topk: int) -> jax.Array:
    """Rotary positions of draft forward `step`, i32[seqs * topk]: one past the prefix at step 0."""
    return jnp.repeat(jnp.asarray(seq_lens, jnp.int32), topk) + step


def tail_copies(token_slots: jax.Array, seq_lens: jax.Array, shape: DraftShape) -> tuple[jax.Array, jax.Array]:
    """Rows of the cache to copy before drafting, so that each branch's pages hold the prefix's tail.

    Returns: source, target, i32[seqs, topk - 1, page_size - 1]; -1 in both where there is nothing to copy. Branch 0
      uses the tail's own page.

    >>> shape = DraftShape(topk=2, num_steps=3, page_size=4)
    >>> source, target = tail_copies(400 + jnp.arange(40)[None], jnp.array([6]), shape)
    >>> source.tolist(), target.tolist()
    ([[[404, 405, -1]]], [[[412, 413, -1]]])
    """
    starts = branch_starts(seq_lens, shape)
    offsets = jnp.arange(shape.page_size - 1, dtype=jnp.int32)[None, None]
    tail = (jnp.asarray(seq_lens, jnp.int32) % shape.page_size)[:, None, None]
    target = slots_at(token_slots, starts[:, 1:, None] + offsets)
    source = jnp.broadcast_to(slots_at(token_slots, starts[:, :1, None] + offsets), target.shape)
    return jnp.where(offsets < tail, source, -1), jnp.where(offsets < tail, target, -1)


def slots_at(token_slots: jax.Array, idx: jax.Array) -> jax.Array:
    """token_slots[b, idx[b, ...]], i32 of idx's shape; an index past the table reads its last entry."""
    table = jnp.asarray(token_slots, jnp.int32)
    seq = jnp.arange(table.shape[0]).reshape(-1, *(1,) * (idx.ndim - 1))
    return table[seq, jnp.clip(idx, 0, table.shape[1] - 1)]


def _cdiv(a: jax.Array, b: int) -> jax.Array:
    return -(-a // b)
