"""The TPU half of `aot_check.py`: what is compiled for which generations, with its vector memory."""
# Settings are passed on as mappings, and peers are installed for a run only; the checker can follow neither.
# pyright: reportArgumentType=false, reportMissingImports=false, reportOptionalMemberAccess=false

import dataclasses
import functools
from collections.abc import Callable

import aot_shapes
import jax
import jax.numpy as jnp
from tpu_target import GENERATIONS, Compiler, Generation

from pallas_kernels._common.tpu_rows import Row, held_as_words, word_shape
from pallas_kernels.attention import tpu as attention
from pallas_kernels.attention import tpu_ragged, tpu_write
from pallas_kernels.attention.tpu_config import Config
from pallas_kernels.kv_write import tpu_words
from pallas_kernels.merge_states import tpu as merge_states
from pallas_kernels.mla import tpu as mla
from pallas_kernels.mla.tpu_config import row_of


def _pool(row: Row, pages: int, page_size: int, kind: str) -> jax.ShapeDtypeStruct:
    """A pool as a server holds it: XLA may well bring a small one into vector memory before the kernel."""
    words = held_as_words(page_size)
    token = word_shape(row, kind) if words else (row.held_lanes,)
    shape = (max(pages, (1 << 18) // page_size), page_size, *token)
    return jax.ShapeDtypeStruct(shape, jnp.int32 if words else row.held_dtype(kind))


@dataclasses.dataclass(frozen=True)
class _Case:
    def __str__(self):
        given = ((field.name, getattr(self, field.name), field.default) for field in dataclasses.fields(self))
        return f"{type(self).__name__}({', '.join(f'{name}={got}' for name, got, default in given if got != default)})"


@dataclasses.dataclass(frozen=True)
class Attention(_Case):
    """A call of the attention kernel."""

    seqs: int = 64
    q_len: int = 1
    kv_len: int = 4096
    kv_heads: int = 8
    group: int = 4
    dim: int = 128
    v_dim: int | None = None
    page: int = 16
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    token_scales: bool = False
    writes: bool = False  # the step's own keys, too
    mask: str = "causal"
    window: int | None = None
    cap: float | None = None
    sinks: bool = False
    config: Config | None = None

    @property
    def row(self) -> Row:
        """How the pool holds a token."""
        sizes = dict(k_dim=self.dim, v_dim=self.v_dim or self.dim)
        return Row(kv_heads=self.kv_heads, scales=self.token_scales, **sizes)

    def build(self, generation: Generation) -> tuple[Callable, dict]:
        """The call, and the shapes of its arrays."""
        tokens, room = self.seqs * self.q_len, -(-self.kv_len // self.page)

        def shape(*sizes, dtype=self.dtype):
            return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))

        i32 = functools.partial(shape, dtype="int32")
        arrays = dict(
            q=shape(tokens, self.kv_heads * self.group, self.dim),
            k_pages=_pool(self.row, self.seqs * room, self.page, self.kv_dtype or self.dtype),
            page_table=i32(self.seqs, room),
            seq_lens=i32(self.seqs),
            cu_q_lens=i32(self.seqs + 1),
        )
        arrays |= aot_shapes.of_tree(self.mask, tokens=tokens, seqs=self.seqs, nodes=self.q_len)
        arrays |= aot_shapes.of_options(
            scales=bool(self.kv_dtype) and not self.token_scales, sinks=self.kv_heads * self.group if self.sinks else 0
        )
        if self.writes:
            keys = (shape(tokens, self.kv_heads, dim) for dim in (self.dim, self.row.v_dim))
            arrays |= dict(zip(("k", "v", "slots"), (*keys, i32(tokens)), strict=True))
        static = dict(
            kv_heads=self.kv_heads,
            v_dim=self.row.v_dim,
            max_q_len=self.q_len,
            sm_scale=self.dim**-0.5,
            mask=self.mask,
            sliding_window=self.window,
            logit_soft_cap=self.cap,
            config=self.config,
            device=generation.device.name,
            token_scales=self.token_scales,
            kv_dtype=self.kv_dtype or (self.dtype if held_as_words(self.page) else None),
        )
        attend = tpu_write.write_attend if self.writes else attention.paged_attention
        return lambda arrays: attend(**arrays, **static), arrays


@dataclasses.dataclass(frozen=True)
class Ragged(_Case):
    """A call of the attention over packed keys, as expanded latents and plain prefill make it."""

    seqs: int = 4
    tokens: int = 2048
    kv_tokens: int = 2048
    kv_heads: int = 128
    group: int = 1
    dim: int = 192
    v_dim: int = 128
    mask: str = "causal"

    def build(self, generation: Generation) -> tuple[Callable, dict]:
        """The call, and the shapes of its arrays."""

        def shape(*sizes, dtype="bfloat16"):
            return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))

        arrays = dict(
            q=shape(self.tokens, self.kv_heads * self.group, self.dim),
            k=shape(self.kv_tokens, self.kv_heads, self.dim),
            v=shape(self.kv_tokens, self.kv_heads, self.v_dim),
            cu_kv_lens=shape(self.seqs + 1, dtype="int32"),
            cu_q_lens=shape(self.seqs + 1, dtype="int32"),
        )
        static = dict(max_q_len=self.tokens, sm_scale=self.dim**-0.5, mask=self.mask, device=generation.device.name)
        return lambda arrays: tpu_ragged.ragged_attention(**arrays, **static), arrays


