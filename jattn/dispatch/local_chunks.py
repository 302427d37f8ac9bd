"""Chunked local attention (Llama-4) as a batch of virtual requests: a token sees its own chunk only."""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LocalPlan:
    """Virtual requests, one a chunk that has queries; plain causal attention over them is chunked local attention."""

    seq_ids: np.ndarray  # i32[virtual], the request that each belongs to
    q_lens: np.ndarray  # i32[virtual]
    kv_lens: np.ndarray  # i32[virtual]
    cu_q_lens: np.ndarray  # i32[virtual + 1]
    page_table: np.ndarray  # i32[virtual, chunk_len // page_size]; entries past cdiv(kv_len, page_size) are 0


def plan_local_chunks(
    q_lens: Sequence[int], kv_lens: Sequence[int], page_table: np.ndarray, *, chunk_len: int, page_size: int
) -> LocalPlan:
    """Cut the queries of each request at multiples of `chunk_len` of its positions.

    Args:
      q_lens: new tokens, the last of each request's kv_lens tokens. page_table: i32[seqs, pages].
      chunk_len: tokens a chunk, a multiple of page_size.

    Raises: ValueError for lengths that disagree, or a chunk that is not made of whole pages.

    >>> plan = plan_local_chunks([4, 10, 5], [6, 17, 9], np.zeros((3, 5), int), chunk_len=4, page_size=4)
    >>> plan.q_lens.tolist(), plan.kv_lens.tolist()
    ([2, 2, 1, 4, 4, 1, 4, 1], [4, 2, 4, 4, 4, 1, 4, 1])
    """
    if page_size < 1 or chunk_len < 1 or chunk_len % page_size:
        raise ValueError(f"chunk_len={chunk_len} with page_size={page_size}: want a chunk of whole pages")
    rows = []
    for seq, (q, kv) in enumerate(zip(q_lens, kv_lens, strict=True)):
        if not 0 <= q <= kv:
            raise ValueError(f"q_lens[{seq}]={q} with kv_lens[{seq}]={kv}: want 0 <= q_len <= kv_len")
        start = kv - q
        while start < kv:
            chunk = start // chunk_len * chunk_len
            stop = min(chunk + chunk_len, kv)
            rows.append((seq, stop - start, stop - chunk, chunk // page_size))
            start = stop
    seq_ids, local_q, local_kv, first_page = np.array(rows, np.int32).reshape(-1, 4).T
    pages = np.arange(chunk_len // page_size)[None]
    table = np.asarray(page_table, np.int32)
    columns = np.minimum(first_page[:, None] + pages, table.shape[1] - 1)
    used = pages < -(-local_kv[:, None] // page_size)
    return LocalPlan(
        seq_ids=seq_ids,
        q_lens=local_q,
        kv_lens=local_kv,
        cu_q_lens=np.cumsum([0, *local_q], dtype=np.int32),
        page_table=np.where(used, table[seq_ids[:, None], columns], 0),
    )
