"""The GPU half of `aot_check.py`: what is compiled with ptxas, and its registers and spills."""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false

import contextlib
import dataclasses
import functools
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator

os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"  # to standard output; a folder for it would have all other dumps, too: slow

import aot_nvidia
import aot_shapes
import jax
import jax.numpy as jnp

from pallas_kernels._common import latent_rows
from pallas_kernels.attention import mosaic_gpu_sm90 as attention
from pallas_kernels.attention import mosaic_gpu_sm90_prefill as prefill
from pallas_kernels.attention.mosaic_gpu_sm90_config import Config, heuristic
from pallas_kernels.attention.mosaic_gpu_sm90_prefill_config import Config as PrefillConfig
from pallas_kernels.kv_write import mosaic_gpu_sm90 as kv_write
from pallas_kernels.merge_states import mosaic_gpu_sm90 as merge_states
from pallas_kernels.mla import mosaic_gpu_sm90 as latent
from pallas_kernels.mla.mosaic_gpu_sm90_config import Config as LatentConfig


@dataclasses.dataclass(frozen=True)
class Attention:
    """A call of the attention kernel."""

    seqs: int = 16
    q_len: int = 1
    kv_heads: int = 8
    group: int = 4
    dim: int = 128
    v_dim: int | None = None
    page: int = 16
    dtype: str = "bfloat16"
    mask: str = "causal"
    window: int | None = None
    cap: float | None = None
    sinks: bool = False
    kv_dtype: str | None = None
    config: Config | None = None

    def build(self) -> tuple[Callable, dict]:
        """The call, and the shapes of its arrays."""
        tokens, heads, room = self.seqs * self.q_len, self.kv_heads * self.group, 4096 // self.page

        def shape(*sizes, dtype=self.dtype):
            return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))

        i32 = functools.partial(shape, dtype="int32")
        pool = (self.seqs * room, self.page, self.kv_heads)
        stored = "uint8" if self.kv_dtype else self.dtype
        arrays = dict(
            q=shape(tokens, heads, self.dim),
            k_pages=shape(*pool, self.dim, dtype=stored),
            v_pages=shape(*pool, self.v_dim or self.dim, dtype=stored),
            page_table=i32(self.seqs, room),
            seq_lens=i32(self.seqs),
            cu_q_lens=i32(self.seqs + 1),
        )
        arrays |= aot_shapes.of_tree(self.mask, tokens=tokens, seqs=self.seqs, nodes=self.q_len)
        arrays |= aot_shapes.of_options(scales=bool(self.kv_dtype), sinks=heads if self.sinks else 0)
        static = dict(
            max_q_len=self.q_len,
            sm_scale=self.dim**-0.5,
            mask=self.mask,
            sliding_window=self.window,
            logit_soft_cap=self.cap,
            kv_dtype=self.kv_dtype,
            config=self.config,
        )
        return lambda arrays: attention.paged_attention(**arrays, **static), arrays