@dataclasses.dataclass(frozen=True)
class Latent(_Case):
    """A call of the latent attention."""

    heads: int = 128
    seqs: int = 64
    q_len: int = 1
    kv_len: int = 4096
    latent: int = 512
    rope: int = 64
    page: int = 64
    dtype: str = "bfloat16"
    mask: str = "causal"
    splits: int = 1
    packed: bool = False  # in 8 bits
    writes: bool = False  # the step's own latents, too

    def build(self, generation: Generation) -> tuple[Callable, dict]:
        """The call, and the shapes of its arrays."""
        tokens, room = self.seqs * self.q_len, -(-self.kv_len // self.page)
        row = row_of(num_heads=self.heads, latent_dim=self.latent, rope_dim=self.rope, packed=self.packed)
        kind = "float8_e4m3fn" if self.packed else self.dtype

        def shape(*sizes, dtype=self.dtype):
            return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))

        i32 = functools.partial(shape, dtype="int32")
        arrays = dict(
            q=shape(tokens, self.heads, self.latent + self.rope),
            pages=_pool(row, self.seqs * room, self.page, kind),
            page_table=i32(self.seqs, room),
            seq_lens=i32(self.seqs),
            cu_q_lens=i32(self.seqs + 1),
        )
        arrays |= aot_shapes.of_tree(self.mask, tokens=tokens, seqs=self.seqs, nodes=self.q_len)
        static = dict(
            latent_dim=self.latent,
            max_q_len=self.q_len,
            sm_scale=(128 + self.rope) ** -0.5,
            mask=self.mask,
            num_splits=self.splits,
            kv_dtype=kind if held_as_words(self.page) else None,
            device=generation.device.name,
        )
        if self.writes:
            arrays |= dict(latent=shape(tokens, self.latent), k_rope=shape(tokens, self.rope), slots=i32(tokens))
        attend = mla.write_attend_latent if self.writes else mla.attend_latent
        return lambda arrays: attend(**arrays, **static), arrays


