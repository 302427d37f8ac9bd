"""What one forward does, as arrays: which rows belong to which request, where they are written, what they may see."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jattn.modes import ForwardMode
from jattn.spec import check_page_size

Ints = jax.Array | np.ndarray | Sequence  # integers, on the host or traced


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Ancestor bits of draft nodes that are the newest keys of their request. Rectangular: nodes may outnumber queries.

    Keys before `starts` are visible to every query; key `starts + j` iff bit j of the query's row is set.
    """

    bits: jax.Array  # u32[tokens, ceil(max_nodes / 32)], row = query token, bit j = node j, itself included
    starts: jax.Array  # i32[seqs], sequence index of node 0
    kv_positions: jax.Array  # i32[seqs, max_nodes], position (start + depth) of each node, for windows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Rows of a forward over a paged cache. Built by `make_plan`, on the host or inside jit.

    The queries of request b are its last `q_len` cached tokens: row cu_q_lens[b] + i is sequence index
    seq_lens[b] - q_len + i. Rows past cu_q_lens[-1] are padding.
    """

    positions: jax.Array  # i32[tokens], rotary position; start + depth in a tree; 0 for padding rows
    seq_lens: jax.Array  # i32[seqs], tokens cached once this step is written; 0 marks a padding row
    cu_q_lens: jax.Array  # i32[seqs + 1], row offsets into packed queries, first entry 0
    page_table: jax.Array  # i32[seqs, max_pages]; entries past cdiv(seq_len, page_size) are never read
    write_slots: jax.Array  # i32[tokens], page * page_size + offset, by the table; -1 writes nothing
    tree: Tree | None = None
    mode: ForwardMode = dataclasses.field(metadata=dict(static=True))
    max_q_len: int = dataclasses.field(metadata=dict(static=True))  # bound on the rows of a request
    page_size: int = dataclasses.field(metadata=dict(static=True))

    @property
    def num_tokens(self) -> int:
        """Rows, padding included (static)."""
        return self.positions.shape[0]

    @property
    def mask(self) -> str:
        """What a query sees by default: its ancestors, its whole block (diffusion), or the keys up to its own."""
        if self.tree is not None:
            return "tree"
        return "full" if self.mode.is_dllm_extend() else "causal"


def rows_of(cu_q_lens: jax.Array, num_tokens: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Request, index within the request, and validity of each packed row.

    Returns: seq i32[tokens], idx i32[tokens], valid bool[tokens].

    >>> [r.tolist() for r in rows_of(jnp.array([0, 2, 2, 3]), 4)]
    [[0, 0, 2, 2], [0, 1, 0, 1], [True, True, True, False]]
    """
    rows = jnp.arange(num_tokens, dtype=jnp.int32)
    num_seqs = cu_q_lens.shape[0] - 1
    seq = jnp.sum(cu_q_lens[None, 1:] <= rows[:, None], axis=1, dtype=jnp.int32)  # no search loop for a few requests
    valid = rows < cu_q_lens[-1]
    seq = jnp.clip(seq, 0, max(num_seqs - 1, 0))  # padding rows borrow a request; `valid` says so
    return seq, rows - cu_q_lens[seq], valid


def offsets_of(q_lens: jax.Array) -> jax.Array:
    """Row offsets i32[seqs + 1] of packed requests with `q_lens` i32[seqs] rows each.

    >>> offsets_of(jnp.array([2, 0, 1])).tolist()
    [0, 2, 2, 3]
    """
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(q_lens, dtype=jnp.int32)])


