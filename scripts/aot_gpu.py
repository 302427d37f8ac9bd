"""The portable half of `aot_check.py`: the set `gpu` compiled for NVIDIA GPUs that are not here, lowered for ROCm."""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false

import dataclasses
import functools
import warnings
from collections.abc import Callable

import aot_nvidia
import aot_shapes
import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from pallas_kernels._common import latent_rows
from pallas_kernels.attention import gpu as attention
from pallas_kernels.merge_states import gpu as merge_states
from pallas_kernels.mla import gpu as mla


@dataclasses.dataclass(frozen=True)
class Attention:
    """A call of the attention kernel: two requests; page None: packed keys."""

    q_len: int = 1
    kv_heads: int = 8
    group: int = 4
    dim: int = 128
    v_dim: int | None = None
    page: int | None = 16
    dtype: str = "bfloat16"
    mask: str = "causal"
    window: int | None = None
    cap: float | None = None
    sinks: bool = False
    kv_dtype: str | None = None

    def build(self) -> tuple[Callable, dict]:
        """The call, and the shapes of its arrays."""
        seqs, keys, heads = 2, 4096, self.kv_heads * self.group
        kind = "uint8" if (self.kv_dtype or "").startswith("float8") else self.kv_dtype or self.dtype
        shape, i32 = jax.ShapeDtypeStruct, functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
        lead = (seqs * keys,) if self.page is None else (seqs * keys // self.page, self.page)
        k, v = (shape((*lead, self.kv_heads, dim), kind) for dim in (self.dim, self.v_dim or self.dim))
        arrays = dict(q=shape((seqs * self.q_len, heads, self.dim), self.dtype), cu_q_lens=i32((seqs + 1,)))
        if self.page is None:
            arrays |= dict(k=k, v=v, cu_kv_lens=i32((seqs + 1,)))
        else:
            arrays |= dict(k_pages=k, v_pages=v, page_table=i32((seqs, keys // self.page)), seq_lens=i32((seqs,)))
        arrays |= aot_shapes.of_tree(self.mask, tokens=seqs * self.q_len, seqs=seqs, nodes=self.q_len)
        arrays |= aot_shapes.of_options(scales=bool(self.kv_dtype), sinks=heads if self.sinks else 0)
        static = dict(
            max_q_len=self.q_len,
            sm_scale=self.dim**-0.5,
            mask=self.mask,
            sliding_window=self.window,
            logit_soft_cap=self.cap,
        )
        if kind == "uint8":
            static |= dict(kv_dtype=self.kv_dtype)
        function = attention.ragged_attention if self.page is None else attention.paged_attention
        return lambda arrays: function(**arrays, **static), arrays


@dataclasses.dataclass(frozen=True)
class Latent:
    """A call of the latent kernel: two requests."""

    q_len: int = 1
    heads: int = 16
    latent: int = 512
    rope: int = 64
    page: int = 64
    dtype: str = "bfloat16"
    packed: bool = False
    mask: str = "causal"

    def build(self) -> tuple[Callable, dict]:
        """The call, and the shapes of its arrays."""
        seqs, room = 2, 4096 // self.page
        shape, i32 = jax.ShapeDtypeStruct, functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
        row = latent_rows.num_bytes(self.latent, self.rope) if self.packed else self.latent + self.rope
        arrays = dict(
            q=shape((seqs * self.q_len, self.heads, self.latent + self.rope), self.dtype),
            pages=shape((seqs * room, self.page, row), "uint8" if self.packed else self.dtype),
            page_table=i32((seqs, room)),
            seq_lens=i32((seqs,)),
            cu_q_lens=i32((seqs + 1,)),
        )
        arrays |= aot_shapes.of_tree(self.mask, tokens=seqs * self.q_len, seqs=seqs, nodes=self.q_len)
        static = dict(latent_dim=self.latent, max_q_len=self.q_len, sm_scale=0.1, mask=self.mask)
        return lambda arrays: mla.attend_latent(**arrays, **static), arrays


@dataclasses.dataclass(frozen=True)
class Merge:
    """A call of the merge."""

    splits: int = 2
    v_dim: int = 128
    dtype: str = "bfloat16"

    def build(self) -> tuple[Callable, dict]:
        """The call, and the shapes of its arrays."""
        lead = (self.splits, 64, 32)
        out, lse = jax.ShapeDtypeStruct((*lead, self.v_dim), self.dtype), jax.ShapeDtypeStruct(lead, jnp.float32)
        return lambda arrays: merge_states.merge_states(**arrays), dict(out=out, lse=lse)


def _attention_cases() -> list[Attention]:
    everything = dict(window=1000, cap=30.0, sinks=True)
    cases = [Attention(q_len=q_len) for q_len in (1, 8, 512)]
    cases += [Attention(q_len=q_len, mask="tree") for q_len in (16, 64)]
    cases += [Attention(q_len=q_len, page=page) for q_len in (1, 512) for page in (1, None)]
    cases += [Attention(q_len=q_len, dim=dim) for q_len in (1, 512) for dim in (64, 80, 96, 256)]
    cases += [Attention(q_len=512, group=1, dim=192, v_dim=128, page=None, mask=mask) for mask in ("causal", "full")]
    cases += [Attention(group=group) for group in (1, 3, 7, 16)]
    cases += [Attention(q_len=512, **everything), Attention(q_len=16, mask="tree", **everything)]
    cases += [Attention(dtype=dtype, dim=64) for dtype in ("float16", "float32")]
    for kind in ("float8_e4m3fn", "float8_e5m2", "int8"):
        cases += [Attention(kv_dtype=kind), Attention(kv_dtype=kind, q_len=16, mask="tree", **everything)]
    return cases


def _latent_cases() -> list[Latent]:
    cases = [Latent(q_len=q_len, heads=heads) for q_len in (1, 4) for heads in (8, 16, 128)]
    cases += [Latent(q_len=8, mask="tree"), Latent(page=1), Latent(latent=192, rope=192), Latent(packed=True)]
    return cases


KERNELS: dict[str, Callable[[], list]] = {
    "gpu/attend": _attention_cases,
    "gpu/attend_latent": _latent_cases,
    "gpu/merge_states": lambda: [Merge(), Merge(16, 80, "float32"), Merge(4, 512, "float16")],
}


class Target:
    """A GPU that is not here."""

    def __init__(self, name: str):
        self.name = name
        self._mesh = aot_nvidia.mesh_of(name)

    def compile(self, case) -> tuple[str, bool]:
        """What is known of a compiled call; XLA gives no registers of these kernels."""
        aot_nvidia.compile_for(self._mesh, case)
        return "compiled", False


class Rocm:
    """An AMD GPU, for which there is no compiler here."""

    name = "rocm"

    def compile(self, case) -> tuple[str, bool]:
        """Lower a call."""
        function, arrays = case.build()
        device = AbstractDevice(device_kind="gfx942", num_cores=304, platform="rocm")
        mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
        with jax.sharding.use_abstract_mesh(mesh):
            text = jax.jit(function).trace(arrays).lower(lowering_platforms=("rocm",)).as_text()
        if "triton" not in text:
            raise ValueError("no Triton kernel was lowered")
        return "lowered", False


def targets(names: str) -> list[Target | Rocm]:
    """What is compiled for, by names with commas between them; all and ROCm by default."""
    warnings.simplefilter("ignore", DeprecationWarning)  # of the lowering, which this set is isolated for
    wanted = names.split(",") if names else [*aot_nvidia.GPUS, "rocm"]
    return [Rocm() if name == "rocm" else Target(name) for name in wanted]
