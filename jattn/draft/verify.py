"""What the target reads when it scores a draft, in the forms of the original's backends.

A request verifies N nodes, written at sequence indices seq_len ... seq_len + N - 1; seq_lens excludes them.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jattn.draft.block_tables import BlockTable, Cascade, offsets_of, page_table_of
from jattn.draft.slots import slots_at


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ListVerify:
    """Packed lists with a flat mask: an extend over the prefix (Triton, AITER), or over nodes too (FlashInfer)."""

    qo_indptr: jax.Array  # i32[seqs + 1], steps of N
    kv_indptr: jax.Array  # i32[seqs + 1]
    kv_indices: jax.Array  # i32[seqs * width]; 0 past the last list
    custom_mask: jax.Array  # bool[seqs * N * width]; request b's block of N x (seq_len + N) starts at mask_indptr[b]
    mask_indptr: jax.Array  # i32[seqs + 1]
    max_extend_len: int = dataclasses.field(metadata=dict(static=True))


def verify_chain(token_slots: jax.Array, seq_lens: jax.Array, num_nodes: int, page_size: int) -> BlockTable:
    """A chain: one causal pass over prefix and nodes. Draft-extend is the same, its own seq_lens less the nodes.

    >>> verify_chain(jnp.arange(32)[None], jnp.array([5]), 4, 8).cache_seqlens.tolist()
    [9]
    """
    lens = jnp.asarray(seq_lens, jnp.int32)
    return BlockTable(
        cu_q_lens=jnp.arange(lens.shape[0] + 1, dtype=jnp.int32) * num_nodes,
        cache_seqlens=lens + num_nodes,
        page_table=page_table_of(token_slots, page_size),
        causal=True,
    )


def verify_chain_by_row(token_slots: jax.Array, seq_lens: jax.Array, num_nodes: int, page_size: int) -> BlockTable:
    """A chain as single-query rows, each with its own length: for kernels that select keys a row (DSA)."""
    lens = jnp.asarray(seq_lens, jnp.int32)
    own = lens[:, None] + jnp.arange(1, num_nodes + 1, dtype=jnp.int32)[None]
    return BlockTable(
        cu_q_lens=jnp.arange(own.size + 1, dtype=jnp.int32),
        cache_seqlens=own.reshape(-1),
        page_table=jnp.repeat(page_table_of(token_slots, page_size), num_nodes, axis=0),
        causal=True,
    )


def verify_cascade(token_slots: jax.Array, seq_lens: jax.Array, tree_mask: jax.Array, page_size: int) -> Cascade:
    """A tree in two passes: all nodes over the prefix, then each over the nodes that it may see.

    Args: tree_mask: bool[seqs, N, N], node i sees node j; the diagonal is set.
    Returns: the second pass as rows of slots (pages of one token), the visible nodes first, in ascending order.
    """
    lens = jnp.asarray(seq_lens, jnp.int32)
    num_seqs, num_nodes, _ = tree_mask.shape
    node_slots = slots_at(token_slots, lens[:, None] + jnp.arange(num_nodes, dtype=jnp.int32)[None])
    slots = _visible_first(tree_mask, jnp.broadcast_to(node_slots[:, None], tree_mask.shape))
    return Cascade(
        prefix=BlockTable(
            cu_q_lens=jnp.arange(num_seqs + 1, dtype=jnp.int32) * num_nodes,
            cache_seqlens=lens,
            page_table=page_table_of(token_slots, page_size),
            causal=False,
        ),
        branch=_rows_of_slots(slots, tree_mask),
    )


def verify_window(
    token_slots: jax.Array, seq_lens: jax.Array, tree_mask: jax.Array, depths: jax.Array, window: int
) -> BlockTable:
    """A tree under a sliding window: one pass over rows of slots, in-window prefix first, then visible nodes in window.

    Args:
      tree_mask: bool[seqs, N, N]. depths: i32[seqs, N]; node i stands at position seq_len + depths[i].
      window: keys seen by position, the query's own included (the original's value + 1).

    Returns: rows of window + N slots (pages of one token).
    """
    lens = jnp.asarray(seq_lens, jnp.int32)[:, None, None]
    depth = jnp.asarray(depths, jnp.int32)
    recent = lens - window + jnp.arange(window, dtype=jnp.int32)[None, None]  # positions of the newest prefix tokens
    in_prefix = (recent >= 0) & (recent > lens + depth[:, :, None] - window)
    near = tree_mask & (depth[:, None] > depth[:, :, None] - window)
    nodes = lens[:, 0] + jnp.arange(depth.shape[1], dtype=jnp.int32)[None]
    idx = jnp.concatenate([jnp.broadcast_to(recent, in_prefix.shape), _spread(nodes, near.shape)], axis=2)
    seen = jnp.concatenate([in_prefix, near], axis=2)
    return _rows_of_slots(_visible_first(seen, slots_at(token_slots, idx)), seen)


def full_mask(tree_mask: jax.Array, seq_lens: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """The flat mask over prefix and nodes: N x (seq_len + N) a request, prefix columns set.

    Args: width: longest seq_len + N.
    Returns: bool[seqs * N * width], False past the last block; mask_indptr i32[seqs + 1].

    >>> mask, indptr = full_mask(jnp.array([[[1, 0], [1, 1]]], bool), jnp.array([1]), 3)
    >>> mask.astype(int).tolist(), indptr.tolist()
    ([1, 1, 0, 1, 1, 1], [0, 6])
    """
    lens = jnp.asarray(seq_lens, jnp.int32)
    num_seqs, num_nodes, _ = tree_mask.shape
    indptr = offsets_of((lens + num_nodes) * num_nodes)
    entries = jnp.arange(num_seqs * num_nodes * width, dtype=jnp.int32)
    seq = jnp.clip(jnp.searchsorted(indptr, entries, side="right") - 1, 0, num_seqs - 1)
    row_len = lens[seq] + num_nodes
    offset = entries - indptr[seq]
    column = offset % row_len - lens[seq]
    node = jnp.clip(offset // row_len, 0, num_nodes - 1)
    seen = (column < 0) | tree_mask[seq, node, jnp.maximum(column, 0)]
    return seen & (entries < indptr[-1]), indptr


def verify_lists(
    token_slots: jax.Array, seq_lens: jax.Array, tree_mask: jax.Array, *, with_nodes: bool = False
) -> ListVerify:
    """A tree as packed lists and a flat mask.

    Args: with_nodes: list the nodes' slots too (FlashInfer's paged prefill); else the prefix alone, the nodes being the
      extend's own keys (Triton, AITER without MLA).
    """
    lens = jnp.asarray(seq_lens, jnp.int32)
    num_seqs, num_nodes, _ = tree_mask.shape
    width = token_slots.shape[1]
    mask, mask_indptr = full_mask(tree_mask, lens, width)
    indptr, indices = packed_prefix(token_slots, lens + num_nodes if with_nodes else lens)
    return ListVerify(
        qo_indptr=jnp.arange(num_seqs + 1, dtype=jnp.int32) * num_nodes,
        kv_indptr=indptr,
        kv_indices=indices,
        custom_mask=mask,
        mask_indptr=mask_indptr,
        max_extend_len=num_nodes,
    )


def window_lists(token_slots: jax.Array, seq_lens: jax.Array, window: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The newest `window` prefix slots of each request, packed, and the first one's index: an offset into the mask.

    Returns: kv_indptr i32[seqs + 1], kv_indices i32[seqs * width], offsets i32[seqs].
    """
    lens = jnp.asarray(seq_lens, jnp.int32)
    offsets = jnp.maximum(lens - window, 0)
    return *packed_prefix(token_slots, lens - offsets, offsets), offsets