def slots_of(page_table: jax.Array, seq: jax.Array, idx: jax.Array, page_size: int) -> jax.Array:
    """Slot of sequence index `idx` of request `seq`: page id * page_size + offset, i32 like `idx`."""
    return page_table[seq, idx // page_size] * page_size + idx % page_size


def make_plan(
    mode: ForwardMode,
    seq_lens: Ints,
    q_lens: Ints,
    page_table: Ints,
    *,
    page_size: int,
    tree: Tree | jax.Array | np.ndarray | None = None,
    num_tokens: int | None = None,
    max_q_len: int | None = None,
) -> Plan:
    """Plan of one forward.

    Args:
      mode: the phase; DECODE has at most one row a request, IDLE and PREBUILT none.
      seq_lens: i32[seqs], tokens cached once this step is written (drafts included); 0 for a padding request.
      q_lens: i32[seqs], rows of each request, its newest tokens.
      page_table: i32[seqs, max_pages], page ids of one layer.
      page_size: tokens a page, 1 to 256.
      tree: ancestor bits u32[tokens, words] of nodes that are exactly the queries, or a `Tree` (rectangular).
      num_tokens, max_q_len: static bounds; taken from `q_lens` when it is concrete, required inside jit.

    Raises: ValueError if shapes disagree, or (concrete values only) if lengths do.
    Source: arXiv:2309.06180 (paging); the tree is arXiv:2305.09781, kept as bits.

    >>> table = np.array([[4, 0], [7, 2]])
    >>> plan = make_plan(ForwardMode.EXTEND, np.array([3, 5]), np.array([3, 1]), table, page_size=4)
    >>> plan.positions.tolist(), plan.write_slots.tolist()
    ([0, 1, 2, 4], [16, 17, 18, 8])
    """
    _check_shapes(seq_lens, q_lens, page_table, page_size)
    if not any(isinstance(x, Tracer) for x in (seq_lens, q_lens, page_table)):
        _check_lengths(mode, np.asarray(seq_lens), np.asarray(q_lens), np.asarray(page_table), page_size)
    num_tokens, max_q_len = _bounds(q_lens, num_tokens, max_q_len)
    if num_tokens and not np.size(page_table):
        raise ValueError(f"page_table{list(np.shape(page_table))} has no page for num_tokens={num_tokens}: want some")
    seq_lens, q_lens, page_table = (jnp.asarray(x, jnp.int32) for x in (seq_lens, q_lens, page_table))
    cu_q_lens = offsets_of(q_lens)
    seq, idx, valid = rows_of(cu_q_lens, num_tokens)
    idx = jnp.where(valid, seq_lens[seq] - q_lens[seq] + idx, 0)
    tree = None if tree is None else _as_tree(tree, seq_lens - q_lens, seq, cu_q_lens, max_q_len)
    positions = idx if tree is None else jnp.where(valid, tree.starts[seq] + _popcount(tree.bits) - 1, 0)
    return Plan(
        positions=positions,
        seq_lens=seq_lens,
        cu_q_lens=cu_q_lens,
        page_table=page_table,
        write_slots=jnp.where(valid, slots_of(page_table, seq, idx, page_size), -1),
        tree=tree,
        mode=mode,
        max_q_len=max_q_len,
        page_size=page_size,
    )


def _popcount(bits: jax.Array) -> jax.Array:
    # u32[tokens, words] -> i32[tokens]; a node's bits are its path from the root, so this is its depth + 1
    return jnp.sum(jax.lax.population_count(bits).astype(jnp.int32), axis=-1)


def _bounds(q_lens, num_tokens: int | None, max_q_len: int | None) -> tuple[int, int]:
    if isinstance(q_lens, Tracer):
        if num_tokens is None or max_q_len is None:
            raise ValueError(
                "make_plan inside jit: q_lens is traced, so give num_tokens= and max_q_len= as Python integers"
            )
        return num_tokens, max_q_len
    total, longest = int(np.sum(q_lens)), int(np.max(q_lens, initial=0))
    num_tokens = total if num_tokens is None else num_tokens
    max_q_len = longest if max_q_len is None else max_q_len
    if num_tokens < total or max_q_len < longest:
        raise ValueError(
            f"num_tokens={num_tokens}, max_q_len={max_q_len} do not hold q_lens={np.asarray(q_lens).tolist()}: "
            "give at least their sum and their maximum"
        )
    return num_tokens, max_q_len


def _as_tree(tree, starts, seq, cu_q_lens, max_q_len) -> Tree:
    if isinstance(tree, Tree):
        return _checked(tree, num_tokens=seq.shape[0], num_seqs=starts.shape[0])
    bits = jnp.asarray(tree, jnp.uint32)
    if bits.ndim != 2 or bits.shape[0] != seq.shape[0]:
        raise ValueError(f"tree.shape={bits.shape}: want u32[tokens={seq.shape[0]}, ceil(nodes / 32)], a row a query")
    if bits.shape[1] * 32 < max_q_len:
        raise ValueError(f"tree has {bits.shape[1]} words a row, room for {bits.shape[1] * 32} nodes, not {max_q_len}")
    num_seqs = starts.shape[0]
    rows = jnp.clip(cu_q_lens[:-1, None] + jnp.arange(max_q_len, dtype=jnp.int32)[None, :], 0, seq.shape[0] - 1)
    depth = _popcount(bits)[rows] - 1
    return Tree(bits=bits, starts=starts, kv_positions=(starts[:, None] + depth).reshape(num_seqs, max_q_len))


def _checked(tree: Tree, *, num_tokens: int, num_seqs: int) -> Tree:
    bits, starts, nodes = (np.shape(x) for x in (tree.bits, tree.starts, tree.kv_positions))
    if len(bits) != 2 or bits[0] != num_tokens or starts != (num_seqs,) or len(nodes) != 2 or nodes[0] != num_seqs:
        raise ValueError(
            f"Tree has bits{list(bits)}, starts{list(starts)}, kv_positions{list(nodes)}: want [tokens={num_tokens}, "
            f"words], [seqs={num_seqs}], [seqs={num_seqs}, max_nodes]"
        )
    if nodes[1] > 32 * bits[1]:
        raise ValueError(f"Tree has {nodes[1]} nodes a request but {bits[1]} words a row: want a bit for each node")
    return tree


def _check_shapes(seq_lens, q_lens, page_table, page_size) -> None:
    check_page_size(page_size)
    shapes = tuple(np.shape(x) for x in (seq_lens, q_lens, page_table))
    if len(shapes[2]) != 2 or any(s != shapes[2][:1] for s in shapes[:2]):
        raise ValueError(
            f"seq_lens{list(shapes[0])}, q_lens{list(shapes[1])}, page_table{list(shapes[2])}: want [seqs], [seqs] and "
            "[seqs, max_pages], one row a request"
        )


def _check_lengths(mode, seq_lens, q_lens, page_table, page_size) -> None:
    if any(x.size and x.dtype.kind not in "iu" for x in (seq_lens, q_lens, page_table)):
        dtypes = ", ".join(str(x.dtype) for x in (seq_lens, q_lens, page_table))
        raise ValueError(f"seq_lens, q_lens, page_table are {dtypes}: want integers")
    if (q_lens < 0).any() or (q_lens > seq_lens).any():
        raise ValueError(
            f"q_lens={q_lens.tolist()}, seq_lens={seq_lens.tolist()}: the rows of a request are its newest cached "
            "tokens, so 0 <= q_len <= seq_len"
        )
    if mode.is_decode() and (q_lens > 1).any():
        raise ValueError(
            f"q_lens={q_lens.tolist()} in DECODE: want at most 1 row a request; use EXTEND or TARGET_VERIFY"
        )
    if (mode.is_idle() or mode.is_prebuilt()) and q_lens.any():
        raise ValueError(f"q_lens={q_lens.tolist()} in {mode.name}: this mode computes no rows")
    room = page_table.shape[1] * page_size
    if (seq_lens > room).any():
        raise ValueError(
            f"seq_lens={seq_lens.tolist()} but page_table holds {page_table.shape[1]} pages of {page_size}: {room}"
        )
