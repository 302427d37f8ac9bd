"""A grouped-query decoder on whole texts, several in a row, with dense attention and no cache: what training reads."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.models.decoder import Attention, Block, Decoder
from jattn.models.layers import split_heads
from jattn.models.rope import rotate
from jattn.spec import AttnSpec


def check_dense(model: Decoder) -> None:
    """Refuse a model whose attention is more than grouped queries, windows and caps; ValueError says what it has."""
    for layer, block in enumerate(model.layers):
        spec = block.attn.spec
        if not isinstance(spec, AttnSpec) or spec.sinks:
            has = "sinks" if isinstance(spec, AttnSpec) else "latents"
            raise ValueError(f"layer {layer} has attention with {has}: training reads grouped-query attention only")


def grouped(block: Block) -> Attention:
    """The attention of a block of a model that `check_dense` has passed."""
    assert isinstance(block.attn, Attention)
    return block.attn


def positions_of(segments: jax.Array) -> jax.Array:
    """segments i32[seqs, n] -> i32[seqs, n], each token's place in its own text.

    >>> positions_of(jnp.array([[1, 1, 1, 2, 2]])).tolist()
    [[0, 1, 2, 0, 1]]
    """
    at = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
    first = jnp.concatenate([jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], axis=1)
    return at - jax.lax.cummax(jnp.where(first, at, 0), axis=1)


def same_text(segments: jax.Array) -> jax.Array:
    """segments i32[seqs, n] -> bool[seqs, n, n]: key j is seen by query i, of the same text and not behind it."""
    n = segments.shape[1]
    return (segments[:, :, None] == segments[:, None, :]) & jnp.tril(jnp.ones((n, n), bool))[None]


def read(
    model: Decoder,
    tokens: jax.Array,
    segments: jax.Array,
    *,
    taps: tuple[int, ...] = (),
    fused: bool = False,
) -> tuple[jax.Array, list[jax.Array]]:
    """Final hidden states [seqs, n, d], and the streams behind some of the layers, as `Decoder.tapped` gives them.

    Args:
      tokens: i32[seqs, n]. segments: i32[seqs, n], equal within a text; a text does not see its neighbours.
      fused: cuDNN's attention instead of plain JAX: for half precision, on a GPU.
    """
    hidden, streams, _ = read_keys(
        model, tokens, positions_of(segments), same_text(segments), taps=taps, fused=fused, keep=False
    )
    return hidden, streams


def read_keys(
    model: Decoder,
    tokens: jax.Array,
    positions: jax.Array,
    seen: jax.Array,
    *,
    taps: tuple[int, ...] = (),
    fused: bool = False,
    keep: bool = True,
) -> tuple[jax.Array, list[jax.Array], list[tuple[jax.Array, jax.Array]]]:
    """As `read`, with each layer's rotated keys and values [seqs, n, kv_heads, width] where `keep` says so.

    Args: positions: i32[seqs, n]. seen: bool[seqs, n, n], query by key.
    """
    seqs, n = tokens.shape
    x = model.embedded(tokens.reshape(-1))
    phases = phases_of(model, positions.reshape(-1))
    streams, kept = [x], []
    for block, phase in zip(model.layers, phases, strict=True):
        x, pair = _block(*nnx.split(block), x, phase, positions, seen, (seqs, n), fused)
        streams.append(x)
        if keep:
            kept.append(pair)
    taken = [streams[tap].reshape(seqs, n, -1) for tap in taps]
    return model.final_norm(x).reshape(seqs, n, -1), taken, kept


def phases_of(model: Decoder, positions: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    """cos and sin of each layer at `positions` i32[rows]; equal layers share theirs."""
    ropes = [model.config.rope(layer) for layer in range(model.config.num_layers)]
    made = {rope: rope.phases(positions, model.config.rope_dim) for rope in dict.fromkeys(ropes)}
    return [made[rope] for rope in ropes]


def project_heads(attn: Attention, x: jax.Array, phases) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x [rows, d] -> rotated q, rotated k, v [rows, heads, width]."""
    q, k, v = split_heads(attn.qkv(x), attn.spec)
    if attn.q_norm is not None and attn.k_norm is not None:
        q, k = attn.q_norm(q), attn.k_norm(k)
    return rotate(q, *phases), rotate(k, *phases), v


