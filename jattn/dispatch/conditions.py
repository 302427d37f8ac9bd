"""The conditions that rules name: of the policy's name and the static facts, or questions about the sums.

A condition is a bool. A question is left open until the sums are known: a bool on the host, an array inside jit.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jattn.dispatch.facts import DispatchFacts, StaticFacts
from jattn.dispatch.interpreter import Truth, with_negations

_ONE_SHOT = ("fa3", "flashinfer", "flashmla")
_READS_RAGGED = ("flashinfer", "flashmla")
_UINT32_MAX = 2**32 - 1


class Sums(NamedTuple):
    """What questions are about, in tokens: integers on the host, u32 inside jit. A sum that is not known counts as 0,
    as in the original's generic and trtllm rules."""

    prefix: Any
    total: Any
    threshold: Any  # prefix tokens from which expanding pays
    capacity: Any  # tokens that may be expanded at once
    pair: Any  # costs of the layer, see `form_costs`
    expansion: Any  # row cost x requests

    @classmethod
    def of(cls, facts: DispatchFacts) -> "Sums":
        """The sums as they are, 0 for None."""
        prefix, total = facts.sum_prefix_lens, facts.sum_seq_lens
        return cls(
            0 if prefix is None else prefix,
            0 if total is None else total,
            facts.chunked_prefix_threshold,
            facts.max_chunk_capacity,
            facts.costs.pair,
            facts.costs.row * facts.batch_size,
        )

    def as_u32(self) -> "Sums":
        """The limits as u32, cut where they are larger: no sum in i32 reaches the cut, so comparisons stay exact."""
        prefix, total, *limits = self
        return Sums(prefix, total, *[np.uint32(min(limit, _UINT32_MAX)) for limit in limits])


def _expanding_is_cheaper(sums: Sums) -> Truth:
    """The expanded form costs less than the absorbed one, by the layer's `FormCosts`.

    With sums Q and P spread evenly over B requests that is pair Q (2 P + Q) > row P B. Inside jit exact while pair Q,
    2 P + Q and row B fit u32: for DeepSeek's 3 and 1024 up to 1.4e9 tokens and 4e6 requests.
    """
    p, s = sums.prefix, sums.total
    if isinstance(p, int):
        q = max(s - p, 0)
        return sums.pair * q * (2 * p + q) > p * sums.expansion
    q = jnp.where(s > p, s - p, jnp.uint32(0))
    return _exceeds((sums.pair * q, 2 * p + q), (p, sums.expansion))


def _exceeds(left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]) -> jax.Array:
    """left[0] * left[1] > right[0] * right[1] for u32, exact: the products need 64 bits, which JAX has off."""
    (left_high, left_low), (right_high, right_low) = _product(*left), _product(*right)
    return (left_high > right_high) | ((left_high == right_high) & (left_low > right_low))


def _product(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    a_high, a_low, b_high, b_low = a >> 16, a & 0xFFFF, b >> 16, b & 0xFFFF
    low = a_low * b_low
    cross = a_high * b_low + (low >> 16)  # at most (2^16 - 1)^2 + 2^16 - 1: no carry is lost
    cross_low = a_low * b_high + (cross & 0xFFFF)
    return a_high * b_high + (cross >> 16) + (cross_low >> 16), (cross_low << 16) | (low & 0xFFFF)


def _must_know_prefix(name: str | None, facts: StaticFacts) -> None:
    if not facts.prefix_known:
        raise TypeError(
            "sum_prefix_lens is None in a non-speculative extend: triton's rules sum the prefix lengths, so give "
            "DispatchFacts(sum_prefix_lens=...), 0 where nothing is cached"
        )


_QUESTIONS: dict[str, Callable[[Sums], Truth]] = {
    "no prefix": lambda sums: sums.prefix == 0,
    "no prefix, which must be known": lambda sums: sums.prefix == 0,
    "prefix reaches the threshold": lambda sums: sums.prefix >= sums.threshold,
    "all tokens fit the capacity": lambda sums: sums.total <= sums.capacity,
    "expanding is cheaper": _expanding_is_cheaper,
}
_STATIC: dict[str, Callable[[str | None, StaticFacts], bool | None]] = {
    **dict.fromkeys(_QUESTIONS, lambda name, f: None),  # open
    "no prefix, which must be known": _must_know_prefix,
    "non-speculative extend": lambda name, f: f.mode.is_extend_without_speculative(),
    "decode": lambda name, f: f.mode.is_decode(),
    "one-shot backend": lambda name, f: name in _ONE_SHOT,
    "backend with a ragged switch": lambda name, f: name in _READS_RAGGED,
    "aiter": lambda name, f: name == "aiter",
    "chunked prefix disabled": lambda name, f: f.chunked_prefix_disabled,
    "ragged disabled": lambda name, f: f.ragged_disabled,
    "ragged disabled or no rope": lambda name, f: f.ragged_disabled or f.no_rope,
    "piecewise graph": lambda name, f: f.piecewise_graph,
    "piecewise or breakable graph": lambda name, f: f.piecewise_graph or f.breakable_graph,
    "context parallel": lambda name, f: f.prefill_context_parallel,
    "decode context parallel": lambda name, f: f.decode_context_parallel,
    "deterministic": lambda name, f: f.deterministic,
    "ROCm": lambda name, f: f.hip,
    "fused decode": lambda name, f: f.rocm_fused_decode,
    "fused qkv_a": lambda name, f: f.fused_qkv_a,
    "AMX": lambda name, f: f.amx,
    "DSA model": lambda name, f: f.dsa_model,
    "DSA planned dense": lambda name, f: f.dsa_use_mha,
    "SM100 or SM110": lambda name, f: f.sm100_or_sm110,
    "dense fp8 on gfx95": lambda name, f: f.fp8_gfx95_dense,
    "prefix known": lambda name, f: f.prefix_known,
    "sums known": lambda name, f: f.prefix_known and f.total_known,
}
QUESTIONS = with_negations(_QUESTIONS)
CONDITIONS = with_negations(_STATIC)
