"""Tile sizes of the Hopper decode and verify attention, chosen from static facts."""

import dataclasses

HEAD_DIMS = (64, 80, 96, 128, 256)  # what the products and swizzles below were compiled for
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # pages and blocks of keys divide one another


_ALWAYS_WHOLE = 8192  # keys that one program reads in 70 us or less


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One program, or a few sharers, attend one tile of (token, head) rows to a run of key blocks of one KV head."""

    block_kv: int = 64  # keys a step
    stages: int = 3  # blocks of keys and of values in flight
    groups: int = 1  # warpgroups that compute, 64 rows each
    copier: bool = False  # whether one more warpgroup copies; with two groups it always does
    splits: bool = False  # whether a request's keys may be cut into parts, merged by a second kernel
    parts: int = 0  # with splits: programs a KV head that equal parts aim at; unused with part_blocks
    part_blocks: int = 0  # with splits: key blocks a part whatever the batch, so that bits do not depend on it; 0: even
    cluster: int = 1  # programs that cut a tile's keys evenly and merge through one another's shared memory
    sharers: int = 1  # programs that have a tile's rows between them, and read its keys once for all

    def __post_init__(self):
        if self.block_kv not in (64, 128) or self.stages < 1 or self.groups not in (1, 2):
            raise ValueError(f"want block_kv 64 or 128, stages >= 1, groups 1 or 2, got {self}")
        if self.splits and self.parts < 1 and self.part_blocks < 1:
            raise ValueError(f"splits want parts or part_blocks, got {self}")
        if self.cluster not in (1, 2, 4, 8, 16) or (self.cluster > 1 and self.splits):
            raise ValueError(f"want a cluster of 1, 2, 4, 8 or 16 programs, and no splits with several, got {self}")
        if self.sharers not in (1, 2) or (self.sharers > 1 and (self.groups == 1 or self.cluster > 1)):
            raise ValueError(f"want 1 or 2 sharers, and of several two groups each and no cluster, got {self}")

    @property
    def part_cost(self) -> int:
        """Blocks that could be attended to in the time that it takes to store a part and to merge it: next to none."""
        return 0

    @property
    def copies_apart(self) -> bool:
        """Whether a warpgroup of its own copies."""
        return self.copier or self.groups > 1

    @property
    def rows(self) -> int:
        """Rows a tile."""
        return self.own_rows * self.sharers

    @property
    def own_rows(self) -> int:
        """Rows of a tile that one program has."""
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
    narrow_kv: bool = False,
    num_sms: int = 132,
) -> Config:
    """Sizes for requests of up to `max_q_len` query tokens and `kv_room` keys, with `group` heads a KV head.

    Keys are cut where requests times heads leave multiprocessors idle, and where one request may be so much longer than
    the others that it would be last by far; equal requests then stay whole.

    plain_tree: a tree of up to 64 nodes without window or cap. narrow_kv: 8-bit keys and values.
    """
    rows = max_q_len * group
    cluster = _cluster(rows, kv_heads, num_seqs, kv_room, num_sms)
    if cluster > 1:
        return Config(stages=2, cluster=cluster)
    groups = 2 if rows > 64 and head_dim <= 128 and page_size >= 8 and not narrow_kv else 1
    block_kv = 128 if groups == 2 and plain_tree else 64  # other masks take the registers that wide scores need
    sharers = 2 if groups == 2 and rows > 128 else 1  # half the reads from the L2, which four fifths of its rate were
    tiles, across = num_seqs * -(-rows // (64 * groups * sharers)), kv_heads * sharers
    programs = num_sms * (2 if narrow_kv else 1)  # widening takes a program's time: two an SM hide it
    splits = 4 * tiles * across <= 3 * programs or kv_room > _ALWAYS_WHOLE
    parts = max(programs // across, 1) if splits else 0
    blocks = kv_room * max(tiles, 1) // (64 * max(parts, 2 * tiles if splits else tiles, 1))
    alone = tiles * across <= num_sms and blocks > 16
    alone = alone and head_dim <= 128
    # Where a block takes several copies, starting them holds up a warpgroup that is alone on its SM.
    copier = groups == 1 and alone and 8 <= page_size <= 16 and not narrow_kv
    if groups == 2:
        stages = 3 if block_kv == 128 else 5
    else:
        stages = _stages(alone, narrow_kv and head_dim <= 128)  # wide heads have room for two
    return Config(
        block_kv=block_kv, stages=stages, groups=groups, copier=copier, splits=splits, parts=parts, sharers=sharers
    )


def _cluster(rows: int, kv_heads: int, num_seqs: int, kv_room: int, num_sms: int) -> int:
    # Measured: one request with 1024 keys takes 5.9 us so and 6.8 us with a second kernel for the merge; from 4096 keys
    # on it is behind, as a cluster's programs share a few multiprocessors. Rows to exchange make it slow.
    if num_seqs > 1 or rows > 16 or kv_room > 2048:
        return 1
    most = min(8, kv_room // 128, num_sms // kv_heads)
    return 1 << max(most, 1).bit_length() - 1


def _stages(alone: bool, narrow_kv: bool) -> int:
    # Measured: where two programs an SM or few blocks a program are the rule, a third block in flight costs 1 to 5 %; a
    # long run alone on its SM gains 3 % by it.
    return 2 + alone + narrow_kv
