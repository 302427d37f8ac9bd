"""Tile sizes of the Hopper latent attention, chosen from static facts."""

import dataclasses

PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # pages and blocks of keys divide one another
MAX_HEADS = 128  # two programs of 64 rows hold a query token's heads
MAX_WIDTH = 576  # of a row: queries and two blocks of keys fill shared memory

_SHARED_BYTES = 227 * 1024  # that a program may have
_ALWAYS_WHOLE = 8192  # keys that one program reads in some 250 us


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One program, or two sharers, attend one tile of (token, head) rows to a run of key blocks.

    A program has 64 rows, which two warpgroups compute together; a third copies.
    """

    stages: int = 2  # blocks of keys in shared memory
    splits: bool = False  # whether a request's keys may be cut into parts, merged by a second kernel
    parts: int = 0  # with splits: tiles that equal parts aim at; unused with part_blocks
    part_blocks: int = 0  # with splits: key blocks a part whatever the batch, so that bits do not depend on it; 0: even
    sharers: int = 1  # programs of a cluster that have a tile's rows between them, and read its keys once for all
    ahead: int = 0  # with sharers: blocks asked for before there is room, so that they come from the L2 then

    def __post_init__(self):
        if self.stages < 2 or self.sharers not in (1, 2):
            raise ValueError(f"want stages >= 2 (the warpgroups take blocks in turn) and 1 or 2 sharers, got {self}")
        if self.splits and self.parts < 1 and self.part_blocks < 1:
            raise ValueError(f"splits want parts or part_blocks, got {self}")

    @property
    def block_kv(self) -> int:
        """Keys a step."""
        return 64

    @property
    def cluster(self) -> int:
        """Programs that cut a tile's keys and merge through one another's memory: there is no such form."""
        return 1

    @property
    def part_cost(self) -> int:
        """Blocks that could be attended to in the time that it takes to store a part, and to read it for the merge."""
        return 5

    @property
    def rows(self) -> int:
        """Rows a tile."""
        return self.own_rows * self.sharers

    @property
    def own_rows(self) -> int:
        """Rows of a tile that one program has."""
        return 64


def heuristic(*, max_q_len: int, num_heads: int, num_seqs: int, k_dim: int, kv_room: int, num_sms: int = 132) -> Config:
    """Sizes for requests of up to `max_q_len` query tokens and `kv_room` keys, of rows of `k_dim` numbers.

    Keys are cut where tiles leave multiprocessors idle, and where one request may be so much longer than the others
    that it would be last by far.
    """
    rows = max_q_len * num_heads
    sharers = 2 if rows > 64 else 1  # half the reads from the L2, which cannot feed the products of all programs
    tokens = max(min(64 * sharers // num_heads, max_q_len), 1)
    tiles, at_once = num_seqs * -(-max_q_len // tokens), num_sms // sharers
    splits = 4 * tiles <= 3 * at_once or kv_room > _ALWAYS_WHOLE
    ahead = 2 if sharers > 1 else 0  # one program alone is bound by the memory, and loses by more requests
    parts = at_once if splits else 0
    return Config(stages=stages_of(k_dim), splits=splits, parts=parts, sharers=sharers, ahead=ahead)


def stages_of(k_dim: int) -> int:
    """Blocks of keys that shared memory holds, up to 4, beside the queries, the weights and two KiB."""
    block = 64 * k_dim * 2
    return min((_SHARED_BYTES - block - 64 * 64 * 2 - 2048) // block, 4)
