"""Sizes of the portable GPU attention, chosen from static facts."""

import dataclasses

_PARALLEL = 256  # programs that fill the GPUs this set serves (84 to 188 multiprocessors) about twice
_SHARED_BYTES = 96 << 10  # that every GPU from sm_80 on has for a program, with some to spare
_FEWEST_KEYS = 256  # a part of the keys that is worth its share of the merge


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One program attends `block_rows` (token, head) rows to a run of key blocks of one KV head."""

    block_rows: int = 64
    block_kv: int = 64  # keys a step
    splits: int = 1  # parts of a request's keys, merged afterwards
    num_warps: int = 4
    num_stages: int = 2  # of the compiler's software pipeline

    def __post_init__(self):
        for name in ("block_rows", "block_kv", "num_warps"):
            value = getattr(self, name)
            if value & (value - 1) or value < (1 if name == "num_warps" else 16):
                raise ValueError(f"{name}={value}: want a power of two, and tiles of at least 16")
        if self.splits < 1 or self.num_stages < 1:
            raise ValueError(f"want splits and num_stages of at least 1, got {self}")


def heuristic(
    *,
    max_q_len: int,
    group: int,
    kv_heads: int,
    num_tokens: int,
    num_seqs: int,
    k_dim: int,
    v_dim: int,
    kv_room: int,
    itemsize: int = 2,
) -> Config:
    """Sizes for requests of up to `max_q_len` query tokens and `kv_room` keys, with `group` heads a KV head.

    itemsize: bytes of a query's number, which keys have too once they are read.
    """
    wide = max(k_dim, v_dim) > 128
    rows = max_q_len * group
    block_rows = min(max(1 << (rows - 1).bit_length(), 16), 128 if not wide and rows > 512 else 64)
    if v_dim > 256:
        block_rows = min(block_rows, 32)  # sums of 512 values a row: 128 registers a thread
    block_kv = 32 if wide else 64
    if itemsize > 2:  # no matrix unit: larger tiles take the compiler minutes
        block_rows, block_kv = min(block_rows, 32), 32
    while max(block_rows, block_kv) > 16 and shared_bytes(block_rows, block_kv, k_dim, v_dim, itemsize) > _SHARED_BYTES:
        if block_kv > 16:
            block_kv //= 2
        else:
            block_rows //= 2
    tiles = min(num_seqs * -(-rows // block_rows), num_tokens * group // block_rows + num_seqs)
    programs = max(tiles, 1) * kv_heads
    splits = max(min(_PARALLEL // programs, kv_room // _FEWEST_KEYS, 32), 1)
    return Config(
        block_rows=block_rows,
        block_kv=block_kv,
        splits=1 << (splits.bit_length() - 1),
        num_warps=8 if block_rows == 128 or v_dim > 256 else 4,
        num_stages=1 if v_dim > 256 or itemsize > 2 else 2,
    )


def shared_bytes(block_rows: int, block_kv: int, k_dim: int, v_dim: int, itemsize: int) -> int:
    """About what the compiler keeps in shared memory: queries, a block of keys and values, and its weights."""
    return itemsize * (block_rows * k_dim + block_kv * (k_dim + v_dim) + block_rows * block_kv)
