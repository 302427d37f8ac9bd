"""Tile sizes of the Hopper prefill attention, chosen from static facts."""

import dataclasses

WIDTHS = (64, 80, 96, 128, 192, 256)  # head dims that the products and swizzles were compiled for
SHARED_BYTES = 222 * 1024  # of 227: a kilobyte of barriers, some of Mosaic's own, and a launch with all 227 fails
WIDE_STAGES = 2  # of 8-bit keys and values: widened blocks in flight
_ROWS = 64  # a computing warpgroup


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One program a multiprocessor attends tile after tile: (token, head) rows of one KV head and their key blocks."""

    block_kv: int = 128  # keys a step
    stages: int = 2  # blocks of keys and of values in flight
    q_stages: int = 2  # tiles whose queries are there; with 2, one tile's end runs beside the next one's start
    groups: int = 2  # warpgroups that compute, 64 rows each; one more copies
    polynomial: int = 0  # of 16 weights, how many the multiply-add units make; the others come from the special ones

    def __post_init__(self):
        stages = self.stages >= 1 and self.q_stages in (1, 2)
        if self.block_kv not in (64, 128, 192) or self.groups not in (2, 3) or not stages:
            raise ValueError(f"want block_kv 64, 128 or 192, groups 2 or 3, stages >= 1, q_stages 1 or 2, got {self}")
        if not 0 <= self.polynomial <= 16:
            raise ValueError(f"want polynomial between 0 and 16, got {self}")

    @property
    def rows(self) -> int:
        """Rows a tile."""
        return _ROWS * self.groups

    def shared_bytes(self, *, k_dim: int, v_dim: int, narrow_kv: bool) -> int:
        """Shared memory that queries and rings take."""
        width = k_dim + v_dim
        ring = self.stages * self.block_kv * width * (1 if narrow_kv else 2)
        wide = self.block_kv * width * 2 * WIDE_STAGES if narrow_kv else 0
        return self.q_stages * self.rows * k_dim * 2 + ring + wide


def heuristic(*, k_dim: int, v_dim: int, narrow_kv: bool = False, gathers: bool = False, plain: bool = True) -> Config:
    """Sizes for heads of `k_dim` and `v_dim`.

    narrow_kv: 8-bit keys and values. gathers: threads copy them. plain: no window, soft cap or sinks.

    Registers decide: a thread holds scores, weights and sums, (block_kv + block_kv / 2 + v_dim) / 2 of them, out of 232
    with two computing warpgroups and 160 with three, which leaves none to spare. Then shared memory decides how many
    blocks are in flight.
    """
    groups = 3 if max(k_dim, v_dim) <= 64 and plain and not (narrow_kv or gathers) else 2
    for block_kv in (128, 64) if v_dim <= 128 else (64,):
        for q_stages, stages in ((2, 4), (2, 3), (2, 2), (1, 3), (1, 2)):
            config = Config(block_kv=block_kv, groups=groups, stages=stages, q_stages=q_stages)
            if config.shared_bytes(k_dim=k_dim, v_dim=v_dim, narrow_kv=narrow_kv) <= SHARED_BYTES:
                return config
    raise ValueError(f"no sizes fit heads of {k_dim} and {v_dim}")  # only such as the kernel refuses before
