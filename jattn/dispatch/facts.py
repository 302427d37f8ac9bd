"""Everything that a dispatch rule may look at, as one record."""

import dataclasses
import operator
from collections import namedtuple

import jax
from jax.core import Tracer

from jattn.dispatch.form_costs import FormCosts
from jattn.modes import ForwardMode

_TRACED = ("sum_prefix_lens", "sum_seq_lens")
_COUNTS = ("max_chunk_capacity", "chunked_prefix_threshold", "batch_size")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DispatchFacts:
    """The inputs of one decision. A pytree whose leaves are the two sums; everything else is static.

    The defaults are those of the original's flags and environment variables.
    """

    mode: ForwardMode
    sum_prefix_lens: int | jax.Array | None  # tokens cached before this pass, over the batch; None: not known
    sum_seq_lens: int | jax.Array | None  # tokens cached once this pass is done, over the batch; None: not known
    max_chunk_capacity: int = 131072  # tokens that may be up-projected at once
    chunked_prefix_threshold: int = 8192  # prefix tokens, over the batch, from which expanding pays
    chunked_prefix_disabled: bool = False
    ragged_disabled: bool = False  # flashinfer and flashmla never expand
    piecewise_graph: bool = False  # one program in which the sums are not known while tracing
    breakable_graph: bool = False
    prefill_context_parallel: bool = False  # this batch is split over ranks along its tokens
    deterministic: bool = False
    hip: bool = False
    rocm_fused_decode: bool = False
    fused_qkv_a: bool = False  # the layer projects q and latent in one matrix
    amx: bool = False  # the layer's weights are packed for AMX
    dsa_model: bool | None = None  # the layer selects tokens; None: it does not say
    dsa_use_mha: bool = False  # what planning decided for a DSA backend, see `dsa_prefill_uses_mha`
    # Read by rules="newer" only.
    no_rope: bool = False  # qk_rope_head_dim == 0
    sm100_or_sm110: bool = False
    decode_context_parallel: bool = False
    fp8_gfx95_dense: bool = False  # Kimi-K3's dense fp8 prefill on gfx95
    # Read by `native` only.
    batch_size: int = 1  # requests; the sums are taken as spread evenly over them
    costs: FormCosts = FormCosts()  # of the layer on its platform, see `form_costs`
    # Read by no rule.
    policy: str | None = None  # the name that `facts_from` read from the active backend's stamps


jax.tree_util.register_dataclass(
    DispatchFacts,
    data_fields=list(_TRACED),
    meta_fields=[field.name for field in dataclasses.fields(DispatchFacts) if field.name not in _TRACED],
)

_FLAGS = [field.name for field in dataclasses.fields(DispatchFacts) if field.type in (bool, bool | None)]
_flags_of = operator.attrgetter(*_FLAGS)
_counts_of = operator.attrgetter(*_COUNTS)

# What is known of a pass before its sums: a hashable record of plain truths.
StaticFacts = namedtuple("StaticFacts", ["mode", "prefix_known", "total_known", *_FLAGS])


def static_facts(facts: DispatchFacts) -> StaticFacts:
    """The part that picks a program. A flag that is None is False."""
    known = facts.sum_prefix_lens is not None, facts.sum_seq_lens is not None
    return StaticFacts(facts.mode, *known, *map(bool, _flags_of(facts)))


def host_facts(facts: DispatchFacts) -> DispatchFacts:
    """The facts with sums that are plain integers or None.

    Raises: ValueError or TypeError, in one sentence, for facts that no host decision can be made from.
    """
    check_static(facts)
    sums = facts.sum_prefix_lens, facts.sum_seq_lens
    if all([x is None or (type(x) is int and x >= 0) for x in sums]):
        return facts
    counts = [None if x is None else _count(name, x) for name, x in zip(_TRACED, sums, strict=True)]
    return dataclasses.replace(facts, sum_prefix_lens=counts[0], sum_seq_lens=counts[1])


def check_static(facts: DispatchFacts) -> None:
    """Raises: ValueError or TypeError for static fields that are out of range."""
    if not isinstance(facts.mode, ForwardMode):
        names = ", ".join(f"ForwardMode.{mode.name}" for mode in ForwardMode)
        raise TypeError(f"mode={facts.mode!r} is not a ForwardMode: want one of {names}")
    for name, value in zip(_COUNTS, _counts_of(facts), strict=True):
        if type(value) is not int or value < 0:
            _count(name, value)


def _count(name: str, value) -> int:
    if isinstance(value, Tracer):
        raise TypeError(f"{name} is traced: decide with select_method_traced inside jit, or before it")
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} is not a count: want an integer of at least 0") from None
    if count < 0:
        raise ValueError(f"{name}={count} is negative: want a count of at least 0")
    return count
