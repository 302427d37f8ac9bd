"""Where keys and values live. All layers share one carried array: a layer is an offset on page ids, never a slice."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from jattn.spec import KV_DTYPES, AttnSpec, MLASpec, check_page_size
from pallas_kernels._common import latent_rows, tpu_rows
from pallas_kernels.kv_write.move import move_rows

_INT32_ROWS = 2**31 - 1
_PLAIN, _ROWS, _WORDS, _SCALED = "token_major", "rows", "row_words_", "row_scales_"
_LATENT, _LATENT_LANES, _LATENT_FP8 = "latent_rope", "latent_rope_lanes", "latent_e4m3_rope_bf16"
_LATENT_WORDS, _LATENT_BYTES = "latent_words_", "latent_e4m3_lanes"
_BITS = {"token_major_e4m3_bits": jnp.float8_e4m3fn, "token_major_e5m2_bits": jnp.float8_e5m2}
"""Layouts in which uint8 holds 8-bit floats: XLA:CPU, which has none, would convert the whole pool at each use."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PagedKV:
    """Paged keys and values of every layer, token-major. Carry it through jit with its buffers donated.

    Scanning it in and out as xs/ys, or one array a layer, would copy the pool each step. In the layout "rows", which
    the kernels of TPU want (`Choice.kv_layout`), `k` holds keys and values of a token side by side, and `v` is None;
    scales of each token lie there, too, and `k_scale` and `v_scale` are None.
    """

    k: jax.Array  # [num_layers * num_pages, page_size, num_kv_heads, head_dim]; as rows [..., page_size, lanes]
    v: jax.Array | None  # [num_layers * num_pages, page_size, num_kv_heads, v_head_dim]
    k_scale: jax.Array | None = None  # f32[num_layers], or f32[num_layers * num_pages, page_size, num_kv_heads]
    v_scale: jax.Array | None = None  # like k_scale; stored value = value / scale
    num_layers: int = dataclasses.field(metadata=dict(static=True))
    layout: str = dataclasses.field(default=_PLAIN, metadata=dict(static=True))  # physical packing

    @classmethod
    def create(
        cls,
        spec: AttnSpec,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        dtype: jax.typing.DTypeLike | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        layout: str | None = None,
    ) -> Self:
        """An empty cache of `num_pages` pages a layer.

        Args: dtype: used when `spec.kv_dtype` is None (default float32). k_scale, v_scale: per-tensor scales of a
          quantised cache; with `spec.kv_scales == "token"` scales are measured at each write instead.
          layout: None keeps 8-bit floats as their bits, in uint8; "token_major" keeps them as they are, for kernels
          that want that (on a CPU each use then converts the whole pool); "rows" is for kernels of TPU, and becomes
          "row_words_..." for pages of a size that is no multiple of 8, else "row_scales_..." with scales a token.
        Raises: ValueError if a size is out of range, if a row index would not fit int32, or for another layout.

        >>> spec = AttnSpec(num_q_heads=9, num_kv_heads=3, head_dim=64)
        >>> PagedKV.create(spec, num_layers=2, num_pages=10, page_size=16).k.shape
        (20, 16, 3, 64)
        """
        _check_pool(num_layers, num_pages, page_size)
        stored = KV_DTYPES[spec.kv_dtype] if spec.kv_dtype else _unscaled(dtype or jnp.float32)
        default = next((name for name, kind in _BITS.items() if kind == stored), _PLAIN)
        layout = layout or default
        if layout not in (_PLAIN, _ROWS, default):
            raise ValueError(
                f"layout={layout!r} for {jnp.dtype(stored)}: want {_PLAIN!r}, {_ROWS!r}, or None for {default!r}"
            )
        held = jnp.uint8 if layout in _BITS else stored
        shape = (num_layers * num_pages, page_size, spec.num_kv_heads)
        scales = {}
        if spec.quantised:
            for name, value in (("k_scale", k_scale), ("v_scale", v_scale)):
                token = spec.kv_scales == "token"
                scales[name] = jnp.full(shape if token else (num_layers,), 1.0 if token else value, jnp.float32)
        if layout == _ROWS:
            row = rows_of(spec)
            scales = {} if row.scales else scales
            if tpu_rows.held_as_words(page_size):
                layout = f"{_WORDS}{jnp.dtype(stored).name}"
                k = jnp.zeros((*shape[:2], *tpu_rows.word_shape(row, stored)), jnp.int32)
            else:
                layout = f"{_SCALED}{jnp.dtype(stored).name}" if row.scales else layout
                k = jnp.zeros((*shape[:2], row.held_lanes), row.held_dtype(stored))
            return cls(k=k, v=None, num_layers=num_layers, layout=layout, **scales)
        return cls(
            k=jnp.zeros((*shape, spec.head_dim), held),
            v=jnp.zeros((*shape, spec.v_head_dim), held),
            num_layers=num_layers,
            layout=layout,
            **scales,
        )

    @property
    def num_pages(self) -> int:
        """Pages a layer."""
        return self.k.shape[0] // self.num_layers

    @property
    def dtype(self) -> jnp.dtype:
        """What is stored: the dtype of `k` and `v`, or the 8-bit float whose bits they hold."""
        for prefix in (_WORDS, _SCALED):
            if self.layout.startswith(prefix):
                return jnp.dtype(self.layout.removeprefix(prefix))
        return jnp.dtype(_BITS.get(self.layout, self.k.dtype))

    @property
    def scaled_rows(self) -> bool:
        """Whether scales of each token lie in the rows of `k`."""
        return self.v is None and self.k_scale is None and self.dtype.itemsize == 1

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.k.shape[1]

    @property
    def token_scales(self) -> bool:
        """Whether `k_scale` and `v_scale` have one for each token and KV head."""
        return self.k_scale is not None and self.k_scale.ndim == 3

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    def move(self, from_slots: jax.Array, to_slots: jax.Array) -> Self:
        """This cache with rows copied to other slots, in every layer: how accepted nodes of a tree come to the front.

        Args: from_slots, to_slots: i32[moves], as in `Plan.write_slots`; -1 moves nothing. No slot may be written
          twice, and none that is written may be read by a later move.
        """
        names = ("k", "v", "k_scale", "v_scale") if self.token_scales else ("k", "v")
        names = tuple(name for name in names if getattr(self, name) is not None)
        pools = tuple(getattr(self, name) for name in names)
        moved = move_rows(pools, from_slots, to_slots, num_pages=self.num_pages)
        return dataclasses.replace(self, **dict(zip(names, moved, strict=True)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RaggedKV:
    """Fresh keys and values of a step, packed request after request: plain prefill, prefix chunks, one-shot MHA."""

    k: jax.Array  # [kv_tokens, num_kv_heads, head_dim]
    v: jax.Array  # [kv_tokens, num_kv_heads, v_head_dim]
    cu_kv_lens: jax.Array  # i32[seqs + 1], first entry 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MLACache:
    """Paged latents of every layer: one row a token holds the normed latent, then the rotated shared key.

    Carry it through jit with its buffer donated, as `PagedKV`. Layouts: "latent_rope", float entries;
    "latent_rope_lanes", the same and zeros up to a multiple of 128, which the kernels of TPU want (`Choice.kv_layout`:
    a row that is no whole number of lanes would make XLA copy the pool before each call); and
    "latent_e4m3_rope_bf16", bytes: the latent as e4m3, an f32 scale for each 128 of it (the last group may be shorter),
    the key as bfloat16. For DeepSeek that is 512 fp8, 4 scales and 64 bfloat16, 656 bytes a token instead of 1152; with
    "latent_rope_lanes" asked for, the same numbers in whole lanes, 768 bytes instead of 1280.
    """

    latent: jax.Array  # [num_layers * num_pages, page_size, kv_lora_rank + qk_rope_head_dim | lanes], or u8[..., bytes]
    num_layers: int = dataclasses.field(metadata=dict(static=True))
    layout: str = dataclasses.field(default=_LATENT, metadata=dict(static=True))

    @classmethod
    def create(
        cls,
        spec: MLASpec,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        dtype: jax.typing.DTypeLike | None = None,
        layout: str | None = None,
    ) -> Self:
        """An empty cache of `num_pages` pages a layer.

        Args: dtype: used when `spec.kv_dtype` is None (default bfloat16). layout: None, or "latent_rope_lanes", which
          becomes "latent_words_..." for pages that are not a multiple of 8 tokens.
        Raises: ValueError if a size is out of range, if a row index would not fit int32, or for a kv_dtype in which no
          latent is stored, or a layout that does not go with it.

        >>> spec = MLASpec(num_q_heads=2, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        ...                kv_dtype="fp8_e4m3")
        >>> cache = MLACache.create(spec, num_layers=2, num_pages=10, page_size=16)
        >>> cache.latent.shape, cache.layout
        ((20, 16, 656), 'latent_e4m3_rope_bf16')
        """
        _check_pool(num_layers, num_pages, page_size)
        width, held = spec.latent_dims, KV_DTYPES[spec.kv_dtype] if spec.kv_dtype else None
        narrow = spec.kv_dtype == "fp8_e4m3"
        legal = (_LATENT_FP8 if narrow else _LATENT, _LATENT_LANES)
        layout = layout or legal[0]
        if layout not in legal:
            raise ValueError(
                f"layout={layout!r} for kv_dtype={spec.kv_dtype!r}: want one of {', '.join(legal)}, or None"
            )
        if layout == _LATENT_FP8:
            width = latent_rows.num_bytes(spec.kv_lora_rank, spec.qk_rope_head_dim)
            held = jnp.uint8
        elif held is not None and jnp.dtype(held).itemsize < 2 and not narrow:
            raise ValueError(
                f"MLASpec.kv_dtype={spec.kv_dtype!r}: latents are stored as fp8_e4m3 or as a 16- or 32-bit float; "
                "name one of those"
            )
        held = _unscaled(dtype or jnp.bfloat16, "MLASpec") if held is None else held
        tail, kind = (width,), held
        if layout == _LATENT_LANES:
            row = latent_row(spec)
            tail, kind = (row.held_lanes,), row.held_dtype(held)
            layout = _LATENT_BYTES if narrow else layout
            if tpu_rows.held_as_words(page_size):
                layout = f"{_LATENT_WORDS}{jnp.dtype(held).name}"
                tail, kind = tpu_rows.word_shape(row, held), jnp.int32
        pool = jnp.zeros((num_layers * num_pages, page_size, *tail), kind)
        return cls(latent=pool, num_layers=num_layers, layout=layout)

    @property
    def num_pages(self) -> int:
        """Pages a layer."""
        return self.latent.shape[0] // self.num_layers

    @property
    def dtype(self) -> jnp.dtype:
        """What latents are stored as."""
        if self.layout.startswith(_LATENT_WORDS):
            return jnp.dtype(self.layout.removeprefix(_LATENT_WORDS))
        return jnp.dtype(jnp.float8_e4m3fn) if self.layout in (_LATENT_FP8, _LATENT_BYTES) else self.latent.dtype

    @property
    def words(self) -> dict[str, jnp.dtype]:
        """What a kernel must be told to read a pool of words: the dtype of its entries."""
        return {"kv_dtype": self.dtype} if self.layout.startswith(_LATENT_WORDS) else {}

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.latent.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the pool."""
        return self.latent.size * self.latent.dtype.itemsize

    def move(self, from_slots: jax.Array, to_slots: jax.Array) -> Self:
        """This cache with rows copied to other slots, in every layer; arguments as in `PagedKV.move`."""
        (moved,) = move_rows((self.latent,), from_slots, to_slots, num_pages=self.num_pages)
        return dataclasses.replace(self, latent=moved)


Cache = PagedKV | MLACache  # what a model's layers write


def rows_of(spec: AttnSpec) -> tpu_rows.Row:
    """How the layout "rows" holds a token of a layer."""
    widths = dict(k_dim=spec.head_dim, v_dim=spec.v_head_dim or spec.head_dim)
    return tpu_rows.Row(kv_heads=spec.num_kv_heads, scales=scaled_rows(spec), **widths)


def scaled_rows(spec: AttnSpec) -> bool:
    """Whether each token of a layer has scales of its own."""
    return spec.quantised and spec.kv_scales == "token"


def latent_row(spec: MLASpec) -> tpu_rows.LatentRow:
    """How the layout "latent_rope_lanes" holds a token of a layer."""
    held = tpu_rows.LatentBytes(latent_dim=spec.kv_lora_rank, rope_dim=spec.qk_rope_head_dim)
    packed = held if spec.kv_dtype == "fp8_e4m3" else None
    return tpu_rows.LatentRow(k_dim=spec.latent_dims, v_dim=spec.kv_lora_rank, packed=packed)


def _check_pool(num_layers: int, num_pages: int, page_size: int) -> None:
    check_page_size(page_size)
    if num_layers < 1 or num_pages < 1:
        raise ValueError(f"num_layers={num_layers}, num_pages={num_pages}: want at least 1 of each")
    rows = num_layers * num_pages * page_size
    if rows > _INT32_ROWS:
        raise ValueError(
            f"{num_layers} layers x {num_pages} pages x {page_size} tokens is {rows} rows, past the int32 index "
            f"limit {_INT32_ROWS}: use fewer pages"
        )


def _unscaled(dtype, spec: str = "AttnSpec") -> jnp.dtype:
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        raise ValueError(f"dtype={dtype}: rows this narrow are stored with scales; name it as {spec}.kv_dtype")
    return dtype
