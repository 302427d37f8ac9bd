"""Drawn batches of an MLA layer: inputs and caches full of poison, a float64 answer, and the tolerance it earns."""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false, reportOptionalSubscript=false, reportCallIssue=false

import dataclasses
import functools

import drawn
import float64
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from drawn import NUM_LAYERS, Batch, Setup

import jattn
from jattn import MLACache, MLASpec

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
GROUP = 128


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What picks a program: the batch's shape and mask are those of a `Setup`, the widths are an MLA layer's."""

    shape: Setup
    num_heads: int = 3
    rank: int = 16
    nope: int = 8
    rope: int = 4
    v_dim: int = 8
    kv_dtype: str | None = None

    def __str__(self):
        return self.shape.name

    @property
    def dtype(self):
        return jnp.dtype(self.shape.dtype)

    @property
    def spec(self) -> MLASpec:
        return MLASpec(
            num_q_heads=self.num_heads,
            kv_lora_rank=self.rank,
            qk_nope_head_dim=self.nope,
            qk_rope_head_dim=self.rope,
            v_head_dim=self.v_dim,
            kv_dtype=self.kv_dtype,
        )

    @property
    def choice(self):
        return jattn.resolve(self.spec, "native", "cpu", num_splits=self.shape.num_splits)


@dataclasses.dataclass(slots=True, kw_only=True)
class Inputs:
    """A batch as arrays. `latents` and `keys` are each request's whole sequence as computed, `rows` as stored."""

    q_nope: np.ndarray  # [tokens, heads, nope]
    q_rope: np.ndarray
    latent: np.ndarray  # [tokens, rank], of the newest tokens
    k_rope: np.ndarray
    w_kc: np.ndarray
    w_vc: np.ndarray
    seq_lens: np.ndarray
    q_lens: np.ndarray
    page_table: np.ndarray
    tree: dict | None
    trees: list
    latents: list
    keys: list
    stored: list  # [seq_len, row] as the cache holds it

    @property
    def rows(self) -> list[slice]:
        ends = np.cumsum(self.q_lens)
        return [slice(end - n, end) for n, end in zip(self.q_lens, ends, strict=True)]

    @property
    def arrays(self) -> tuple:
        """What a step takes, in the order of `mla_attend`."""
        names = ("q_nope", "q_rope", "latent", "k_rope", "w_kc", "w_vc")
        return tuple(jnp.asarray(getattr(self, name)) for name in names)


def build(layer: Layer, batch: Batch) -> Inputs:
    """Values of a batch; rows that must not be read are NaN."""
    setup, spec, dtype = layer.shape, layer.spec, layer.dtype
    rng = np.random.default_rng(batch.seed)
    seq_lens, q_lens = np.asarray(batch.seq_lens, np.int32), np.asarray(batch.q_lens, np.int32)

    def normal(*shape, scale=1.0):
        return (rng.normal(size=shape) * scale).astype(dtype)

    w_kc = normal(layer.num_heads, layer.nope, layer.rank, scale=layer.rank**-0.5)
    w_vc = normal(layer.num_heads, layer.rank, layer.v_dim, scale=layer.rank**-0.5)
    packed = {}
    for name, width in (("q_nope", layer.nope), ("q_rope", layer.rope)):
        packed[name] = np.full((setup.num_tokens, layer.num_heads, width), np.nan).astype(dtype)
        packed[name][: q_lens.sum()] = normal(q_lens.sum(), layer.num_heads, width, scale=batch.sharpness)
    for name, width in (("latent", layer.rank), ("k_rope", layer.rope)):
        packed[name] = np.full((setup.num_tokens, width), np.nan).astype(dtype)
    latents, keys, at = [], [], 0
    for seq_len, q_len in zip(batch.seq_lens, batch.q_lens, strict=True):
        latents.append(normal(seq_len, layer.rank))
        keys.append(normal(seq_len, layer.rope))
        packed["latent"][at : at + q_len] = latents[-1][seq_len - q_len :]
        packed["k_rope"][at : at + q_len] = keys[-1][seq_len - q_len :]
        at += q_len
    tree, trees = drawn._trees(setup, batch) if setup.mask == "tree" else (None, [None] * setup.num_seqs)
    return Inputs(
        **packed,
        w_kc=w_kc,
        w_vc=w_vc,
        seq_lens=seq_lens,
        q_lens=q_lens,
        page_table=drawn.table(rng, setup, seq_lens),
        tree=tree,
        trees=trees,
        latents=latents,
        keys=keys,
        stored=[rows_of(spec, dtype, *pair) for pair in zip(latents, keys, strict=True)],
    )


