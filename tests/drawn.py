"""Drawn ragged batches over poisoned paged caches.

Programs compile once a `Setup`: it fixes every shape, and only lengths, trees and values are drawn. All that must not
be read is NaN (or as large as its dtype allows): other layers, free pages, slots past a length, padding rows.
"""

import dataclasses

import hypothesis.strategies as st
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jattn
from jattn import AttnSpec, ForwardMode, PagedKV
from jattn.attend import _tree_args

NUM_LAYERS, LAYER = 3, 1
STORED = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2, "int8": np.int8}
_TAIL = 2  # page table entries after the last page that a request may use


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What picks a program."""

    name: str
    group: int = 1
    num_kv_heads: int = 2
    head_dim: int = 8
    v_head_dim: int | None = None
    dtype: str = "float32"
    page_size: int = 4
    max_q_len: int = 40
    num_tokens: int = 60
    num_seqs: int = 4
    num_splits: int = 1
    mask: str = "causal"
    sliding_window: int | None = None
    logit_soft_cap: float | None = None
    sinks: bool = False
    kv_dtype: str | None = None
    kv_scales: str | None = None
    layout: str | None = None  # of the cache; None: as it comes
    max_nodes: int | None = None  # of a rectangular tree; None: the nodes are the queries

    def __str__(self):
        return self.name

    @property
    def spec(self) -> AttnSpec:
        return AttnSpec(
            num_q_heads=self.group * self.num_kv_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            sliding_window=self.sliding_window,
            logit_soft_cap=self.logit_soft_cap,
            sinks=self.sinks,
            kv_dtype=self.kv_dtype,
            kv_scales=self.kv_scales,
        )

    @property
    def choice(self):
        return jattn.resolve(self.spec, "native", "cpu", num_splits=self.num_splits)

    @property
    def mode(self) -> ForwardMode:
        if self.mask == "tree":
            return ForwardMode.TARGET_VERIFY
        return ForwardMode.DECODE if self.max_q_len == 1 else ForwardMode.MIXED

    @property
    def max_len(self) -> int:
        return 3 * self.page_size + 1 if self.page_size > 4 else 5 * self.page_size + 8

    @property
    def max_pages(self) -> int:
        return -(-self.max_len // self.page_size)

    @property
    def num_pages(self) -> int:
        return self.num_seqs * self.max_pages + 2

    @property
    def quantised(self) -> bool:
        return self.kv_dtype in STORED

    @property
    def stored_dtype(self):
        kind = self.kv_dtype or self.dtype
        return np.dtype(STORED[kind]) if kind in STORED else jnp.dtype(kind)

    @property
    def token_scales(self) -> bool:
        return self.quantised and self.spec.kv_scales == "token"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What is drawn: lengths of each request, a tree each, and how values are made."""

    seq_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    parents: tuple[tuple[int, ...], ...]  # of each node, an earlier node or -1
    seed: int
    sharpness: float


@st.composite
def batches(draw, setup: Setup) -> Batch:
    """Lengths around page edges, mixing decode, verify and prefill, with padding requests."""
    size, longest = setup.page_size, setup.max_len
    edges = sorted({n for n in (0, 1, 2, size - 1, size, size + 1, 2 * size, 3 * size, longest) if n <= longest})
    seq_lens, q_lens, parents = [], [], []
    room = setup.num_tokens
    for _ in range(setup.num_seqs):
        seq_len = draw(st.sampled_from(edges) | st.integers(0, longest))
        want = draw(st.sampled_from([1, 1, 5, seq_len, seq_len - 1, 0]) | st.integers(0, longest))
        q_len = max(min(want, seq_len, room, setup.max_q_len), 0)
        room -= q_len
        nodes = q_len
        if setup.mask == "tree" and setup.max_nodes is not None:
            nodes = draw(st.integers(q_len, min(seq_len, setup.max_nodes)))
        if setup.mask == "tree":
            parents.append(tuple(draw(st.integers(-1, j - 1)) for j in range(nodes)))
        seq_lens.append(seq_len)
        q_lens.append(q_len)
    return Batch(
        seq_lens=tuple(seq_lens),
        q_lens=tuple(q_lens),
        parents=tuple(parents),
        seed=draw(st.integers(0, 2**16)),
        sharpness=draw(st.sampled_from([1.0, 0.0, 6.0])),
    )


