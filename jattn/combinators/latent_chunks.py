"""Which cached latents are expanded together: planned once a forward, in bucketed shapes, so that serving compiles few.

Source: the chunk plan of SGLang (`prepare_chunked_prefix_cache_info`), as in `jattn.dispatch.prefix_chunks`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jattn.dispatch import AttnForwardMethod as M
from jattn.dispatch.prefix_chunks import plan_prefix_chunks
from jattn.plan import Ints, offsets_of, rows_of, slots_of
from pallas_kernels._common import ints

CHUNKED = frozenset({M.MHA_CHUNKED_KV, M.MHA_CHUNKED_KV_ROCM})
BLOCK = 512  # tokens that are expanded at a time where a chunk is longer
# Policies that choose these for prefixes too have kernels that expand the prefix by themselves (aiter, ascend).
_FRESH = frozenset({M.MHA, M.MHA_ROCM, M.MHA_NPU})
ONE_SHOT = frozenset({M.MHA_ONE_SHOT, M.MHA_ONE_SHOT_ROCM})
EXPANDED = CHUNKED | ONE_SHOT | _FRESH


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LatentChunks:
    """Chunk i holds cached tokens starts[i, b] ... starts[i, b] + lens[i, b] - 1 of each request b, request by request.

    The shapes are buckets; chunks past `num_chunks` are never worked on. No chunk at all: nothing is cached.
    """

    slots: jax.Array  # i32[chunks, rows], where the tokens lie within a layer; -1 past a chunk's end
    cu_kv_lens: jax.Array  # i32[chunks, seqs + 1], row offsets of the requests
    starts: jax.Array  # i32[chunks, seqs], sequence index of the first token
    num_chunks: jax.Array  # i32[], chunks in use


def make_chunks(
    method: M,
    seq_lens: Ints,
    q_lens: Ints,
    page_table: Ints,
    *,
    page_size: int,
    capacity: int = 131072,
    min_rows: int = 64,
    min_chunks: int = 0,
) -> LatentChunks | None:
    """The chunks that `method` expands. None for forms that expand nothing cached. Runs on the host or inside jit.

    MHA_CHUNKED_KV, and MHA where there is a prefix, give each request the same share of `capacity` tokens a chunk.
    MHA_ONE_SHOT has one chunk of prefix and fresh tokens together, or none where no request has a prefix. Rows and
    numbers of chunks are powers of two; rows are at most `capacity` or `min_rows`, rounded up to whole blocks of 512.
    Inside jit the lengths are not known, so there is room for whatever the page table can hold.
    Args: seq_lens, q_lens: i32[seqs], as in `make_plan`. page_table: i32[seqs, max_pages]; may lie on the device.
      capacity: tokens that may be up-projected at once.
      min_rows, min_chunks: smallest buckets; larger ones mean fewer programs (with min_chunks=1 also where nothing is
        cached). Chunks, and blocks of 512 rows, that are not in use cost no time, only memory.
    Raises: ValueError if the capacity has no token for each request, or less than all tokens of a one-shot pass.

    >>> chunks = make_chunks(M.MHA_CHUNKED_KV, [6, 13, 2], [1, 1, 2], np.arange(12).reshape(3, 4), page_size=4,
    ...                      capacity=12)
    >>> chunks.slots.shape, int(chunks.num_chunks), chunks.cu_kv_lens.tolist()
    ((4, 64), 3, [[0, 4, 8, 8], [0, 1, 5, 5], [0, 0, 4, 4], [0, 0, 0, 0]])
    """
    if method not in EXPANDED:
        return None
    page_table = jnp.asarray(page_table, jnp.int32)
    if any(isinstance(x, Tracer) for x in (seq_lens, q_lens)):
        return _traced(method in ONE_SHOT, seq_lens, q_lens, page_table, page_size, capacity)
    seqs, fresh = np.asarray(seq_lens, np.int64), np.asarray(q_lens, np.int64)
    prefixes = seqs - fresh
    if method not in ONE_SHOT:
        plan = plan_prefix_chunks(prefixes.tolist(), capacity=capacity)
        starts, lens = plan.starts, plan.lens
    else:
        total = int(seqs.sum()) if prefixes.any() or min_chunks else 0
        if total > capacity:
            raise ValueError(
                f"capacity={capacity} but {total} tokens are to be expanded in one shot: use MHA_CHUNKED_KV, or raise "
                "max_chunk_capacity"
            )
        lens = np.zeros((0, len(seqs)), np.int32) if total == 0 else seqs.astype(np.int32)[None]
        starts = np.zeros_like(lens)
    longest = int(lens.sum(axis=1).max(initial=0))
    room = max(min_chunks, _bucket(len(lens)))
    rows = _whole(max(min_rows, min(_bucket(longest), capacity))) if room else 0
    spare = ((0, room - len(lens)), (0, 0))
    arrays = (jnp.asarray(np.pad(x, spare), jnp.int32) for x in (starts, lens))
    return _place(*arrays, page_table, np.int32(len(lens)), rows=rows, page_size=page_size)


def _traced(one_shot: bool, seq_lens, q_lens, page_table, page_size: int, capacity: int) -> LatentChunks:
    num_seqs, longest = page_table.shape[0], page_table.shape[1] * page_size
    if one_shot:
        starts, lens, num_chunks = jnp.zeros((1, num_seqs), jnp.int32), seq_lens[None], np.int32(1)
        rows = min(capacity, num_seqs * longest)
    else:
        chunk_len = min(capacity // num_seqs, longest)
        if not chunk_len:
            raise ValueError(f"capacity={capacity} leaves no token for each of {num_seqs} requests: raise it")
        prefixes = seq_lens - q_lens
        starts = chunk_len * jnp.arange(-(-longest // chunk_len), dtype=jnp.int32)
        starts = jnp.broadcast_to(starts[:, None], (starts.shape[0], num_seqs))
        lens, rows = jnp.clip(prefixes[None] - starts, 0, chunk_len), chunk_len * num_seqs
        num_chunks = ints.cdiv(jnp.max(prefixes), chunk_len)
    return _place(starts, lens, page_table, num_chunks, rows=_whole(rows), page_size=page_size)


def _whole(rows: int) -> int:
    return rows if rows <= BLOCK else -(-rows // BLOCK) * BLOCK


def _bucket(n: int) -> int:
    return 1 << (n - 1).bit_length() if n else 0


@functools.partial(jax.jit, static_argnames=("rows", "page_size"))
def _place(starts, lens, page_table, num_chunks, *, rows: int, page_size: int) -> LatentChunks:
    if not starts.shape[0]:
        slots, offsets = jnp.zeros((0, rows), jnp.int32), jnp.zeros((0, starts.shape[1] + 1), jnp.int32)
        return LatentChunks(slots=slots, cu_kv_lens=offsets, starts=starts, num_chunks=num_chunks)

    def one(start, length):
        offsets = offsets_of(length)
        seq, idx, valid = rows_of(offsets, rows)
        at = jnp.where(valid, start[seq] + idx, 0)
        return jnp.where(valid, slots_of(page_table, seq, at, page_size), -1), offsets

    slots, offsets = jax.vmap(one)(starts, lens)
    return LatentChunks(slots=slots, cu_kv_lens=offsets, starts=starts, num_chunks=num_chunks)