def rows_of(spec: MLASpec, dtype, latent, key):
    """Rows as the cache holds them: floats, or bytes with a scale for each group of 128."""
    if spec.kv_dtype != "fp8_e4m3":
        kind = jnp.dtype(spec.kv_dtype or dtype)
        return np.concatenate([latent, key], axis=1).astype(kind)
    parts, scales = [], []
    for at in range(0, latent.shape[1], GROUP):
        group = latent[:, at : at + GROUP].astype(np.float32)
        top = np.abs(group).max(axis=1)
        stored, scale = drawn.quantise(group, _E4M3, np.where(top > 0, top * np.float32(1 / 448), np.float32(1)))
        parts.append(stored.view(np.uint8))
        scales.append(scale[:, None].view(np.uint8))
    key = np.ascontiguousarray(key.astype(ml_dtypes.bfloat16)).view(np.uint8)
    return np.concatenate([*parts, *scales, key.reshape(len(latent), 2 * spec.qk_rope_head_dim)], axis=1)


def values_of(spec: MLASpec, rows) -> np.ndarray:
    """Float64 [tokens, rank + rope] of stored rows."""
    if rows.dtype != np.uint8:
        return rows.astype(np.float64)
    rank, groups = spec.kv_lora_rank, -(-spec.kv_lora_rank // GROUP)
    latent = np.ascontiguousarray(rows[:, :rank]).view(_E4M3).astype(np.float64)
    scale = np.ascontiguousarray(rows[:, rank : rank + 4 * groups]).view(np.float32).astype(np.float64)
    key = np.ascontiguousarray(rows[:, rank + 4 * groups :]).view(ml_dtypes.bfloat16).astype(np.float64)
    return np.concatenate([latent * np.repeat(scale, GROUP, axis=1)[:, :rank], key], axis=1)


def cache(layer: Layer, ins: Inputs, *, held=None) -> MLACache:
    """A cache with the first `held` rows of each request (default: all of them) in one layer, poison elsewhere."""
    setup = layer.shape
    held = ins.seq_lens if held is None else held
    sizes = dict(num_layers=NUM_LAYERS, num_pages=setup.num_pages, page_size=setup.page_size)
    empty = MLACache.create(layer.spec, **sizes, dtype=None if layer.kv_dtype else layer.dtype)
    pool = np.full(empty.latent.shape, 0xFF if empty.latent.dtype == jnp.uint8 else np.nan).astype(empty.latent.dtype)
    for b, n in enumerate(held):
        at = drawn.slots(setup, ins, b)[:n]
        pool[at // setup.page_size, at % setup.page_size] = ins.stored[b][:n]
    return dataclasses.replace(empty, latent=jnp.asarray(pool))


def seen(layer: Layer, ins: Inputs) -> list:
    """bool [q_len, seq_len] of each request."""
    pairs = zip(ins.q_lens, ins.seq_lens, ins.trees, strict=True)
    return [float64.visible(n, s, mask=layer.shape.mask, tree=tree) for n, s, tree in pairs]


def answer(layer: Layer, ins: Inputs, *, absorbed: bool, fresh: bool) -> tuple[np.ndarray, np.ndarray]:
    """Float64 out [tokens, heads, v_dim] and the tolerance that a dense twin earns: twice its error, an ulp of the
    output, and two float32 ulps of the largest output (attention has one, as in `earned`; the products around it or the
    merge of its parts the other).

    Args: absorbed: the twin's form. fresh: the step's own tokens are read as computed, not as stored.
    """
    setup, spec, visible = layer.shape, layer.spec, seen(layer, ins)
    want = np.zeros((setup.num_tokens, layer.num_heads, layer.v_dim))
    rows = []
    for b, mine in enumerate(ins.rows):
        values = values_of(spec, ins.stored[b])
        if fresh:
            new = slice(ins.seq_lens[b] - ins.q_lens[b], None)
            values[new] = np.concatenate([ins.latents[b][new], ins.keys[b][new]], axis=1)
        rows.append(values)
        k, v = expand(layer, ins, values)
        q = np.concatenate([ins.q_nope[mine], ins.q_rope[mine]], axis=-1)
        want[mine], _ = float64.attend(q, k, v, visible[b], sm_scale=spec.sm_scale)
    peer = np.asarray(twin(layer, absorbed)(*_dense(layer, ins, rows, visible)), np.float64)
    eps = float(ml_dtypes.finfo(layer.dtype).eps)
    return want, 2 * np.abs(peer - want).max() + eps * np.abs(want) + 2.0**-22 * np.abs(want).max(initial=0)


def expand(layer: Layer, ins: Inputs, values):
    """Float64 keys and values of every head from rows [tokens, rank + rope]."""
    latent, key = values[:, : layer.rank], values[:, layer.rank :]
    k_nope = np.einsum("tr,hnr->thn", latent, ins.w_kc.astype(np.float64))
    k = np.concatenate([k_nope, np.broadcast_to(key[:, None], (len(key), layer.num_heads, layer.rope))], axis=-1)
    return k, np.einsum("tr,hrv->thv", latent, ins.w_vc.astype(np.float64))


def assert_within(answer, out, ins):
    """Real rows within their tolerance, padding rows 0."""
    want, tolerance = answer
    out, used = np.asarray(out), ins.q_lens.sum()
    error = np.abs(out.astype(np.float64) - want)[:used]
    assert (error <= tolerance[:used]).all(), (np.nanmax(error), tolerance.max(), np.argwhere(error > tolerance[:used]))
    assert (out[used:] == 0).all()


def _dense(layer, ins, rows, visible):
    setup = layer.shape
    pool = np.zeros((setup.num_seqs, setup.max_len, layer.rank + layer.rope), np.float32)
    seq, mask = np.zeros(setup.num_tokens, np.int32), np.zeros((setup.num_tokens, setup.max_len), bool)
    for b, mine in enumerate(ins.rows):
        n = ins.seq_lens[b]
        pool[b, :n] = rows[b]
        seq[mine], mask[mine, :n] = b, visible[b]
    q = [np.nan_to_num(x.astype(np.float32)).astype(layer.dtype) for x in (ins.q_nope, ins.q_rope)]
    return tuple(map(jnp.asarray, (*q, pool.astype(layer.dtype), ins.w_kc, ins.w_vc, seq, mask)))


@functools.cache
def twin(layer: Layer, absorbed: bool):
    """Plain dense MLA: scores and softmax in float32, products of the operands' type."""
    rank, scale, dtype = layer.rank, layer.spec.sm_scale, layer.dtype

    def einsum(equation, *args):
        return jnp.einsum(equation, *(x.astype(jnp.float32) for x in args), precision="highest")

    @jax.jit
    def run(q_nope, q_rope, pool, w_kc, w_vc, seq, visible):
        latent, key = pool[..., :rank], pool[..., rank:]
        if absorbed:
            q = jnp.concatenate([einsum("thn,hnr->thr", q_nope, w_kc).astype(dtype), q_rope], axis=-1)
            weights, total = softmax(einsum("thd,tkd->thk", q, pool[seq]), visible)
            mixed = (einsum("thk,tkr->thr", weights.astype(dtype), latent[seq]) / total).astype(dtype)
            return einsum("thr,hrv->thv", mixed, w_vc).astype(dtype)
        k_nope = einsum("skr,hnr->skhn", latent, w_kc).astype(dtype)
        shared = jnp.broadcast_to(key[:, :, None], (*k_nope.shape[:3], key.shape[2]))
        k, v = jnp.concatenate([k_nope, shared], axis=-1), einsum("skr,hrv->skhv", latent, w_vc).astype(dtype)
        weights, total = softmax(einsum("thd,tkhd->thk", jnp.concatenate([q_nope, q_rope], axis=-1), k[seq]), visible)
        return (einsum("thk,tkhv->thv", weights.astype(dtype), v[seq]) / total).astype(dtype)

    def softmax(scores, visible):
        scores = jnp.where(visible[:, None], scores * scale, -jnp.inf)
        top = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - jnp.where(top == -jnp.inf, 0.0, top))
        total = jnp.sum(weights, axis=-1, keepdims=True)
        return weights, jnp.where(total > 0, total, 1.0)

    return run
