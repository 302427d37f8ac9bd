"""Facts read from a live backend, batch and layer, under the names that the original gives their attributes."""

from collections.abc import Iterable
from typing import Any

from jattn.dispatch.facts import DispatchFacts
from jattn.dispatch.names import HybridPair
from jattn.modes import ForwardMode
from jattn.platforms import Platform
from jattn.platforms.lookup import named

# Fact -> the attribute of the attention layer that holds it.
_LAYER = {
    "chunked_prefix_threshold": "chunked_prefix_cache_threshold",
    "chunked_prefix_disabled": "disable_chunked_prefix_cache",
    "ragged_disabled": "flashinfer_mla_disable_ragged",
    "rocm_fused_decode": "rocm_fused_decode_mla",
    "amx": "use_intel_amx_backend",
    "dsa_model": "use_dsa",
}
_STAMPS = {
    "prefill": ("prefill_stamp", "prefill_attention_backend_str"),
    "decode": ("decode_stamp", "decode_attention_backend_str"),
}


def facts_from(
    backend: Any,
    batch: Any,
    *,
    layer: Any = None,
    configured: HybridPair | None = None,
    platform: Platform | None = None,
    **facts: Any,
) -> DispatchFacts:
    """What the rules need of a pass that is about to run. Attributes that are absent leave a fact at its default.

    Args:
      backend: the active backend. Its stamps (`prefill_stamp`, `decode_stamp`, or the original's
        `prefill_attention_backend_str`, `decode_attention_backend_str`) name the policy; a two-batch-overlap backend
        (one with `primary`) is asked through its primary for `use_mha`.
      batch: has `forward_mode`, and on the host `extend_prefix_lens_cpu` and `seq_lens_cpu` (ints or None), where
        known; `attn_cp_metadata` marks a batch that is split over ranks; `get_max_chunk_capacity()` its capacity.
      layer: the attention layer, whose flags are read.
      configured: names to use where the backend bears no stamp, and the half that speculation uses.
      facts: taken as they are, over what was read.

    Returns: facts with `.policy` set to the name that this pass goes by.

    >>> from types import SimpleNamespace as Object
    >>> child = Object(prefill_stamp="dsa", decode_stamp="dsa", use_mha=True)
    >>> batch = Object(forward_mode=ForwardMode.EXTEND, extend_prefix_lens_cpu=[0, 4], seq_lens_cpu=[3, 9])
    >>> read = facts_from(Object(primary=child), batch)
    >>> read.policy, read.dsa_use_mha, read.sum_prefix_lens, read.sum_seq_lens
    ('dsa', True, 4, 12)
    """
    mode = getattr(batch, "forward_mode", None)
    if not isinstance(mode, ForwardMode):
        raise TypeError(f"batch.forward_mode={mode!r}: want a ForwardMode")
    capacity = getattr(batch, "get_max_chunk_capacity", None)
    read = dict(
        mode=mode,
        sum_prefix_lens=_sum(getattr(batch, "extend_prefix_lens_cpu", None)),
        sum_seq_lens=_sum(getattr(batch, "seq_lens_cpu", None)),
        prefill_context_parallel=(
            getattr(batch, "attn_cp_metadata", None) is not None and mode.is_context_parallel_extend()
        ),
        dsa_use_mha=bool(getattr(unwrap(backend), "use_mha", False)),
        policy=_pair(backend, configured).dispatch_name(mode),
        batch_size=max(len(getattr(batch, "seq_lens_cpu", None) or ()), 1),
        **_layer_facts(layer),
    )
    if capacity is not None:
        read["max_chunk_capacity"] = capacity()
    if platform is not None:
        read["hip"] = platform.is_hip
        read["sm100_or_sm110"] = platform.is_sm100_or_sm110
    return DispatchFacts(**{**read, **facts})


def unwrap(backend: Any) -> Any:
    """The backend that holds the whole batch's plan: the primary of a two-batch-overlap backend, or the one given."""
    return getattr(backend, "primary", backend)


def dsa_prefill_uses_mha(
    mode: ForwardMode,
    *,
    max_seq_len: int,
    sum_seq_lens: int,
    platform: Platform,
    kv_dtype: str = "bfloat16",
    dense_threshold: int = 2048,
    max_chunk_capacity: int = 131072,
    in_graph: bool = False,
    context_parallel: bool = False,
    hierarchical_sparse: bool = False,
    one_shot_allowed: bool = True,
    rules: str = "seed",
) -> bool:
    """Whether a model with sparse attention runs this prefill dense: where no sequence is longer than the selection,
    selecting takes everything, so dense attention is exact and cheaper.

    Args:
      max_seq_len, sum_seq_lens: tokens, longest and over the batch.
      kv_dtype: of the cache; "bfloat16" and "fp8_e4m3" allow it.
      dense_threshold: tokens that the indexer selects.
      in_graph: inside a piecewise or breakable graph.
      one_shot_allowed, and gfx95: read by rules="newer" only.

    Raises: ValueError for unknown rules.
    """
    newer = named({"seed": False, "newer": True}, rules, what="rules")
    device = (platform.is_cuda and platform.sm // 10 in (9, 10)) or (newer and platform.is_gfx95)
    return (
        not in_graph
        and mode.is_extend_without_speculative()
        and (one_shot_allowed or not newer)
        and device
        and max_seq_len <= dense_threshold
        and kv_dtype in ("bfloat16", "fp8_e4m3")
        and sum_seq_lens <= max_chunk_capacity
        and not context_parallel
        and not hierarchical_sparse
    )


def _sum(lens: Iterable[int] | None) -> int | None:
    return None if lens is None else int(sum(lens))


def _pair(backend: Any, configured: HybridPair | None) -> HybridPair:
    stamps = {half: _stamp(backend, names) for half, names in _STAMPS.items()}
    known = configured or HybridPair(prefill=None, decode=None)
    return HybridPair(
        prefill=known.prefill if stamps["prefill"] is None else stamps["prefill"],
        decode=known.decode if stamps["decode"] is None else stamps["decode"],
        attention_mode=known.attention_mode,
    )


def _stamp(backend: Any, names: tuple[str, ...]) -> str | None:
    # The wrapper's own stamp comes first; a wrapper without one goes by its primary.
    for holder in (backend, unwrap(backend)):
        for name in names:
            stamp = getattr(holder, name, None)
            if stamp is not None:
                return stamp
    return None


def _layer_facts(layer: Any) -> dict[str, Any]:
    if layer is None:
        return {}
    read = {fact: getattr(layer, name) for fact, name in _LAYER.items() if hasattr(layer, name)}
    # The presence of the fused projection is the fact, whatever it holds.
    return {**read, "fused_qkv_a": hasattr(layer, "fused_qkv_a_proj_with_mqa")}
