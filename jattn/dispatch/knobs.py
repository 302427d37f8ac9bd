"""What the original settles once, when a model is loaded, before any pass is dispatched: as pure functions of names."""

_CHUNKED_PREFIX = frozenset("native flashinfer fa3 fa4 flashmla cutedsl_mla trtllm_mla tokenspeed_mla".split())
_DETERMINISTIC = frozenset("native ascend fa3 fa4 flashinfer intel_xpu triton".split())
_DETERMINISTIC_CACHED_MLA = frozenset("native ascend fa3 fa4 triton".split())


def chunked_prefix_disabled(prefill_policy: str | None, *, is_mla: bool, requested: bool = False) -> bool:
    """The target's `DispatchFacts.chunked_prefix_disabled`: asked for, or no prefix of this model is ever expanded.

    A draft model takes its target's value.

    >>> [chunked_prefix_disabled(name, is_mla=True) for name in ("fa3", "triton")]
    [False, True]
    """
    return requested or not is_mla or prefill_policy not in _CHUNKED_PREFIX


def check_deterministic(policy: str, *, is_mla: bool, prefix_cache: bool) -> None:
    """Refuse `DispatchFacts.deterministic` where a policy's results depend on what else is in the batch or cached.

    Args: prefix_cache: requests share cached prefixes.
    Raises: ValueError with the policies that qualify.

    >>> check_deterministic("flashinfer", is_mla=True, prefix_cache=True)
    Traceback (most recent call last):
    ValueError: policy 'flashinfer' is not deterministic for an MLA model with a prefix cache: use one of ascend, ...
    """
    cached_mla = is_mla and prefix_cache
    legal = _DETERMINISTIC_CACHED_MLA if cached_mla else _DETERMINISTIC
    if policy not in legal:
        case = " for an MLA model with a prefix cache" if cached_mla else ""
        raise ValueError(f"policy {policy!r} is not deterministic{case}: use one of {', '.join(sorted(legal))}")
