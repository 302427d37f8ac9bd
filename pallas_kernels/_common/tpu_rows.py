"""How a TPU pool holds a token: one row of lanes, keys of all heads and then values of all heads, for one copy a page.

XLA tiles the last two dims of an array by (8, 128), or (4, 128) and (2, 128) for as few rows, and a Pallas kernel takes
an operand as it lies only if its tiles are those; `[page_size, kv_heads, head_dim]` with few or narrow heads is padded
or transposed, and then copied whole before the kernel. Rows of lanes are never padded by more than their last 127
lanes. What XLA would lay out otherwise (pages of 1, 3, 5 ... rows) is held as 32-bit words, a token a tile row.
A scale a token and head lies in the row, too, as bytes of an 8-bit pool: one copy a page brings all.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels._common import latent_rows

LANES = 128


def round_up(n: int, step: int) -> int:
    """The smallest multiple of `step` that is at least `n`."""
    return -(-n // step) * step


def plane_of(n: int, bytes_each: int) -> int:
    """Lanes from one byte of `n` numbers to the next: as many bytes as go into 128 lanes lie side by side there."""
    return LANES // bytes_each if n * bytes_each <= LANES else round_up(n, LANES)


def _joined(parts: list[jax.Array], dtype) -> jax.Array:
    # numbers of `dtype` from their equal parts, lowest bits first. By shifts: XLA folds a bitcast to wider numbers of a
    # transposed constant as if it were not transposed (0.11.2 and 0.12.0.1).
    narrow, wide = (jnp.dtype(f"uint{8 * jnp.dtype(kind).itemsize}") for kind in (parts[0].dtype, dtype))
    bits = 8 * narrow.itemsize
    words = (jax.lax.bitcast_convert_type(x, narrow).astype(wide) << wide.type(bits * i) for i, x in enumerate(parts))
    return jax.lax.bitcast_convert_type(functools.reduce(jnp.bitwise_or, words), dtype)


def to_planes(numbers: jax.Array) -> jax.Array:
    """Numbers [..., n] as bytes int8[..., bytes_each * plane], all first bytes first."""
    size = numbers.dtype.itemsize
    plane = plane_of(numbers.shape[-1], size)
    parts = jnp.swapaxes(jax.lax.bitcast_convert_type(numbers, jnp.int8), -1, -2)  # [..., bytes_each, n]
    parts = jnp.pad(parts, [(0, 0)] * (parts.ndim - 1) + [(0, plane - numbers.shape[-1])])
    return parts.reshape(*parts.shape[:-2], size * plane)


def from_planes(planes: jax.Array, n: int, dtype) -> jax.Array:
    """The inverse of `to_planes`."""
    size = jnp.dtype(dtype).itemsize
    parts = planes.reshape(*planes.shape[:-1], size, planes.shape[-1] // size)[..., :n]
    return _joined([parts[..., i, :] for i in range(size)], dtype)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The lanes of a token: K of head 0, K of head 1, ..., V of head 0, ..., zeros up to `lanes`.

    With `scales`, bytes: behind those the first byte of the f32 scale of K of each head, then of V, from the next
    multiple of 128 on; their second bytes `plane` lanes further, and so on.
    """

    kv_heads: int
    k_dim: int
    v_dim: int
    scales: bool = False

    @property
    def used(self) -> int:
        """Lanes of keys and values."""
        return self.kv_heads * (self.k_dim + self.v_dim)

    @property
    def scales_at(self) -> int:
        """First lane behind keys and values."""
        return round_up(self.used, LANES)

    @property
    def plane(self) -> int:
        """Lanes from one byte of the scales to the next; 0 without scales."""
        return plane_of(2 * self.kv_heads, 4) if self.scales else 0

    @property
    def lanes(self) -> int:
        """Lanes in all, a multiple of 128."""
        return self.scales_at + 4 * self.plane

    @property
    def held_lanes(self) -> int:
        """Lanes of a token in a page."""
        return self.lanes

    def held_dtype(self, kind) -> jnp.dtype:
        """Dtype of a page of rows, where keys and values are of `kind`: bytes where a row has other numbers, too."""
        return jnp.dtype(jnp.int8 if self.scales else kind)

    def window(self, side: str, head: int, heads: int) -> tuple[int, int]:
        """First lane and lanes of the aligned window of `heads` heads from `head` on; side "k" or "v".

        All windows of a side and a number of heads are equally wide.
        """
        dim = self.k_dim if side == "k" else self.v_dim
        base = 0 if side == "k" else self.kv_heads * self.k_dim
        starts = [base + at * dim for at in range(0, self.kv_heads, heads)]
        wide = max(round_up(at + heads * dim, LANES) - at // LANES * LANES for at in starts)
        return min((base + head * dim) // LANES * LANES, self.lanes - wide), wide

    def window_of_tile(self, side: str, tile: jax.Array, heads: int) -> tuple[jax.Array, int]:
        """`window` of the heads from tile * heads on, where the tile is traced."""
        _, wide = self.window(side, 0, heads)
        first = self.offset(side, 0) + tile * (heads * (self.k_dim if side == "k" else self.v_dim))
        return jnp.minimum(first // LANES * LANES, self.lanes - wide), wide

    def offset(self, side: str, head: int) -> int:
        """First lane of a head."""
        return head * self.k_dim if side == "k" else self.kv_heads * self.k_dim + head * self.v_dim


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LatentBytes:
    """A latent row in 8 bits: e4m3 bits of the latent, bytes of the bfloat16 key, bytes of an f32 scale for each 128
    latents, each from a multiple of 128 lanes on and in planes (`to_planes`)."""

    latent_dim: int
    rope_dim: int

    @property
    def groups(self) -> int:
        """Scales of a token."""
        return -(-self.latent_dim // LANES)

    @property
    def rope_at(self) -> int:
        """First lane of the key."""
        return round_up(self.latent_dim, LANES)

    @property
    def rope_plane(self) -> int:
        """Lanes from the key's first bytes to its second."""
        return plane_of(self.rope_dim, 2)

    @property
    def scales_at(self) -> int:
        """First lane of the scales."""
        return self.rope_at + 2 * self.rope_plane

    @property
    def lanes(self) -> int:
        """Lanes in all, a multiple of 128."""
        return self.scales_at + 4 * plane_of(self.groups, 4)

    def pack(self, latent: jax.Array, k_rope: jax.Array) -> jax.Array:
        """int8[tokens, lanes] of latents [tokens, latent_dim] and keys, quantised as `latent_rows.pack` does."""
        return self.from_bits(latent_rows.pack(latent, k_rope, jnp.uint8))

    def from_bits(self, bits: jax.Array) -> jax.Array:
        """int8[..., lanes] of rows as `latent_rows` has them, uint8[..., bytes]."""
        values, scales, key = jnp.split(bits, (self.latent_dim, self.latent_dim + 4 * self.groups), axis=-1)
        values = jnp.pad(values, [(0, 0)] * (bits.ndim - 1) + [(0, self.rope_at - self.latent_dim)])
        key, scales = (x.reshape(*bits.shape[:-1], x.shape[-1] // n, n) for x, n in ((key, 2), (scales, 4)))
        key = jax.lax.bitcast_convert_type(key, jnp.bfloat16)
        scales = jax.lax.bitcast_convert_type(scales, jnp.float32)
        values = jax.lax.bitcast_convert_type(values, jnp.int8)
        return jnp.concatenate([values, to_planes(key), to_planes(scales)], axis=-1)

    def unpack(self, rows: jax.Array, dtype) -> jax.Array:
        """[..., latent_dim + rope_dim] of rows int8[..., lanes], as `latent_rows.unpack` does."""
        values, key, scales = jnp.split(rows, (self.rope_at, self.scales_at), axis=-1)
        key = from_planes(key, self.rope_dim, jnp.bfloat16)
        scales = from_planes(scales, self.groups, jnp.float32)
        parts = [jax.lax.bitcast_convert_type(values[..., : self.latent_dim], jnp.uint8)]
        for x in (scales, key):
            of_bytes = jax.lax.bitcast_convert_type(x, jnp.uint8)  # [..., n, bytes_each]
            parts.append(of_bytes.reshape(*rows.shape[:-1], of_bytes.shape[-2] * of_bytes.shape[-1]))
        return latent_rows.unpack(jnp.concatenate(parts, axis=-1), self.latent_dim, dtype)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LatentRow(Row):
    """The lanes of a latent row: the latent, then the rotated key; the value is the front of the key.

    With `packed` a page holds them in 8 bits, and the key begins at the next multiple of 128 lanes.
    """

    kv_heads: int = 1
    packed: LatentBytes | None = None

    @property
    def used(self) -> int:
        return self.k_dim

    @property
    def held_lanes(self) -> int:
        return self.packed.lanes if self.packed else self.lanes

    def held_dtype(self, kind) -> jnp.dtype:
        return jnp.dtype(jnp.int8 if self.packed else kind)

    def window(self, side: str, head: int, heads: int) -> tuple[int, int]:
        return 0, round_up(self.k_dim if side == "k" else self.v_dim, LANES)

    def window_of_tile(self, side: str, tile: jax.Array, heads: int) -> tuple[jax.Array, int]:
        base, wide = self.window(side, 0, heads)
        return jnp.full_like(tile, base), wide  # all heads read the same lanes

    def offset(self, side: str, head: int) -> int:
        return 0


def pack(k: jax.Array, v: jax.Array, k_scale: jax.Array | None = None, v_scale: jax.Array | None = None) -> jax.Array:
    """[..., kv_heads, k_dim] and [..., kv_heads, v_dim] as rows [..., lanes].

    Args: k_scale, v_scale: f32[..., kv_heads]; with them k and v are 8-bit, and rows are of their bits, in int8.

    >>> pack(jnp.ones((3, 2, 64)), jnp.ones((3, 2, 64))).shape
    (3, 256)
    """
    row = Row(kv_heads=k.shape[-2], k_dim=k.shape[-1], v_dim=v.shape[-1], scales=k_scale is not None)
    parts = [x.reshape(*x.shape[:-2], -1) for x in (k, v)]
    if k_scale is not None and v_scale is not None:
        parts = [jax.lax.bitcast_convert_type(x, jnp.int8) for x in parts]
    if row.scales_at > row.used:
        parts.append(jnp.zeros((*k.shape[:-2], row.scales_at - row.used), parts[0].dtype))
    if k_scale is not None and v_scale is not None:
        parts.append(to_planes(jnp.concatenate([k_scale, v_scale], axis=-1).astype(jnp.float32)))
    return jnp.concatenate(parts, axis=-1)


def held_as_words(page_size: int) -> bool:
    """Whether pages of this size are held as words: a page of rows must be whole tiles of 8."""
    return page_size % 8 != 0


def word_shape(row: Row, dtype) -> tuple[int, int, int]:
    """Shape of a token in 32-bit words: tiles of one row, so that no token shares a tile with another."""
    return -(-row.held_lanes * row.held_dtype(dtype).itemsize // (4 * LANES)), 1, LANES


def to_words(rows: jax.Array) -> jax.Array:
    """Rows [..., lanes] as int32 words [..., tiles, 1, 128]: word i of a tile holds entry i of the next 4 / itemsize
    tiles of the row."""
    parts = 4 // rows.dtype.itemsize
    # bits first: on a CPU XLA moves 8-bit floats as wider ones, and a NaN loses its own bits
    rows = jax.lax.bitcast_convert_type(rows, f"uint{8 * rows.dtype.itemsize}")
    rows = jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, -rows.shape[-1] % (LANES * parts))])
    tiles = rows.reshape(*rows.shape[:-1], -1, parts, LANES)
    return _joined([tiles[..., i, :] for i in range(parts)], jnp.int32)[..., None, :]


def from_words(words: jax.Array, dtype, lanes: int) -> jax.Array:
    """The inverse of `to_words`."""
    lead, size = words.shape[:-3], jnp.dtype(dtype).itemsize
    tiles = jax.lax.bitcast_convert_type(words[..., 0, :], f"uint{8 * size}")
    rows = tiles if size == 4 else jnp.swapaxes(tiles, -1, -2)
    return jax.lax.bitcast_convert_type(rows.reshape(*lead, -1)[..., :lanes], dtype)


def unpack(rows: jax.Array, row: Row) -> tuple[jax.Array, jax.Array]:
    """Keys and values of `pack`, without scales."""
    middle = row.kv_heads * row.k_dim
    k, v = rows[..., :middle], rows[..., middle : row.used]
    return k.reshape(*k.shape[:-1], row.kv_heads, row.k_dim), v.reshape(*v.shape[:-1], row.kv_heads, row.v_dim)
