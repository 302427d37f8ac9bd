"""Block sizes of the TPU attention, and the vector memory that they take."""

import dataclasses
import functools
import json
import math
from pathlib import Path

from pallas_kernels._common.tpu_rows import LANES, LatentRow, Row, round_up

DATA = Path(__file__).resolve().parent / "tuned"
_BLOCK_KEYS = 4096  # of a decode block at most: narrow rows would have blocks longer than their contexts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is chosen for a generation from the compiler's schedule, by `scripts/tune_tpu.py`."""

    block_bytes: int = 2 << 20  # of a decode block: a step's fixed code should take little of the time of its copy
    rows: int = 1024  # of a prefill product: keys are pushed into the matrix unit once for all of them
    keys: int = 512  # of a prefill block


@functools.cache
def tuned(device: str | None) -> Sizes:
    """The sizes of a generation by its name, as `tpu_devices` has it; those of any where it has none of its own."""
    path = DATA / f"{device}.json"
    return Sizes(**json.loads(path.read_text())["sizes"]) if path.exists() else Sizes()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """How a call is cut: a work item is a tile of query tokens of one request, over blocks of its pages."""

    block_q: int = 1  # query tokens a tile: 1, or a multiple of 8
    block_pages: int = 8  # pages a block, a power of two
    heads: int = 1  # KV heads whose queries share a product: rows of zeros keep them apart
    unroll_heads: bool = True  # products of all heads in one basic block, for the scheduler to interleave
    parts: int = 1  # of the keys of a block; with several, scores are made a part ahead of their sums (`tpu_ahead`)
    depth: int = 3  # blocks held: one attended, one that arrives, and with 3 one that is asked for
    cores: int = 1  # TensorCores that share the work items

    def __post_init__(self):
        if self.block_q != 1 and self.block_q % 8:
            raise ValueError(f"block_q={self.block_q}: want 1, or a multiple of 8 (the rows of a register)")
        if self.block_pages < 1 or self.block_pages & (self.block_pages - 1):
            raise ValueError(f"block_pages={self.block_pages}: want a power of two")
        if self.depth not in ((2, 3) if self.parts == 1 else (3,)):
            raise ValueError(f"depth={self.depth}, parts={self.parts}: want 2 or 3 blocks held, 3 with several parts")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What sizes are chosen from (static)."""

    row: Row
    group: int  # query heads a KV head
    max_q_len: int
    page_size: int
    kv_bytes: int  # of an entry of a page
    q_bytes: int
    tree_words: int = 0  # of tree bits a query
    held_as_words: bool = False  # whether a block is unpacked from words
    writes: bool = False  # whether the call's own keys are put into the pages, too

    @property
    def packed(self) -> bool:
        """Whether a block is unpacked from 8 bits."""
        return isinstance(self.row, LatentRow) and self.row.packed is not None

    @property
    def unpacked(self) -> bool:
        """Whether a block must be made into rows before products can read it."""
        return self.held_as_words or self.packed or self.row.scales


def rows_of(config: Config, facts: Facts) -> int:
    """Rows of a product: query tokens times the query heads of a tile, in whole registers."""
    return round_up(config.heads * facts.group * config.block_q, 8)


def block_kv(config: Config, facts: Facts) -> int:
    """Keys of a block, in whole registers of lanes."""
    return round_up(config.block_pages * facts.page_size, LANES)


def vmem_bytes(config: Config, facts: Facts) -> int:
    """Vector memory of a program: its buffers, and the scores that do not fit in registers."""
    row, rows, keys = facts.row, rows_of(config, facts), block_kv(config, facts)
    tiles = row.kv_heads // config.heads
    wide_k, wide_v = (row.window(side, 0, config.heads)[1] for side in "kv")
    depth = 3 if config.parts > 1 else 2
    kv = (config.depth + facts.held_as_words) * keys * row.held_lanes * facts.kv_bytes
    if facts.packed:
        kv += keys * row.lanes * facts.q_bytes
    if row.scales:
        kv += keys * (row.kv_heads + 8) * 8 + keys * (row.lanes - row.scales_at) * 2
    if facts.writes:
        step = 32 // facts.kv_bytes
        groups = config.block_q // step + 2 * (config.block_q // max(config.block_pages * facts.page_size, 1) + 2)
        kv += depth * round_up(config.block_q, 8) * row.held_lanes * 4 + 2 * groups * step * row.held_lanes * 4
    q = depth * tiles * rows * wide_k * facts.q_bytes
    out = 2 * tiles * rows * (wide_v * facts.q_bytes + LANES * 4)
    carry = tiles * rows * (2 * LANES + wide_v) * 4
    bits = 2 * round_up(config.block_q, 8) * round_up(facts.tree_words, LANES) * 4 if facts.tree_words else 0
    live = (tiles if config.unroll_heads else 2) * rows * keys * (4 + 4 + facts.q_bytes)
    wider = 2 * keys * (wide_k + wide_v) * 4 if facts.kv_bytes != facts.q_bytes or facts.q_bytes > 2 else 0
    raw = rows * keys // config.parts * 4 if config.parts > 1 else 0
    return kv + q + out + carry + bits + live + wider + raw


def heuristic(facts: Facts, *, vmem: int, cores: int = 1, sizes: Sizes | None = None) -> tuple[Config, ...]:
    """Sizes for requests of up to `facts.max_q_len` rows; with several, a request uses the first that holds its rows.

    Args: vmem: bytes of vector memory that a program may use. cores: TensorCores of a device. sizes: of its generation.
    """
    return tuple(dataclasses.replace(config, cores=cores) for config in _classes(facts, vmem, sizes or Sizes()))


def _classes(facts: Facts, vmem: int, sizes: Sizes) -> tuple[Config, ...]:
    if facts.max_q_len == 1:
        return (fitting(_decode(facts, 1, sizes), facts, vmem),)
    short = fitting(_decode(facts, min(round_up(facts.max_q_len, 8), 16), sizes), facts, vmem)
    if facts.max_q_len <= short.block_q:
        return (short,)
    one = fitting(_decode(facts, 1, sizes), facts, vmem)
    return one, short, fitting(_prefill(facts, sizes), facts, vmem)


def fitting(config: Config, facts: Facts, vmem: int) -> Config:
    """`config`, or the nearest smaller one that fits in `vmem` bytes; one part where blocks are too short for several.

    Raises: ValueError if nothing fits.
    """
    config = _of_whole_parts(config, facts)
    while vmem_bytes(config, facts) > vmem:
        keys = config.block_pages * facts.page_size
        if config.block_pages > 1 and keys > LANES:
            config = dataclasses.replace(config, block_pages=config.block_pages // 2)
        elif config.depth > 2 and config.parts == 1:
            config = dataclasses.replace(config, depth=2)
        elif config.unroll_heads:
            config = dataclasses.replace(config, unroll_heads=False)
        elif config.block_q > 8:
            config = dataclasses.replace(config, block_q=round_up(config.block_q // 2, 8))
        elif config.block_pages > 1:
            config = dataclasses.replace(config, block_pages=config.block_pages // 2)
        else:
            raise ValueError(f"{facts} needs {vmem_bytes(config, facts)} bytes of vector memory at least, not {vmem}")
        config = _of_whole_parts(config, facts)
    return config


def _of_whole_parts(config: Config, facts: Facts) -> Config:
    # the keys of a part are whole registers of lanes
    return config if block_kv(config, facts) % (config.parts * LANES) == 0 else dataclasses.replace(config, parts=1)


def _pages(keys: int, page_size: int) -> int:
    # the power of two of pages that holds about that many keys
    return 1 << max(round(math.log2(max(keys / page_size, 1))), 0)


def _stack(facts: Facts, block_q: int) -> int:
    # heads a product: fill 8 rows, and 256 lanes of depth while rows are few
    row = facts.row
    for heads in (h for h in range(1, row.kv_heads + 1) if row.kv_heads % h == 0):
        if heads * row.k_dim >= 256 and heads * facts.group * block_q >= 8:
            return heads
    return row.kv_heads


def _decode(facts: Facts, block_q: int, sizes: Sizes) -> Config:
    heads = _stack(facts, block_q) if block_q == 1 or facts.row.k_dim < 128 else min(2, facts.row.kv_heads)
    heads = heads if facts.row.kv_heads % heads == 0 else 1
    keys = min(max(sizes.block_bytes // (facts.row.held_lanes * facts.kv_bytes), LANES), _BLOCK_KEYS)
    return Config(block_q=block_q, block_pages=_pages(keys, facts.page_size), heads=heads)


def _prefill(facts: Facts, sizes: Sizes) -> Config:
    block_q = max(round_up(min(sizes.rows // facts.group, facts.max_q_len), 8), 8)
    return Config(block_q=block_q, block_pages=_pages(sizes.keys, facts.page_size), heads=1, unroll_heads=False)
