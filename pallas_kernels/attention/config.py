"""Block sizes of the plain JAX attention, chosen from static facts."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """How the queries of a class of requests, and their keys, are cut."""

    block_q: int = 64  # query rows a tile; a tile belongs to one request
    block_kv: int = 512  # keys a step
    lanes: int = 1  # tiles worked on together
    form: str = "dot"  # products as "dot", or as multiply and "reduce" (few rows a key: no transposed copy of the keys)

    def __post_init__(self):
        if min(self.block_q, self.block_kv, self.lanes) < 1:
            raise ValueError(f"want block_q, block_kv and lanes of at least 1, got {self}")
        if self.form not in ("dot", "reduce"):
            raise ValueError(f"form={self.form!r}: want 'dot' or 'reduce'")


def heuristic(*, max_q_len: int, group: int) -> tuple[Config, ...]:
    """Configs for requests with at most `max_q_len` query rows and `group` query heads a KV head.

    A request uses the first config whose block_q holds its rows, or the last one. So a decode row beside a prefill
    chunk is not padded to the chunk's tile.
    """
    if max_q_len <= 16:
        block_q = max(max_q_len, 1)
        return (Config(block_q=block_q, lanes=8 if block_q * group <= 8 else 1, form=_form(block_q * group)),)
    return Config(block_q=8), Config(block_q=64)


def _form(rows: int) -> str:
    return "reduce" if rows <= 4 else "dot"
