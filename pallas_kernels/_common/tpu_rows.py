"""How a TPU pool holds a token: one row of lanes, keys of all heads and then values of all heads, for one copy a page.

XLA tiles the last two dims of an array by (8, 128), or (4, 128) and (2, 128) for as few rows, and a Pallas kernel takes
an operand as it lies only if its tiles are those; `[page_size, kv_heads, head_dim]` with few or narrow heads is padded
or transposed, and then copied whole before the kernel. Rows of lanes are never padded by more than their last 127
lanes. What XLA would lay out otherwise (pages of 1, 3, 5 ... rows) is held as 32-bit words, a token a tile row.
"""

import dataclasses

import jax
import jax.numpy as jnp

LANES = 128


def round_up(n: int, step: int) -> int:
    """The smallest multiple of `step` that is at least `n`."""
    return -(-n // step) * step


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The lanes of a token: K of head 0, K of head 1, ..., V of head 0, ..., zeros up to `lanes`."""

    kv_heads: int
    k_dim: int
    v_dim: int

    @property
    def used(self) -> int:
        """Lanes that hold something."""
        return self.kv_heads * (self.k_dim + self.v_dim)

    @property
    def lanes(self) -> int:
        """Lanes in all, a multiple of 128."""
        return round_up(self.used, LANES)

    def window(self, side: str, head: int, heads: int) -> tuple[int, int]:
        """First lane and lanes of the aligned window of `heads` heads from `head` on; side "k" or "v".

        All windows of a side and a number of heads are equally wide.
        """
        dim = self.k_dim if side == "k" else self.v_dim
        base = 0 if side == "k" else self.kv_heads * self.k_dim
        starts = [base + at * dim for at in range(0, self.kv_heads, heads)]
        wide = max(round_up(at + heads * dim, LANES) - at // LANES * LANES for at in starts)
        return min((base + head * dim) // LANES * LANES, self.lanes - wide), wide

    def offset(self, side: str, head: int) -> int:
        """First lane of a head."""
        return head * self.k_dim if side == "k" else self.kv_heads * self.k_dim + head * self.v_dim


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LatentRow(Row):
    """The lanes of a latent row: the latent, then the rotated key; the value is the front of the key."""

    kv_heads: int = 1

    @property
    def used(self) -> int:
        return self.k_dim

    def window(self, side: str, head: int, heads: int) -> tuple[int, int]:
        return 0, round_up(self.k_dim if side == "k" else self.v_dim, LANES)

    def offset(self, side: str, head: int) -> int:
        return 0


def pack(k: jax.Array, v: jax.Array) -> jax.Array:
    """[..., kv_heads, k_dim] and [..., kv_heads, v_dim] as rows [..., lanes].

    >>> pack(jnp.ones((3, 2, 64)), jnp.ones((3, 2, 64))).shape
    (3, 256)
    """
    row = Row(kv_heads=k.shape[-2], k_dim=k.shape[-1], v_dim=v.shape[-1])
    parts = [x.reshape(*x.shape[:-2], -1) for x in (k, v)]
    if row.lanes > row.used:
        parts.append(jnp.zeros((*k.shape[:-2], row.lanes - row.used), k.dtype))
    return jnp.concatenate(parts, axis=-1)


def held_as_words(page_size: int) -> bool:
    """Whether pages of this size are held as words: a page of rows must be whole tiles of 8."""
    return page_size % 8 != 0


def word_shape(row: Row, dtype) -> tuple[int, int, int]:
    """Shape of a token in 32-bit words: tiles of one row, so that no token shares a tile with another."""
    return -(-row.lanes * jnp.dtype(dtype).itemsize // (4 * LANES)), 1, LANES


def to_words(rows: jax.Array) -> jax.Array:
    """Rows [..., lanes] as int32 words [..., tiles, 1, 128]: word i of a tile holds entry i of the next 4 / itemsize
    tiles of the row."""
    parts = 4 // rows.dtype.itemsize
    rows = jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, -rows.shape[-1] % (LANES * parts))])
    tiles = jnp.swapaxes(rows.reshape(*rows.shape[:-1], -1, parts, LANES), -1, -2)
    tiles = tiles[..., 0] if parts == 1 else tiles
    return jax.lax.bitcast_convert_type(tiles, jnp.int32)[..., None, :]


def from_words(words: jax.Array, dtype, lanes: int) -> jax.Array:
    """The inverse of `to_words`."""
    lead, parts = words.shape[:-3], 4 // jnp.dtype(dtype).itemsize
    tiles = jax.lax.bitcast_convert_type(words[..., 0, :], dtype)
    rows = tiles if parts == 1 else jnp.swapaxes(tiles, -1, -2)
    return rows.reshape(*lead, -1)[..., :lanes]


def unpack(rows: jax.Array, row: Row) -> tuple[jax.Array, jax.Array]:
    """The inverse of `pack`."""
    middle = row.kv_heads * row.k_dim
    k, v = rows[..., :middle], rows[..., middle : row.used]
    return k.reshape(*k.shape[:-1], row.kv_heads, row.k_dim), v.reshape(*v.shape[:-1], row.kv_heads, row.v_dim)