@dataclasses.dataclass(frozen=True)
class Prefill:
    """A call of the prefill kernel: two requests; page None: packed keys."""

    kv_heads: int = 8
    group: int = 4
    dim: int = 128
    v_dim: int | None = None
    page: int | None = 64
    dtype: str = "bfloat16"
    mask: str = "causal"
    window: int | None = None
    cap: float | None = None
    sinks: bool = False
    kv_dtype: str | None = None
    config: PrefillConfig | None = None

    def build(self) -> tuple[Callable, dict]:
        """The call, and the shapes of its arrays."""
        tokens, heads = 4096, self.kv_heads * self.group

        def shape(*sizes, dtype=self.dtype):
            return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))

        i32 = functools.partial(shape, dtype="int32")
        lead = (tokens,) if self.page is None else (2 * tokens // self.page, self.page)
        stored = "uint8" if self.kv_dtype else self.dtype
        keys, values = (shape(*lead, self.kv_heads, dim, dtype=stored) for dim in (self.dim, self.v_dim or self.dim))
        arrays = dict(q=shape(tokens, heads, self.dim), cu_q_lens=i32(3))
        if self.page is None:
            arrays |= dict(k=keys, v=values, cu_kv_lens=i32(3))
        else:
            arrays |= dict(k_pages=keys, v_pages=values, page_table=i32(2, tokens // self.page), seq_lens=i32(2))
        arrays |= aot_shapes.of_options(scales=bool(self.kv_dtype), sinks=heads if self.sinks else 0)
        static = dict(
            max_q_len=tokens,
            sm_scale=self.dim**-0.5,
            mask=self.mask,
            sliding_window=self.window,
            logit_soft_cap=self.cap,
            config=self.config,
        )
        if self.page is None:
            return lambda arrays: prefill.ragged_attention(**arrays, **static), arrays
        return lambda arrays: prefill.paged_attention(**arrays, **static, kv_dtype=self.kv_dtype), arrays


@dataclasses.dataclass(frozen=True)
class Merge:
    """A call of the merge of states."""

    splits: int = 4
    rows: int = 512
    v_dim: int = 128

    def build(self) -> tuple[Callable, dict]:
        """The call, and the shapes of its arrays."""
        arrays = dict(
            out=jax.ShapeDtypeStruct((self.splits, self.rows, self.v_dim), jnp.float32),
            lse=jax.ShapeDtypeStruct((self.splits, self.rows), jnp.float32),
        )
        return lambda arrays: merge_states.merge_states(**arrays), arrays


@dataclasses.dataclass(frozen=True)
class Write:
    """A call of the KV write."""

    kv_heads: int = 8
    dim: int = 128
    dtype: str = "bfloat16"
    kv_dtype: str | None = None

    def build(self) -> tuple[Callable, dict]:
        """The call, and the shapes of its arrays."""
        pages, rows = ((*lead, self.kv_heads, self.dim) for lead in ((64, 16), (32,)))
        pool = jax.ShapeDtypeStruct(pages, jnp.dtype("uint8" if self.kv_dtype else self.dtype))
        row = jax.ShapeDtypeStruct(rows, jnp.dtype(self.dtype))
        slots = jax.ShapeDtypeStruct((32,), jnp.int32)
        arrays = dict(k_pages=pool, v_pages=pool, k=row, v=row, slots=slots)
        if self.kv_dtype:
            scale = jax.ShapeDtypeStruct((), jnp.float32)
            arrays |= dict(k_scale=scale, v_scale=scale)
        return lambda arrays: kv_write.write_kv(**arrays, kv_dtype=self.kv_dtype), arrays


@dataclasses.dataclass(frozen=True)
class Latent:
    """A call of the latent attention kernel."""

    seqs: int = 16
    q_len: int = 1
    heads: int = 16
    latent: int = 512
    rope: int = 64
    page: int = 64
    dtype: str = "bfloat16"
    mask: str = "causal"
    packed: bool = False
    config: LatentConfig | None = None

    def build(self) -> tuple[Callable, dict]:
        """The call, and the shapes of its arrays."""
        tokens, room, width = self.seqs * self.q_len, 4096 // self.page, self.latent + self.rope

        def shape(*sizes, dtype=self.dtype):
            return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))

        i32 = functools.partial(shape, dtype="int32")
        arrays = dict(
            q=shape(tokens, self.heads, width),
            pages=shape(self.seqs * room, self.page, width),
            page_table=i32(self.seqs, room),
            seq_lens=i32(self.seqs),
            cu_q_lens=i32(self.seqs + 1),
        )
        if self.packed:
            row = latent_rows.num_bytes(self.latent, self.rope)
            arrays["pages"] = shape(self.seqs * room, self.page, row, dtype="uint8")
        arrays |= aot_shapes.of_tree(self.mask, tokens=tokens, seqs=self.seqs, nodes=self.q_len)
        static = dict(
            latent_dim=self.latent, max_q_len=self.q_len, sm_scale=192**-0.5, mask=self.mask, config=self.config
        )
        return lambda arrays: latent.attend_latent(**arrays, **static), arrays


_NARROW = ("float8_e4m3fn", "float8_e5m2")


def _attention_cases() -> list[Attention]:
    cases = []
    for seqs in (1, 64):  # with and without splits
        cases += [Attention(seqs=seqs, page=page) for page in attention.PAGE_SIZES]
        cases += [Attention(seqs=seqs, group=group) for group in (1, 3, 6, 7, 8, 16)]
        cases += [Attention(seqs=seqs, dim=dim) for dim in attention.HEAD_DIMS if dim != 128]
        cases += [Attention(seqs=seqs, q_len=q_len) for q_len in (4, 64)]
        cases += [Attention(seqs=seqs, q_len=q_len, mask="tree") for q_len in (16, 64)]
        everything = dict(window=1000, cap=30.0, sinks=True)
        cases += [Attention(seqs=seqs, **everything), Attention(seqs=seqs, q_len=16, mask="tree", **everything)]
        cases += [Attention(seqs=seqs, dim=256, q_len=16, mask="tree", **everything)]
    cases += [Attention(seqs=64, q_len=64, mask="tree", window=1000, cap=30.0, sinks=True)]
    cases += [Attention(dtype="float16"), Attention(v_dim=64), Attention(q_len=8, mask="full")]
    cases += [Attention(config=dataclasses.replace(_base(), parts=0, splits=True, part_blocks=8))]
    short = functools.partial(Attention, seqs=1, config=Config(stages=2, cluster=8))
    cases += [short(), short(page=1), short(sinks=True, dim=80), short(q_len=4, v_dim=64)]
    for kind in _NARROW:
        narrow = functools.partial(Attention, kv_dtype=kind)
        cases += [narrow(seqs=seqs, page=page) for seqs in (1, 64) for page in (1, 16, 64)]
        cases += [narrow(dim=dim) for dim in attention.HEAD_DIMS] + [narrow(dim=80, page=1), narrow(dtype="float16")]
        cases += [narrow(q_len=q_len, mask="tree") for q_len in (16, 64)]
        cases += [narrow(**everything), narrow(q_len=16, mask="tree", **everything)]
    return cases


def _base() -> Config:
    return heuristic(max_q_len=1, group=4, kv_heads=8, num_seqs=64, head_dim=128, kv_room=4096, page_size=16)


def _latent_cases() -> list[Latent]:
    cases = [Latent(seqs=seqs, heads=heads) for seqs in (1, 64) for heads in (8, 16, 32, 64, 128)]
    cases += [Latent(seqs=1, page=page, heads=heads) for page in latent.PAGE_SIZES for heads in (16, 128)]
    cases += [Latent(q_len=q_len, heads=heads) for q_len in (2, 4, 64) for heads in (8, 16, 128)]
    cases += [Latent(q_len=q_len, heads=heads, mask="tree") for q_len in (16, 64, 128) for heads in (16, 128)]
    cases += [Latent(heads=9, latent=192, rope=192, page=page, q_len=q_len) for page in (1, 16) for q_len in (1, 8)]
    cases += [Latent(latent=width, rope=rope) for width, rope in ((256, 64), (128, 64), (64, 32), (32, 16))]
    cases += [Latent(dtype="float16"), Latent(dtype="float16", heads=128, q_len=4), Latent(q_len=8, mask="full")]
    cases += [Latent(packed=True, page=page, heads=heads) for page in (1, 16, 64, 128) for heads in (16, 128)]
    cases += [Latent(packed=True, q_len=16, mask="tree"), Latent(packed=True, seqs=64)]
    cases += [Latent(config=LatentConfig(splits=True, part_blocks=8)), Latent(seqs=64, config=LatentConfig())]
    return cases


def _prefill_cases() -> list[Prefill]:
    everything = dict(window=1000, cap=30.0, sinks=True)
    cases = [Prefill(page=page) for page in (*attention.PAGE_SIZES, None)]
    cases += [Prefill(dim=dim, page=16, group=1) for dim in (64, 80, 96, 192, 256)]
    cases += [Prefill(dim=dim, page=page) for dim in (64, 256) for page in (1, None)]
    cases += [Prefill(group=group) for group in (3, 6, 7, 8, 16)]
    cases += [Prefill(dim=dim, **everything) for dim in (64, 80, 96, 128, 256)]
    cases += [Prefill(dim=192, v_dim=128, group=1, page=page) for page in (16, None)]
    cases += [Prefill(mask="full"), Prefill(dtype="float16"), Prefill(page=None, dtype="float16", **everything)]
    cases += [Prefill(dim=64, config=PrefillConfig(groups=3, stages=3, polynomial=4))]
    cases += [Prefill(kv_dtype=kind, page=page, dtype="float16") for kind in _NARROW for page in (1, 16)]
    cases += [Prefill(kv_dtype="float8_e4m3fn", dim=dim, page=16, dtype="float16") for dim in (64, 80, 96)]
    return cases


KERNELS: dict[str, Callable[[], list]] = {
    "hopper/attend": lambda: [*_attention_cases(), *_prefill_cases()],
    "hopper/attend_latent": _latent_cases,
    "hopper/write_kv": lambda: [
        *(Write(), Write(3, 64), Write(1, 80, "float16"), Write(8, 256, "float32")),
        *(Write(heads, 64, dtype, kind) for heads in (1, 8) for dtype in ("bfloat16", "float32") for kind in _NARROW),
    ],
    "hopper/merge_states": lambda: [Merge(), Merge(v_dim=64), Merge(v_dim=256), Merge(splits=16, v_dim=80)],
}


class Target:
    """A GPU that is not here."""

    name = "h200"

    def __init__(self):
        self._mesh = aot_nvidia.mesh_of("sm90")

    def compile(self, case) -> tuple[str, bool]:
        """Registers and spills as ptxas tells them, for each kernel of a call, and whether any spills."""
        found = _compile(case, self._mesh)
        spills = [text for _, text, spilled in found if spilled]
        return "; ".join(spills or [text for _, text, _ in found]), bool(spills)


def targets() -> list[Target]:
    """What is compiled for."""
    return [Target()]


def _compile(case, mesh) -> list[tuple[str, str, bool]]:
    # kernel, registers and spills for each kernel of a call
    with tempfile.TemporaryFile() as file, _standard_output_in(file):
        aot_nvidia.compile_for(mesh, case)
        file.seek(0)
        said = file.read().decode()
    found = []
    for text in said.split("Compiling entry function")[1:]:
        kernel = re.search(r"'(\w+)'", text)
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
        registers = re.search(r"Used (\d+) registers", text)
        if not (kernel and spills and registers):
            raise ValueError(f"this does not read like ptxas's report: {text[:200]}")
        spilled = any(int(x) for x in spills.groups())
        shown = f"{kernel[1].removesuffix('_mosaic_gpu_kernel')} {registers[1]} registers"
        found.append((kernel[1], shown + (f", spills {spills[1]}/{spills[2]} bytes" if spilled else ""), spilled))
    if not found:
        raise ValueError("no Mosaic GPU kernel was compiled")
    return found


@contextlib.contextmanager
def _standard_output_in(file) -> Iterator[None]:
    # of the compiler too, which does not know Python's
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(file.fileno(), 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