def in_block(block: Block, x: jax.Array, attend) -> jax.Array:
    """`Block` with `attend`, [rows, d] -> [rows, q_heads, width], in place of attention over a cache."""
    out = attend(x if block.attn_norm is None else block.attn_norm(x))
    out = block.attn.out(out.reshape(x.shape[0], -1))
    x = x + (out if block.post_attn_norm is None else block.post_attn_norm(out))
    mixed = block.mlp(block.mlp_norm(x))
    return x + (mixed if block.post_mlp_norm is None else block.post_mlp_norm(mixed))


def attend_heads(q: jax.Array, keys: jax.Array, values: jax.Array, seen: jax.Array, spec: AttnSpec) -> jax.Array:
    """q [seqs, ..., q_heads, w], keys and values [seqs, kv_heads, n, w] -> [seqs, ..., q_heads, w], in v's dtype.

    Args: seen: bool[seqs, ..., n]; each query sees a key at least. `...` is one axis of queries, or none.
    """
    kv_heads, heads, width = keys.shape[1], q.shape[-2], q.shape[-1]
    # HIGHEST is for float32: as `layers.project`
    kwargs: dict[str, Any] = dict(preferred_element_type=jnp.float32)
    kwargs["precision"] = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    grouped = q.reshape(*q.shape[:-2], kv_heads, heads // kv_heads, width)
    scores = jnp.einsum("b...hgd,bhkd->bhg...k", grouped, keys, **kwargs) * jnp.float32(spec.sm_scale or width**-0.5)
    if (cap := spec.logit_soft_cap) is not None:
        scores = cap * jnp.tanh(scores / cap)
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    out = jnp.einsum("bhg...k,bhkd->b...hgd", weights, values, **kwargs)
    return out.reshape(*q.shape[:-1], -1).astype(values.dtype)


def has_fused(spec: AttnSpec) -> bool:
    """Whether cuDNN's attention runs here for heads like these and agrees with plain JAX's."""
    q, k = (jax.random.normal(jax.random.key(i), (2, 64, heads, spec.head_dim), jnp.bfloat16)
            for i, heads in enumerate((spec.num_q_heads, spec.num_kv_heads)))  # fmt: skip
    seen = same_text(jnp.asarray([[1] * 64, [1] * 20 + [2] * 44], jnp.int32))
    try:
        fused = jax.jit(_fused, static_argnums=4)(q, k, k, seen, spec)
    except Exception:  # whatever the plug-in says: the plain path is there
        return False
    plain = attend_heads(q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(k, 1, 2), seen, spec)
    return bool(jnp.max(jnp.abs(fused.astype(jnp.float32) - plain.astype(jnp.float32))) < 0.05)


def _fused(q, k, v, seen, spec: AttnSpec):
    return jax.nn.dot_product_attention(q, k, v, mask=seen[:, None], scale=spec.sm_scale, implementation="cudnn")


def in_window(seen: jax.Array, behind: jax.Array, spec: AttnSpec) -> jax.Array:
    """`seen` without the keys that a sliding window leaves out. behind: i32, by how much a key lies behind a query."""
    return seen if spec.sliding_window is None else seen & (behind < spec.sliding_window)


@functools.partial(jax.jit, static_argnums=(0, 6, 7))  # equal layers are traced once
def _block(graphdef, params, x, phases, positions, seen, shape: tuple[int, int], fused: bool):
    block: Block = nnx.merge(graphdef, params)
    attn, pair = grouped(block), []

    def attend(normed):
        q, k, v = (y.reshape(*shape, *y.shape[1:]) for y in project_heads(attn, normed, phases))
        pair.extend((k, v))
        near = in_window(seen, positions[:, :, None] - positions[:, None, :], attn.spec)
        if not fused:
            return attend_heads(q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), near, attn.spec)
        return _fused(q, k, v, near, attn.spec)

    return in_block(block, x, attend), tuple(pair)
