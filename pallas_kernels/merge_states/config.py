"""Tile sizes of the LSE merge on Hopper."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One program merges `block_rows` rows by `block_v` value columns over all splits."""

    block_rows: int = 64  # (token, head) rows: one WGMMA tile, so that row and tile register layouts agree
    block_v: int = 128  # value columns
    stages: int = 2  # parts in flight

    def __post_init__(self):
        if self.block_rows != 64 or self.block_v % 8 or not 8 <= self.block_v <= 256 or self.stages < 1:
            raise ValueError(f"want block_rows=64, block_v a multiple of 8 from 8 to 256, stages >= 1, got {self}")


def heuristic(*, v_dim: int) -> Config:
    """Columns as wide as the values, up to 128: 64 x 128 float32 is 64 registers a thread, 64 x 256 half of all."""
    return Config(block_v=min(-(-v_dim // 8) * 8, 128))