def packed_prefix(
    token_slots: jax.Array, lens: jax.Array, starts: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Slots of sequence indices starts ... starts + lens - 1 of each request, packed request by request.

    Returns: indptr i32[seqs + 1], indices i32[seqs * width]; 0 past the last list.
    """
    num_seqs, width = token_slots.shape
    indptr = offsets_of(lens)
    entries = jnp.arange(num_seqs * width, dtype=jnp.int32)
    seq = jnp.clip(jnp.searchsorted(indptr, entries, side="right") - 1, 0, num_seqs - 1)
    idx = entries - indptr[seq] + (0 if starts is None else starts[seq])
    slots = jnp.asarray(token_slots, jnp.int32)[seq, jnp.clip(idx, 0, width - 1)]
    return indptr, jnp.where(entries < indptr[-1], slots, 0)


def pack_mask_bits(mask: np.ndarray, mask_indptr: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A flat mask as bits, lowest first, each request's block padded to whole bytes; on the host.

    Returns: u8[bytes], indptr i32[seqs + 1] in bytes.
    """
    spans = zip(mask_indptr[:-1], mask_indptr[1:], strict=True)
    blocks = [np.packbits(np.asarray(mask[start:stop], bool), bitorder="little") for start, stop in spans]
    indptr = np.cumsum([0, *map(len, blocks)], dtype=np.int32)
    return np.concatenate([np.zeros(0, np.uint8), *blocks]), indptr


def _visible_first(seen: jax.Array, slots: jax.Array) -> jax.Array:
    order = jnp.argsort(~seen, axis=-1, stable=True)
    return jnp.take_along_axis(slots, order, axis=-1)


def _rows_of_slots(slots: jax.Array, seen: jax.Array) -> BlockTable:
    rows = slots.shape[0] * slots.shape[1]
    return BlockTable(
        cu_q_lens=jnp.arange(rows + 1, dtype=jnp.int32),
        cache_seqlens=jnp.sum(seen, axis=-1, dtype=jnp.int32).reshape(-1),
        page_table=slots.reshape(rows, -1),
        causal=False,
    )


def _spread(nodes: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jnp.broadcast_to(nodes[:, None], shape)
