"""Cut packed queries into tiles that belong to one request each, with the key range that each tile can see."""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """One entry a tile; entries past the last real tile have `rows` 0 and an empty range."""

    seq: jax.Array  # i32[tiles], request
    row: jax.Array  # i32[tiles], first packed query row
    rows: jax.Array  # i32[tiles], query rows in use, 0 <= rows <= block_q
    first: jax.Array  # i32[tiles], sequence index of the first query row (negative before the first key)
    low: jax.Array  # i32[tiles], first key that any row may see
    high: jax.Array  # i32[tiles], one past the last key that any row may see; low when there is none


def count(num_tokens: int, num_seqs: int, max_q_len: int, block_q: int) -> int:
    """Most tiles that any lengths can need: a partial tile a request, and no more rows than `max_q_len` allows."""
    return min(num_tokens // block_q + num_seqs, num_seqs * -(-max_q_len // block_q))


def seq_of(starts: jax.Array, ids: jax.Array) -> jax.Array:
    """Which run of `starts` (i32[n + 1], first entry 0, not decreasing) each id lies in; n for ids past the end."""
    return jnp.sum(starts[1:, None] <= ids[None, :], axis=0, dtype=jnp.int32)


def make(seq_lens, cu_q_lens, *, num_tiles: int, block_q: int) -> tuple[Tiles, jax.Array]:
    """Tiles in packed order, and i32[seqs + 1] tile offsets of the requests. Ranges cover all keys of the request."""
    num_seqs = seq_lens.shape[0]
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    per_seq = (q_lens + block_q - 1) // block_q
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(per_seq, dtype=jnp.int32)])
    ids = jnp.arange(num_tiles, dtype=jnp.int32)
    real = ids < starts[-1]
    seq = jnp.minimum(seq_of(starts, ids), num_seqs - 1)
    offset = (ids - starts[seq]) * block_q
    rows = jnp.where(real, jnp.minimum(q_lens[seq] - offset, block_q), 0)
    tiles = Tiles(
        seq=seq,
        row=jnp.where(real, cu_q_lens[seq] + offset, 0),
        rows=rows,
        first=seq_lens[seq] - q_lens[seq] + offset,
        low=jnp.zeros_like(seq),
        high=jnp.where(real, seq_lens[seq], 0),
    )
    return tiles, starts