@dataclasses.dataclass(slots=True, kw_only=True)
class Inputs:
    """A batch as arrays. Dense keys and values are per request, as stored, with their scales."""

    q: np.ndarray  # [tokens, q_heads, head_dim]
    k: np.ndarray  # [tokens, kv_heads, head_dim], the newest keys of each request
    v: np.ndarray
    seq_lens: np.ndarray
    q_lens: np.ndarray
    page_table: np.ndarray
    sinks: np.ndarray | None
    tree: dict | None  # `bits`, `starts`, `kv_positions` of the packed batch
    trees: list  # one request's tree each, as `float64.visible` takes it
    keys: list  # [kv_len, kv_heads, head_dim] as stored
    values: list
    k_scales: list  # f32 [kv_len, kv_heads]
    v_scales: list
    layer_scales: tuple[float, float]

    @property
    def rows(self) -> list[slice]:
        ends = np.cumsum(self.q_lens)
        return [slice(end - n, end) for n, end in zip(self.q_lens, ends, strict=True)]

    def dense(self, b: int) -> tuple[np.ndarray, np.ndarray]:
        """Float64 keys and values of request b, scales applied."""
        return tuple(
            x[b].astype(np.float64) * s[b].astype(np.float64)[..., None]
            for x, s in ((self.keys, self.k_scales), (self.values, self.v_scales))
        )


def quantise(x, dtype, scale=None):
    """(stored, scale) of rows x [..., heads, dim], exactly as `write_kv` says; scale None measures."""
    x = np.asarray(x, np.float32)
    largest = np.float32(127 if dtype == np.int8 else float(ml_dtypes.finfo(dtype).max))
    if scale is None:
        top = np.abs(x).max(-1)
        scale = np.where(top > 0, top / largest, np.float32(1))
    scale = np.array(np.broadcast_to(np.asarray(scale, np.float32), x.shape[:-1]))
    scaled = np.clip(x * (np.float32(1) / scale)[..., None], -largest, largest)
    return (np.round(scaled) if dtype == np.int8 else scaled).astype(dtype), scale


def build(setup: Setup, batch: Batch) -> Inputs:
    """Values of a batch, its keys as the cache would hold them."""
    rng = np.random.default_rng(batch.seed)
    spec, dtype = setup.spec, jnp.dtype(setup.dtype)
    seq_lens, q_lens = np.asarray(batch.seq_lens, np.int32), np.asarray(batch.q_lens, np.int32)
    q = np.full((setup.num_tokens, spec.num_q_heads, spec.head_dim), np.nan)
    q[: q_lens.sum()] = rng.normal(size=(q_lens.sum(), *q.shape[1:])) * batch.sharpness
    fresh = [np.full((setup.num_tokens, spec.num_kv_heads, d), np.nan).astype(dtype) for d in _widths(spec)]
    layer_scales = (0.03125, 0.0234375) if setup.quantised and not setup.token_scales else (1.0, 1.0)
    held = ([], []), ([], [])
    at = 0
    for seq_len, q_len in zip(batch.seq_lens, batch.q_lens, strict=True):
        for side, width in enumerate(_widths(spec)):
            x = rng.normal(size=(seq_len, spec.num_kv_heads, width)).astype(dtype)
            fresh[side][at : at + q_len] = x[seq_len - q_len :]
            stored, scale = x.astype(setup.stored_dtype), np.ones(x.shape[:2], np.float32)
            if setup.quantised:
                given = None if setup.token_scales else layer_scales[side]
                stored, scale = quantise(x, setup.stored_dtype, given)
            held[side][0].append(stored)
            held[side][1].append(scale)
        at += q_len
    tree, trees = _trees(setup, batch) if setup.mask == "tree" else (None, [None] * setup.num_seqs)
    return Inputs(
        q=q.astype(dtype),
        k=fresh[0],
        v=fresh[1],
        seq_lens=seq_lens,
        q_lens=q_lens,
        page_table=table(rng, setup, seq_lens),
        sinks=rng.normal(size=spec.num_q_heads).astype(np.float32) * 2 if setup.sinks else None,
        tree=tree,
        trees=trees,
        keys=held[0][0],
        k_scales=held[0][1],
        values=held[1][0],
        v_scales=held[1][1],
        layer_scales=layer_scales,
    )


