"""Chunks of cached prefixes for MHA_CHUNKED_KV: what is expanded together. Planned once a forward, on the host."""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlan:
    """Chunk i covers tokens starts[i, b] ... starts[i, b] + lens[i, b] - 1 of each request b's prefix."""

    chunk_len: int  # tokens of one request in a chunk, at most
    starts: np.ndarray  # i32[chunks, seqs]
    lens: np.ndarray  # i32[chunks, seqs]; 0 where a request has no prefix left
    cu_seqlens: np.ndarray  # i32[chunks, seqs + 1]
    max_seq_lens: np.ndarray  # i32[chunks]
    num_tokens: np.ndarray  # i32[chunks], at most the capacity
    has_zero_kv: np.ndarray  # bool[chunks]: some request has no key in this chunk, so its rows are (0, -inf)

    @property
    def num_chunks(self) -> int:
        return self.lens.shape[0]


def plan_prefix_chunks(prefix_lens: Sequence[int], *, capacity: int = 131072) -> ChunkPlan:
    """Cut the prefixes of a batch into chunks of at most `capacity` tokens in all.

    Each request gets the same share of the capacity, with or without a prefix. No chunk where no request has one.
    Args: prefix_lens: cached tokens, a request each. capacity: tokens that may be up-projected at once.
    Raises: ValueError for a negative length, or a capacity of less than a token a request.

    >>> plan_prefix_chunks([5, 12, 0], capacity=12).lens.tolist()
    [[4, 4, 0], [1, 4, 0], [0, 4, 0]]
    """
    prefixes = np.asarray(prefix_lens, np.int64)
    if prefixes.size and prefixes.min() < 0:
        raise ValueError(f"prefix_lens={list(prefix_lens)}: want lengths of at least 0")
    longest = int(prefixes.max(initial=0))
    if longest and capacity < prefixes.size:
        raise ValueError(
            f"capacity={capacity} leaves no token for each of {prefixes.size} requests: raise max_chunk_capacity to at "
            "least the number of requests, or prefill fewer at once"
        )
    chunk_len = capacity // prefixes.size if longest else 0
    num_chunks = -(-longest // chunk_len) if longest else 0
    starts = np.broadcast_to(np.arange(num_chunks)[:, None] * chunk_len, (num_chunks, prefixes.size))
    lens = np.clip(prefixes[None] - starts, 0, chunk_len)
    return ChunkPlan(
        chunk_len=chunk_len,
        starts=starts.astype(np.int32),
        lens=lens.astype(np.int32),
        cu_seqlens=np.pad(np.cumsum(lens, axis=1), ((0, 0), (1, 0))).astype(np.int32),
        max_seq_lens=lens.max(axis=1, initial=0).astype(np.int32),
        num_tokens=lens.sum(axis=1).astype(np.int32),
        has_zero_kv=(lens == 0).any(axis=1),
    )


def chunk_slots(token_slots: np.ndarray, plan: ChunkPlan) -> tuple[np.ndarray, ...]:
    """Slots to gather for each chunk, request by request.

    Args: token_slots: i32[seqs, width], a slot for each sequence index.
    Returns: i32[num_tokens[i]] for each chunk i.
    """
    spans = [zip(token_slots, starts, lens, strict=True) for starts, lens in zip(plan.starts, plan.lens, strict=True)]
    return tuple(np.concatenate([row[start : start + n] for row, start, n in span]).astype(np.int32) for span in spans)