@dataclasses.dataclass(frozen=True)
class Words(_Case):
    """Tokens put into a pool of words, or moved in it."""

    tiles: int = 1  # of a token
    page: int = 3
    tokens: int = 2048
    moves: bool = False
    writes: bool = True  # in place

    def build(self, generation: Generation) -> tuple[Callable, dict]:
        """The call, and the shapes of its arrays."""
        i32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
        arrays = dict(pages=i32(((1 << 18) // self.page // 4 * 4, self.page, self.tiles, 1, 128)))
        arrays |= dict(rows=i32((self.tokens,)), held=jax.ShapeDtypeStruct((self.tokens,), jnp.bool_))
        if self.moves:
            arrays["sources"] = i32((self.tokens,))
            return lambda x: tpu_words.move_words(x["pages"], x["sources"], x["rows"], x["held"], num_layers=4), arrays
        arrays["words"] = i32((self.tokens, self.tiles, 1, 128))
        return lambda x: tpu_words.copy_words(x["pages"], x["words"], x["rows"], x["held"]), arrays


@dataclasses.dataclass(frozen=True)
class Merge(_Case):
    """A call of the merge of states."""

    splits: int = 4
    rows: int = 512
    v_dim: int = 128
    dtype: str = "float32"

    def build(self, generation: Generation) -> tuple[Callable, dict]:
        """The call, and the shapes of its arrays."""
        arrays = dict(
            out=jax.ShapeDtypeStruct((self.splits, self.rows, self.v_dim), jnp.dtype(self.dtype)),
            lse=jax.ShapeDtypeStruct((self.splits, self.rows), jnp.float32),
        )
        return lambda arrays: merge_states.merge_states(**arrays), arrays


def _attention_cases() -> list[Attention]:
    heads = [(8, 4), (8, 8), (4, 8), (1, 8), (3, 3), (2, 6), (8, 1), (2, 16)]
    cases = [Attention(kv_heads=kv_heads, group=group) for kv_heads, group in heads]
    cases += [Attention(dim=dim, q_len=q_len) for dim in (64, 80, 96, 256) for q_len in (1, 8)]
    cases += [Attention(page=page) for page in (8, 32, 64, 128, 256)]
    cases += [Attention(q_len=8, mask=mask) for mask in ("causal", "full", "tree")]
    everything = dict(window=1000, cap=30.0, sinks=True)
    cases += [Attention(q_len=q_len, mask=mask, **everything) for q_len, mask in ((1, "causal"), (16, "tree"))]
    cases += [Attention(seqs=1, q_len=8192, kv_len=8192, dim=dim) for dim in (64, 128, 256)]
    cases += [Attention(seqs=1, q_len=2048, kv_len=8192, dim=192, v_dim=128, kv_heads=16, group=1, mask="full")]
    narrow = ("int8", "float8_e4m3fn", "float8_e5m2")
    cases += [Attention(kv_dtype=kind, page=32) for kind in narrow]
    cases += [Attention(kv_dtype=kind, page=32, token_scales=True, writes=True) for kind in narrow]
    cases += [Attention(kv_dtype="int8", page=5, token_scales=True), Attention(kv_dtype="int8", page=8, writes=True)]
    # a step's own keys written: pages as rows and as words, every head width and few heads, chains and trees
    cases += [Attention(page=page, writes=True) for page in (1, 3, 8, 16, 64, 256)]
    cases += [Attention(kv_heads=heads, dim=dim, writes=True) for heads, dim in ((1, 64), (2, 80), (3, 96), (8, 256))]
    cases += [Attention(q_len=8, mask=mask, writes=True) for mask in ("causal", "tree")]
    cases += [Attention(dtype="float32", kv_heads=2, q_len=8, writes=True), Attention(kv_heads=1, page=3, q_len=256)]
    # a million tokens of context, and 2048 requests of 4096 (heads of one of four shards, and all in 8 bits)
    cases += [Attention(seqs=1, kv_len=1 << 20, page=page, kv_heads=4, writes=True) for page in (16, 128)]
    cases += [Attention(seqs=1, kv_len=1 << 20, q_len=2048, kv_heads=4, page=128)]
    cases += [Attention(seqs=2048, kv_heads=2, page=page, writes=True) for page in (16, 128)]
    cases += [Attention(seqs=2048, kv_heads=2, kv_dtype="float8_e4m3fn", page=32, q_len=8, mask="tree", writes=True)]
    return cases


KERNELS: dict[str, Callable[[], list]] = {
    "tpu/attend": _attention_cases,
    "tpu/attend, packed": lambda: [
        *(Ragged(), Ragged(seqs=16, kv_tokens=16384, mask="full"), Ragged(kv_heads=16)),
        *(Ragged(kv_heads=8, group=4, dim=128), Ragged(seqs=1, kv_heads=20)),
    ],
    "tpu/attend_latent": lambda: [
        *(Latent(), Latent(heads=16), Latent(heads=20, latent=192, rope=192), Latent(heads=128, page=256)),
        *(Latent(q_len=8), Latent(q_len=8, mask="tree"), Latent(heads=16, q_len=8, mask="tree"), Latent(splits=4)),
        *(Latent(seqs=1, q_len=512, kv_len=8192), Latent(heads=8, page=16), Latent(heads=64, latent=256, rope=32)),
        Latent(heads=16, dtype="float32"),
        *(Latent(page=1), Latent(heads=16, page=3), Latent(heads=16, page=8), Latent(heads=16, page=128, q_len=8)),
        *(Latent(heads=heads, packed=True, writes=True) for heads in (16, 128)),
        *(Latent(page=page, packed=True, writes=True) for page in (1, 16)),
        *(Latent(heads=16, q_len=8, mask="tree", packed=packed, writes=True) for packed in (False, True)),
        *(Latent(heads=20, latent=192, rope=192, packed=True), Latent(heads=16, page=3, writes=True)),
        *(Latent(heads=16, seqs=1, kv_len=1 << 20, writes=True), Latent(heads=16, seqs=2048, packed=True, writes=True)),
    ],
    "tpu/write_kv, words": lambda: [Words(), Words(tiles=8, page=1), Words(tokens=1 << 15)],
    "tpu/move, words": lambda: [Words(moves=True), Words(tiles=8, page=1, moves=True), Words(tokens=64, moves=True)],
    "tpu/merge_states": lambda: [
        *(Merge(), Merge(v_dim=64), Merge(v_dim=256), Merge(2, 64 * 128, 512), Merge(16, 24, 80), Merge(33, 130, 64)),
        *(Merge(2, 8192, 128, "bfloat16"), Merge(2, 5, 200, "bfloat16"), Merge(128, 64 * 32, 128)),
    ],
}


class Target:
    """A TPU that is not here."""

    def __init__(self, generation: Generation):
        self.name, self._generation, self._compiler = generation.name, generation, Compiler(generation)

    def compile(self, case) -> tuple[str, bool]:
        """What a compiled call takes beside its arrays. A TPU kernel's spills are memory, not a fault.

        Raises: whatever the compiler does; RuntimeError if it makes another array of a pool's shape.
        """
        with self._compiler.described():
            function, arrays = case.build(self._generation)
        name = next((name for name in ("k_pages", "pages") if name in arrays), None)
        pool = {name: arrays.pop(name)} if name else {}
        donate = (1,) if getattr(case, "writes", False) else ()
        compiled = self._compiler.compile(lambda rest, pool: function(rest | pool), (arrays, pool), donate=donate)
        memory = compiled.memory_analysis()
        if name:
            _check_pool(compiled.as_text(), name, pool[name])
            size = pool[name].size * pool[name].dtype.itemsize
            if donate and memory.alias_size_in_bytes < size:
                raise RuntimeError(
                    f"{name} is not written in place: {memory.alias_size_in_bytes} bytes alias of {size}"
                )
        return f"{memory.temp_size_in_bytes} bytes of HBM, {memory.generated_code_size_in_bytes} of code", False


_DTYPES = {"bfloat16": "bf16", "float32": "f32", "int32": "s32", "int8": "s8", "uint8": "u8"}
_DTYPES |= {"float8_e4m3fn": "f8e4m3fn", "float8_e5m2": "f8e5m2"}


def _check_pool(text: str, name: str, pool: jax.ShapeDtypeStruct) -> None:
    shape = f"= {_DTYPES[pool.dtype.name]}[{','.join(map(str, pool.shape))}]"
    same = (" parameter(", " bitcast(", " get-tuple-element(")
    lines = [line.strip() for line in text.splitlines() if shape in line and "output_to_operand_aliasing" not in line]
    made = [line[:100] for line in lines if not any(op in line for op in same)]
    if made:
        raise RuntimeError(f"{name} is copied before the kernel: {made[0]}")


def targets(names: str) -> list[Target]:
    """What is compiled for. Args: names of generations, comma between them; "" for all."""
    return [Target(GENERATIONS[name]) for name in (names.split(",") if names else GENERATIONS)]
