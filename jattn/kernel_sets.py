"""Kernel sets as rows: which functions serve an op, and what they provide. Needed <= provided, first row wins.

Every row of one op has the same array-level contract (see `pallas_kernels/<op>/xla.py`), so a set is swapped by name.
A row without a function is *declared*: its place in the order is decided, its code is not there yet.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.experimental.pallas.tpu as pltpu

import pallas_kernels.attention.gpu as attention_gpu
import pallas_kernels.attention.mosaic_gpu_sm90_forms as attention_sm90
import pallas_kernels.attention.tpu as attention_tpu
import pallas_kernels.attention.tpu_ragged as attention_tpu_ragged
import pallas_kernels.attention.tpu_write as attention_tpu_write
import pallas_kernels.attention.xla as attention_xla
import pallas_kernels.kv_write.mosaic_gpu_sm90 as kv_write_sm90
import pallas_kernels.kv_write.mosaic_gpu_sm90_rotate as kv_rotate_sm90
import pallas_kernels.kv_write.tpu as kv_write_tpu
import pallas_kernels.kv_write.xla as kv_write_xla
import pallas_kernels.merge_states.gpu as merge_gpu
import pallas_kernels.merge_states.mosaic_gpu_sm90 as merge_sm90
import pallas_kernels.merge_states.tpu as merge_tpu
import pallas_kernels.merge_states.xla as merge_xla
import pallas_kernels.mla.gpu as mla_gpu
import pallas_kernels.mla.mosaic_gpu_sm90 as mla_sm90
import pallas_kernels.mla.tpu as mla_tpu
import pallas_kernels.mla.xla as mla_xla
from jattn.features import Feature


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """One kernel of one set: never subclassed, never mutated."""

    set: str
    op: str  # a name of OPS or MLA_OPS
    provides: frozenset[Feature]
    function: Callable | None = None  # None: declared
    ragged: Callable | None = None  # "attend" only: the same over packed keys
    ragged_interpreted: Callable | None = None
    interpreted: Callable | None = None  # stands in on a CPU, where a Pallas kernel for another device cannot run
    writes: Callable | None = None  # "attend", "attend_latent": the same once the step's own rows are written
    writes_interpreted: Callable | None = None
    rotates: Callable | None = None  # "write_kv": the same from unrotated rows of queries, keys and values
    rotates_interpreted: Callable | None = None
    rotates_serves: Callable[..., bool] | None = None  # (head_dim=, v_dim=, dtype=): whether it takes such rows
    layout: str = "token_major"  # "attend", "attend_latent": how the cache must lie, as the caches' `create` names it
    takes_device: bool = False  # whether sizes depend on the generation, so that it takes `device=` by platform name
    part: str = ""  # which part of its op, where one set has rows of different evidence for it
    when_asked: bool = False  # chosen only where `prefer` names the set: not yet run on the device that it is for

    @property
    def name(self) -> str:
        """Key of the evidence table, as `hopper/attend`."""
        return "/".join(filter(None, (self.set, self.op, self.part)))


_BASE = frozenset({Feature.PAGED, Feature.CAUSAL, Feature.LSE})
_MODEL = frozenset({Feature.WINDOW, Feature.SOFT_CAP, Feature.SINKS, Feature.UNEQUAL_HEAD_DIMS})
_KV = frozenset({Feature.FP8_KV, Feature.INT8_KV, Feature.TOKEN_SCALES})
_ALL_MHA = _BASE | _MODEL | _KV | {Feature.RAGGED, Feature.FULL, Feature.TREE}
_ALL_MLA = _BASE | {Feature.MLA, Feature.FP8_KV, Feature.FULL, Feature.TREE}

KERNELS: tuple[KernelRow, ...] = (
    KernelRow(
        set="hopper",
        op="attend",
        provides=_BASE | _MODEL | {Feature.RAGGED, Feature.FULL, Feature.TREE, Feature.FP8_KV},
        function=attention_sm90.paged_attention,
        ragged=attention_sm90.ragged_attention,
        ragged_interpreted=attention_xla.ragged_attention,
        interpreted=attention_xla.paged_attention,  # the interpreter takes seconds a block
    ),
    KernelRow(
        set="hopper",
        op="write_kv",
        provides=_ALL_MHA - _KV | {Feature.FP8_KV},
        function=kv_write_sm90.write_kv,
        interpreted=kv_write_xla.write_kv,
        rotates=kv_rotate_sm90.rotate_write_kv,
        rotates_interpreted=kv_write_xla.rotate_write_kv,
        rotates_serves=kv_rotate_sm90.serves,
    ),
    KernelRow(
        set="hopper",
        op="merge_states",
        provides=_ALL_MHA,
        function=merge_sm90.merge_states,
        interpreted=functools.partial(merge_sm90.merge_states, interpret=plgpu.InterpretGPUParams()),
    ),
    KernelRow(
        set="hopper",
        op="attend_latent",
        provides=_ALL_MLA - {Feature.FP8_KV},
        function=mla_sm90.attend_latent,
        interpreted=mla_xla.attend_latent,
    ),
    KernelRow(
        set="hopper",
        op="attend_latent",
        part="packed",
        provides=_ALL_MLA,
        function=mla_sm90.attend_latent,
        interpreted=mla_xla.attend_latent,
        when_asked=True,
    ),
    KernelRow(
        set="gpu",
        op="attend",
        provides=_ALL_MHA,
        function=attention_gpu.paged_attention,
        ragged=attention_gpu.ragged_attention,
        interpreted=attention_xla.paged_attention,  # the interpreter goes through the programs one by one
        ragged_interpreted=attention_xla.ragged_attention,
        when_asked=True,
    ),
    # XLA's own scatter is one kernel, in place.
    KernelRow(set="gpu", op="write_kv", provides=_ALL_MHA, function=kv_write_xla.write_kv, when_asked=True),
    KernelRow(
        set="gpu",
        op="merge_states",
        provides=_ALL_MHA,
        function=merge_gpu.merge_states,
        interpreted=functools.partial(merge_gpu.merge_states, interpret=True),
        when_asked=True,
    ),
    KernelRow(
        set="gpu",
        op="attend_latent",
        provides=_ALL_MLA,
        function=mla_gpu.attend_latent,
        interpreted=mla_xla.attend_latent,
        when_asked=True,
    ),
    KernelRow(
        set="tpu",
        op="attend",
        provides=_ALL_MHA,
        function=attention_tpu.paged_attention,
        ragged=attention_tpu_ragged.ragged_attention,
        ragged_interpreted=functools.partial(attention_tpu_ragged.ragged_attention, interpret=pltpu.InterpretParams()),
        interpreted=functools.partial(attention_tpu.paged_attention, interpret=pltpu.InterpretParams()),
        writes=attention_tpu_write.write_attend,
        writes_interpreted=functools.partial(attention_tpu_write.write_attend, interpret=pltpu.InterpretParams()),
        layout="rows",
        takes_device=True,
    ),
    KernelRow(set="tpu", op="write_kv", provides=_ALL_MHA, function=kv_write_tpu.write_kv),
    KernelRow(
        set="tpu",
        op="merge_states",
        provides=_ALL_MHA,
        function=merge_tpu.merge_states,
        interpreted=functools.partial(merge_tpu.merge_states, interpret=pltpu.InterpretParams()),
    ),
    KernelRow(
        set="tpu",
        op="attend_latent",
        provides=_ALL_MLA,
        function=mla_tpu.attend_latent,
        interpreted=functools.partial(mla_tpu.attend_latent, interpret=pltpu.InterpretParams()),
        writes=mla_tpu.write_attend_latent,
        writes_interpreted=functools.partial(mla_tpu.write_attend_latent, interpret=pltpu.InterpretParams()),
        layout="latent_rope_lanes",
        takes_device=True,
    ),
    KernelRow(set="tpu", op="write_latent", provides=_ALL_MLA, function=mla_tpu.write_latent),
    KernelRow(set="tpu", op="gather_latent", provides=_ALL_MLA, function=mla_tpu.gather_latent),
    KernelRow(
        set="xla",
        op="attend",
        provides=_ALL_MHA,
        function=attention_xla.paged_attention,
        ragged=attention_xla.ragged_attention,
    ),
    KernelRow(set="xla", op="write_kv", provides=_ALL_MHA, function=kv_write_xla.write_kv),
    KernelRow(set="xla", op="merge_states", provides=_ALL_MHA, function=merge_xla.merge_states),
    KernelRow(set="xla", op="attend_latent", provides=_ALL_MLA, function=mla_xla.attend_latent),
    KernelRow(set="xla", op="write_latent", provides=_ALL_MLA, function=mla_xla.write_latent),
    KernelRow(set="xla", op="gather_latent", provides=_ALL_MLA, function=mla_xla.gather_latent),
)
OPS = ("attend", "write_kv", "merge_states")
"""What an MHA/GQA layer calls."""
MLA_OPS = ("attend_latent", "write_latent", "gather_latent", "attend", "merge_states")
"""What an MLA layer calls: "attend" on expanded keys, and states of their chunks merged."""


def candidates(op: str, sets: tuple[str, ...]) -> list[KernelRow]:
    """Rows of an op in the order of `sets`, then of the table."""
    return [row for name in sets for row in KERNELS if row.set == name and row.op == op]