def table(rng, setup: Setup, seq_lens) -> np.ndarray:
    """Shuffled pages; the entries that must not be read are wild."""
    shape = (setup.num_seqs, setup.max_pages + _TAIL)
    wild = rng.integers(-(2**31), 2**31 - 1, shape, dtype=np.int64).astype(np.int32)
    order = rng.permutation(setup.num_pages)[: setup.num_seqs * setup.max_pages].reshape(setup.num_seqs, -1)
    for b, n in enumerate(-(-seq_lens // setup.page_size)):
        wild[b, :n] = order[b, :n]
    return wild


def cache(setup: Setup, inputs: Inputs, *, held=None) -> PagedKV:
    """A cache with the first `held` keys of each request (default: all of them) in one layer, poison elsewhere."""
    spec = setup.spec
    held = inputs.seq_lens if held is None else held
    shape = (NUM_LAYERS * setup.num_pages, setup.page_size, spec.num_kv_heads)
    poison = 127 if setup.stored_dtype == np.int8 else np.nan
    pools = [np.full((*shape, d), poison).astype(setup.stored_dtype) for d in _widths(spec)]
    scales = []
    if setup.token_scales:
        scales = [np.full(shape, np.nan, np.float32) for _ in pools]
    elif setup.quantised:
        scales = [np.full(NUM_LAYERS, np.nan, np.float32) for _ in pools]
        for scale, value in zip(scales, inputs.layer_scales, strict=True):
            scale[LAYER] = value
    for b, n in enumerate(held):
        at = slots(setup, inputs, b)[:n]
        for pool, rows in zip(pools, (inputs.keys, inputs.values), strict=True):
            pool[at // setup.page_size, at % setup.page_size] = rows[b][:n]
        if setup.token_scales:
            for scale, rows in zip(scales, (inputs.k_scales, inputs.v_scales), strict=True):
                scale[at // setup.page_size, at % setup.page_size] = rows[b][:n]
    sizes = dict(num_layers=NUM_LAYERS, num_pages=setup.num_pages, page_size=setup.page_size)
    kind = None if setup.quantised else setup.stored_dtype
    empty = PagedKV.create(spec, **sizes, dtype=kind, layout=setup.layout)
    assert empty.dtype == setup.stored_dtype
    arrays = (*(pool.view(empty.k.dtype) for pool in pools), *scales)
    names = ("k", "v", "k_scale", "v_scale")
    return dataclasses.replace(empty, **dict(zip(names, map(jnp.asarray, arrays), strict=False)))


def plan_of(setup: Setup, seq_lens, q_lens, page_table, tree: dict | None) -> jattn.Plan:
    """The plan of a batch, on the host or in jit."""
    sizes = dict(page_size=setup.page_size, num_tokens=setup.num_tokens, max_q_len=setup.max_q_len)
    nodes = None if tree is None else jattn.Tree(**tree) if setup.max_nodes is not None else tree["bits"]
    return jattn.make_plan(setup.mode, seq_lens, q_lens, page_table, tree=nodes, **sizes)


def asked_of(setup: Setup, plan: jattn.Plan) -> dict:
    """What a kernel over the drawn layer's pages takes beside queries, keys and the rules of its own."""
    return dict(
        page_table=plan.page_table,
        page_offset=LAYER * setup.num_pages,
        seq_lens=plan.seq_lens,
        cu_q_lens=plan.cu_q_lens,
        max_q_len=plan.max_q_len,
        sm_scale=setup.spec.sm_scale,
        mask=setup.mask,
        num_splits=setup.num_splits,
        **_tree_args(plan),
    )


def merged(setup: Setup, out, lse):
    """One state of the parts that a setup asks for, in its dtype."""
    if setup.num_splits > 1:
        out, lse = jattn.merge_states(out, lse)
    return out.astype(setup.dtype), lse


def given(ins: Inputs) -> tuple:
    """Queries, lengths and page table, then the tree or None, as `plan_of` takes them."""
    tree = None if ins.tree is None else {name: jnp.asarray(x) for name, x in ins.tree.items()}
    return *(jnp.asarray(x) for x in (ins.q, ins.seq_lens, ins.q_lens, ins.page_table)), tree


def take_scales(setup, ins, cache):
    """Take the measured scales of new rows from the cache, if within an ulp, and quantise those rows by them."""
    sides = (ins.k, ins.keys, ins.k_scales, cache.k_scale), (ins.v, ins.values, ins.v_scales, cache.v_scale)
    for fresh, stored, scales, pool in sides:
        flat = np.asarray(pool).reshape(-1, pool.shape[2])
        for b, rows in enumerate(ins.rows):
            new = slice(ins.seq_lens[b] - ins.q_lens[b], ins.seq_lens[b])
            measured = flat[slots(setup, ins, b)[new]]
            np.testing.assert_array_max_ulp(measured, scales[b][new], maxulp=1)
            stored[b][new], scales[b][new] = quantise(fresh[rows], setup.stored_dtype, measured)


def slots(setup: Setup, inputs: Inputs, b: int) -> np.ndarray:
    """Slot in the whole pool of each key of request b."""
    idx = np.arange(inputs.seq_lens[b])
    pages = inputs.page_table[b][idx // setup.page_size] + LAYER * setup.num_pages
    return pages * setup.page_size + idx % setup.page_size


def _widths(spec: AttnSpec) -> tuple[int, int]:
    return spec.head_dim, spec.v_head_dim or spec.head_dim


def _trees(setup: Setup, batch: Batch) -> tuple[dict, list]:
    nodes = setup.max_nodes or setup.max_q_len
    words = -(-nodes // 32)
    packed = np.full((setup.num_tokens, words), 0xDEADBEEF, np.uint32)  # padding rows hold anything
    starts = np.zeros(setup.num_seqs, np.int32)
    kv_positions = np.full((setup.num_seqs, nodes), -(2**20), np.int32)
    trees, at = [], 0
    for b, (seq_len, q_len, parents) in enumerate(zip(batch.seq_lens, batch.q_lens, batch.parents, strict=True)):
        starts[b] = seq_len - len(parents)
        bits = np.zeros((len(parents), nodes), bool)
        for node, parent in enumerate(parents):
            bits[node] = bits[parent] if parent >= 0 else False
            bits[node, node] = True
        places = starts[b] + bits.sum(1) - 1
        kv_positions[b, : len(parents)] = places
        mine = slice(len(parents) - q_len, len(parents))
        for i, row in enumerate(bits[mine]):
            for word in range(words):
                packed[at + i, word] = sum(1 << j for j, bit in enumerate(row[32 * word : 32 * word + 32]) if bit)
        at += q_len
        trees.append(dict(start=starts[b], bits=bits[mine], q_positions=places[mine], kv_positions=places))
    return dict(bits=packed, starts=starts, kv_positions=kv_positions), trees
