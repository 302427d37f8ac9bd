"""Block sizes of the plain JAX attention, chosen from static facts."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """How queries and keys are cut."""

    block_q: int = 64  # query rows a tile; a tile belongs to one request
    block_kv: int = 512  # keys a step, rounded to whole pages
    lanes: int = 1  # tiles worked on together

    def __post_init__(self):
        if min(self.block_q, self.block_kv, self.lanes) < 1:
            raise ValueError(f"want block_q, block_kv and lanes of at least 1, got {self}")


def heuristic(*, max_q_len: int) -> Config:
    """Sizes for a batch with at most `max_q_len` query rows a request."""
    return Config(block_q=min(max(max_q_len, 1), 64))
