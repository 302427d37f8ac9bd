"""Tile sizes of the Hopper decode and verify attention, chosen from static facts."""

import dataclasses

HEAD_DIMS = (64, 80, 96, 128, 256)  # what the products and swizzles below were compiled for
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # pages and blocks of keys divide one another


_ALWAYS_WHOLE = 8192  # keys that one program reads in 70 us or less


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One program attends one tile of (token, head) rows to a run of key blocks of one KV head."""

    block_kv: int = 64  # keys a step
    stages: int = 3  # blocks of keys and of values in flight
    groups: int = 1  # warpgroups that compute, 64 rows each; with two, a third one copies
    splits: bool = False  # whether a request's keys may be cut into parts, merged by a second kernel
    parts: int = 0  # with splits: programs a KV head to aim at (at least a tile each); unused with part_blocks
    part_blocks: int = 0  # with splits: key blocks a part whatever the batch, so that bits do not depend on it; 0: even

    def __post_init__(self):
        if self.block_kv not in (64, 128) or self.stages < 1 or self.groups not in (1, 2):
            raise ValueError(f"want block_kv 64 or 128, stages >= 1, groups 1 or 2, got {self}")
        if self.splits and self.parts < 1 and self.part_blocks < 1:
            raise ValueError(f"splits want parts or part_blocks, got {self}")

    @property
    def rows(self) -> int:
        """Rows a tile."""
        return 64 * self.groups


def heuristic(
    *,
    max_q_len: int,
    group: int,
    kv_heads: int,
    num_seqs: int,
    head_dim: int,
    kv_room: int,
    page_size: int,
    plain_tree: bool = False,
    num_sms: int = 132,
) -> Config:
    """Sizes for requests of up to `max_q_len` query tokens and `kv_room` keys, with `group` heads a KV head.

    Keys are cut where requests times heads leave multiprocessors idle, and where one request may be so much longer than
    the others that it would be last by far; equal requests then stay whole. plain_tree: a tree without window or cap.
    """
    rows = max_q_len * group
    groups = 2 if rows > 64 and head_dim <= 128 and page_size >= 8 else 1
    block_kv = 128 if groups == 2 and plain_tree else 64  # other masks take the registers that wide scores need
    tiles = num_seqs * -(-rows // (64 * groups))
    splits = 4 * tiles * kv_heads <= 3 * num_sms or kv_room > _ALWAYS_WHOLE
    parts = max(num_sms // kv_heads, 2 * tiles) if splits else 0
    # Measured: where two programs an SM or few blocks a program are the rule, a third block in flight costs 1 to 5 %;
    # a long run alone on its SM gains 3 % by it.
    blocks = kv_room * max(tiles, 1) // (64 * max(parts, tiles, 1))
    alone = tiles * kv_heads <= num_sms and blocks >= 16
    stages = (2 if block_kv == 128 else 5) if groups == 2 else 3 if alone and head_dim <= 128 else 2
    return Config(block_kv=block_kv, stages=stages, groups=groups, splits=splits, parts=parts)
