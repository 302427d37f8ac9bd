"""Cut packed queries into tiles of one request each, and tiles into runs of key blocks.

Work follows what is there: a tile without keys is in no run, and runs are ordered by length so that lanes which work
together end together.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels._common import ints


class Tiles(NamedTuple):
    """One entry a tile, i32[tiles] each; entries past the last real tile have `rows` 0 and an empty key range."""

    seq: jax.Array  # request
    row: jax.Array  # first packed query row
    rows: jax.Array  # query rows in use, 0 <= rows <= block_q
    first: jax.Array  # sequence index of the first query row (negative before the first key)
    low: jax.Array  # first key that any row may see
    high: jax.Array  # one past the last key that any row may see; low when there is none


class Runs(NamedTuple):
    """Tiles with their part of the key blocks, longest run first; i32[runs] each."""

    tile: Tiles
    begin: jax.Array  # first key block
    end: jax.Array  # one past the last key block
    rank: jax.Array  # where in this order the run of (tile, split) went: index tile * splits + split


def count(num_tokens: int, num_seqs: int, max_q_len: int, block_q: int, shortest: int) -> int:
    """Most tiles that any lengths can need, for requests with `shortest` to `max_q_len` rows."""
    seqs = min(num_seqs, num_tokens // max(shortest, 1))  # that many requests fit the rows at most
    return min(num_tokens // block_q + seqs, seqs * -(-max_q_len // block_q))


def run_of(starts: jax.Array, ids: jax.Array) -> jax.Array:
    """Which interval of `starts` (i32[n + 1], from 0, not decreasing) each id lies in; n for ids past the end."""
    return jnp.sum(starts[1:, None] <= ids[None, :], axis=0, dtype=jnp.int32)


def make(
    seq_lens: jax.Array, cu_q_lens: jax.Array, chosen: jax.Array, *, num_tiles: int, block_q: int
) -> tuple[Tiles, jax.Array]:
    """Tiles of the `chosen` (bool[seqs]) requests in packed order, with ranges over all keys of the request.

    Returns: the tiles, and i32[seqs + 1] tile offsets of the requests.
    """
    num_seqs = seq_lens.shape[0]
    q_lens = jnp.where(chosen, cu_q_lens[1:] - cu_q_lens[:-1], 0)
    per_seq = ints.cdiv(q_lens, block_q)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(per_seq, dtype=jnp.int32)])
    ids = jnp.arange(num_tiles, dtype=jnp.int32)
    real = ids < starts[-1]
    seq = jnp.minimum(run_of(starts, ids), num_seqs - 1)
    offset = (ids - ints.pick(starts, seq)) * block_q
    tiles = Tiles(
        seq=seq,
        row=jnp.where(real, ints.pick(cu_q_lens, seq) + offset, 0),
        rows=jnp.where(real, jnp.minimum(ints.pick(q_lens, seq) - offset, block_q), 0),
        first=ints.pick(seq_lens - q_lens, seq) + offset,
        low=jnp.zeros_like(seq),
        high=jnp.where(real, ints.pick(seq_lens, seq), 0),
    )
    return tiles, starts


def split(tiles: Tiles, *, block_kv: int, splits: int) -> Runs:
    """Each tile's key blocks in `splits` even parts, all parts ordered by length."""
    num = tiles.seq.shape[0] * splits
    part = ints.rem(jnp.arange(num, dtype=jnp.int32), splits)
    tiles = jax.tree.map(lambda x: jnp.repeat(x, splits, total_repeat_length=num), tiles)
    begin, end = ints.div(tiles.low, block_kv), ints.cdiv(tiles.high, block_kv)
    share = ints.cdiv(end - begin, splits)
    begin = jnp.minimum(begin + part * share, end)
    end = jnp.where(tiles.high > tiles.low, jnp.minimum(begin + share, end), begin)
    if num == 1:
        return Runs(tiles, begin, end, jnp.zeros(1, jnp.int32))
    order = jnp.argsort(begin - end, stable=True)
    rank = (
        jnp.zeros(num, jnp.int32)
        .at[order]
        .set(jnp.arange(num, dtype=jnp.int32), unique_indices=True, wrap_negative_indices=False)
    )
    tiles, begin, end = jax.tree.map(lambda x: ints.pick(x, order), (tiles, begin, end))
    return Runs(tiles, begin, end, rank)
