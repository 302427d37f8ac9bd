"""The conditions that rules name, each a small function of the policy's name and the facts.

A condition on the two sums is a bool on the host and an array inside jit; every other one is a bool.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jattn.dispatch.facts import DispatchFacts
from jattn.dispatch.interpreter import Truth, with_negations

_ONE_SHOT = ("fa3", "flashinfer", "flashmla")
_READS_RAGGED = ("flashinfer", "flashmla")
_INT32_MAX = 2**31 - 1


def _prefix(facts: DispatchFacts) -> int | jax.Array:
    """Prefix tokens; unknown counts as none, as in the original's generic and trtllm rules."""
    return 0 if facts.sum_prefix_lens is None else facts.sum_prefix_lens


def _strict_prefix(facts: DispatchFacts) -> int | jax.Array:
    if facts.sum_prefix_lens is None:
        raise TypeError(
            "sum_prefix_lens is None in a non-speculative extend: triton's rules sum the prefix lengths, so give "
            "DispatchFacts(sum_prefix_lens=...), 0 where nothing is cached"
        )
    return facts.sum_prefix_lens


def _fits(facts: DispatchFacts) -> Truth:
    """Every token fits at once; unknown counts as none."""
    total = 0 if facts.sum_seq_lens is None else facts.sum_seq_lens
    return total <= min(facts.max_chunk_capacity, _INT32_MAX)


def _expanding_is_cheaper(facts: DispatchFacts) -> Truth:
    """Fewer multiplications in the expanded form than in the absorbed one.

    For q fresh and p cached tokens a request, absorbed less expanded is 1536 (q p + q^2 / 2) - 262144 p a head: 1536 =
    2176 - 640 for each query-key pair, 262144 for each cached row that is expanded. With sums Q and P spread evenly
    over B requests that is 3 Q (2 P + Q) > 1024 P B.
    """
    p, s = facts.sum_prefix_lens, facts.sum_seq_lens
    assert p is not None and s is not None  # rules test "sums known" first
    if isinstance(p, jax.Array) or isinstance(s, jax.Array):
        p, s = jnp.asarray(p, jnp.uint32), jnp.asarray(s, jnp.uint32)
        q = jnp.where(s > p, s - p, jnp.uint32(0))
        return _exceeds((3 * q, 2 * p + q), (p, jnp.uint32(1024 * facts.batch_size)))
    q = max(s - p, 0)
    return 3 * q * (2 * p + q) > 1024 * p * facts.batch_size


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


_PLAIN: dict[str, Callable[[str | None, DispatchFacts], Truth]] = {
    "non-speculative extend": lambda name, f: f.mode.is_extend_without_speculative(),
    "decode": lambda name, f: f.mode.is_decode(),
    "no prefix": lambda name, f: _prefix(f) == 0,
    "no prefix, which must be known": lambda name, f: _strict_prefix(f) == 0,
    "prefix reaches the threshold": lambda name, f: _prefix(f) >= min(f.chunked_prefix_threshold, _INT32_MAX),
    "all tokens fit the capacity": lambda name, f: _fits(f),
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
    "DSA model": lambda name, f: bool(f.dsa_model),
    "DSA planned dense": lambda name, f: f.dsa_use_mha,
    "SM100 or SM110": lambda name, f: f.sm100_or_sm110,
    "dense fp8 on gfx95": lambda name, f: f.fp8_gfx95_dense,
    "prefix known": lambda name, f: f.sum_prefix_lens is not None,
    "sums known": lambda name, f: f.sum_prefix_lens is not None and f.sum_seq_lens is not None,
    "expanding is cheaper": lambda name, f: _expanding_is_cheaper(f),
}
CONDITIONS = with_negations(_PLAIN)
