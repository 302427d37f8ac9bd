"""Rows of the schedule report: one kernel on one piece of work, and how often its steady-state loop runs there."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from tpu_target import Generation

from pallas_kernels.attention.tpu_config import Config


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A batch of one layer: what any kernel must read from HBM for it, and multiply."""

    name: str
    hbm_bytes: int
    flops: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A kernel's call for a work on a generation."""

    function: Callable
    arrays: tuple  # shapes of its positional arguments
    inside: str  # part of the name under which the compiler dumps it
    trips: float  # of the steady-state loop, over all cores
    cores: int = 1  # that share the trips
    donate: tuple[int, ...] = ()
    sizes: str = ""  # block sizes, as text
    copies: int = 0  # from HBM that a trip starts
    hbm_bytes: int | None = None  # what the kernel moves, where its layout is wider than the work


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A kernel on a work; `call` raises NotImplementedError for a generation that the kernel does not know."""

    kernel: str
    work: Work
    call: Callable[[Generation], Call]
    needs: str | None = None  # a module that must be installed


def shape(*sizes: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """An array of that shape."""
    return jax.ShapeDtypeStruct(sizes, dtype)


def i32(*sizes: int) -> jax.ShapeDtypeStruct:
    """Integers of that shape."""
    return shape(*sizes, dtype=jnp.int32)


def causal_pairs(q_len: int, kv_len: int) -> int:
    """Visible (query, key) pairs of a request whose last query lines up with its last key."""
    return q_len * kv_len - q_len * (q_len - 1) // 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Grouped-query attention of `seqs` requests with `q_len` new tokens and `kv_len` keys each, bfloat16."""

    name: str
    seqs: int = 64
    q_len: int = 1
    kv_len: int = 4096
    q_heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    page: int = 128
    tree: bool = False  # whether the new tokens are nodes of a tree
    config: Config | None = None  # sizes to compare; None: those that a call chooses

    @property
    def tokens(self) -> int:
        return self.seqs * self.q_len

    @property
    def work(self) -> Work:
        keys = 2 * 2 * self.seqs * self.kv_len * self.kv_heads * self.dim  # keys and values of two bytes
        rows = 2 * 2 * self.tokens * self.q_heads * self.dim  # queries and outputs
        pairs = self.seqs * causal_pairs(self.q_len, self.kv_len)
        return Work(name=self.name, hbm_bytes=keys + rows, flops=2 * 2 * pairs * self.q_heads * self.dim)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Latents:
    """Absorbed latent attention of `seqs` requests with `q_len` new tokens and `kv_len` keys each, bfloat16."""

    name: str
    seqs: int = 64
    q_len: int = 1
    kv_len: int = 4096
    heads: int = 128
    latent: int = 512
    rope: int = 64

    @property
    def tokens(self) -> int:
        return self.seqs * self.q_len

    def hbm_bytes(self, lanes: int) -> int:
        """Bytes of rows of so many entries, of queries and of outputs."""
        rows = 2 * self.tokens * self.heads * (2 * self.latent + self.rope)
        return 2 * self.seqs * self.kv_len * lanes + rows

    @property
    def work(self) -> Work:
        width = self.latent + self.rope
        pairs = self.seqs * causal_pairs(self.q_len, self.kv_len)
        return Work(
            name=self.name,
            hbm_bytes=self.hbm_bytes(width),
            flops=2 * pairs * self.heads * (width + self.latent),
        )


DECODE = Heads(name="decode 64 x 4096, 32/8 heads of 128")
DECODES = tuple(
    Heads(name=f"decode 64 x 4096, {4 * heads}/{heads} heads of {dim}", q_heads=4 * heads, kv_heads=heads, dim=dim)
    for heads in (1, 2, 3, 8)
    for dim in (64, 80, 96, 128, 256)
    if (heads, dim) != (8, 128)
)
DECODE_16 = Heads(name="decode 64 x 4096, 32/8 heads of 128, pages of 16", page=16)
VERIFY = Heads(name="verify 64 x 8 on 4096, 32/8 heads of 128", q_len=8)
TREE = Heads(name="tree of 8, 64 on 4096, 32/8 heads of 128", q_len=8, tree=True)
PREFILL = Heads(name="prefill 1 x 8192, 32/8 heads of 128", seqs=1, q_len=8192, kv_len=8192)
MLA_DECODE = Latents(name="MLA decode 64 x 4096, 128 heads")
MLA_DECODE_16 = Latents(name="MLA decode 64 x 4096, 16 heads", heads=16)
MLA_VERIFY = Latents(name="MLA verify 64 x 8 on 4096, 128 heads", q_len=8)
MLA_VERIFY_16 = Latents(name="MLA verify 64 x 8 on 4096, 16 heads", heads=16, q_len=8)
