"""The law of two deciders: inside jit, where only the sums are arrays, the decision is the host's in every cell.

The seed's rules are held to it beside their literal table, in test_tables.py. Here are the newer rules and `native`:
every combination of the flags that a name reads, one call of a compiled program for all sums.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.dispatch import METHODS, DispatchFacts, select_method, select_method_traced
from jattn.modes import ForwardMode

GRAPHS = "piecewise_graph breakable_graph"
GENERIC = f"{GRAPHS} prefill_context_parallel chunked_prefix_disabled"
SUBTYPE = "hip fused_qkv_a amx"
RAGGED = f"{GENERIC} ragged_disabled no_rope {SUBTYPE}"
TRITON = f"{GRAPHS} deterministic fp8_gfx95_dense {SUBTYPE}"
TRTLLM = f"{GRAPHS} chunked_prefix_disabled {SUBTYPE}"
# name -> the flags that its newer rules read
READS = {
    "flashinfer": RAGGED,
    "flashmla": RAGGED,
    "fa3": f"{GENERIC} deterministic {SUBTYPE}",
    "fa4": f"{GENERIC} deterministic sm100_or_sm110 {SUBTYPE}",
    "intel_xpu": f"{GENERIC} {SUBTYPE}",
    "trtllm_mla": TRTLLM,
    "tokenspeed_mla": TRTLLM,
    "aiter": f"{GRAPHS} decode_context_parallel rocm_fused_decode {SUBTYPE}",
    "dsa": "dsa_use_mha hip",
    "nsa": "dsa_use_mha hip",
    "ascend": "dsa_model hip",
    "triton": TRITON,
    "cutlass_mla": TRITON,
    "no such backend": TRITON,
    None: TRITON,
}
NATIVE = f"{GENERIC} deterministic ragged_disabled"
K = 131072
# threshold, capacity, and sums on the sides of each
LIMITS = (
    (8192, K, (0, 8191, 8192), (K, K + 1)),
    (0, 7, (0, 1), (0, 7, 8)),
)
MORE_LIMITS = (
    (7, 0, (0, 6, 7), (0, 1)),
    (1, 10**12, (0, 1, 2**31 - 1), (0, 2**31 - 1)),
    (10**12, 1, (0, 1, 2**31 - 1), (1, 2**31 - 1)),
)


def settings(flags: str) -> Iterator[dict[str, Any]]:
    names = flags.split()
    for mode, *values in itertools.product(ForwardMode, *[(False, True)] * len(names)):
        yield dict(zip(("mode", *names), (mode, *values), strict=True))


@functools.cache
def grid(prefixes: tuple, totals: tuple) -> tuple[list, dict[str, Any]]:
    """Every pair of sums: as pairs, and as two arrays, all padded to one length so that a program serves for all."""
    cells = list(itertools.product(prefixes, totals))
    prefix, total = (None if None in x else jnp.asarray(np.resize(x, 12), jnp.int32) for x in zip(*cells, strict=True))
    return cells, dict(sum_prefix_lens=prefix, sum_seq_lens=total)


def check(name: str | None, rules: str, given: dict[str, Any], prefixes: tuple, totals: tuple) -> None:
    cells, sums = grid(prefixes, totals)
    got = np.asarray(select_method_traced(name, DispatchFacts(**sums, **given), rules=rules))
    want = [
        select_method(name, DispatchFacts(sum_prefix_lens=prefix, sum_seq_lens=total, **given), rules=rules)
        for prefix, total in cells
    ]
    assert got.dtype == np.int32 and [METHODS[i] for i in got.reshape(-1)[: len(cells)].tolist()] == want, (name, given)


@pytest.mark.parametrize("name", READS)
def test_newer_rules_decide_alike_inside_jit(name):
    for given in settings(READS[name]):
        for threshold, capacity, prefixes, totals in LIMITS[
            : 1 if any(given.get(flag) for flag in SUBTYPE.split()) else 2
        ]:
            limits = dict(chunked_prefix_threshold=threshold, max_chunk_capacity=capacity)
            check(name, "newer", given | limits, prefixes, totals)


def strict(name: str | None, given: dict[str, Any]) -> bool:
    """Whether triton's rules want to know the prefix."""
    on = {flag for flag, value in given.items() if value is True}
    return (
        READS[name] is TRITON
        and given["mode"].is_extend_without_speculative()
        and not on & {"piecewise_graph", "breakable_graph", "deterministic", "fp8_gfx95_dense"}
    )


@pytest.mark.parametrize("name", READS)
def test_newer_rules_decide_alike_where_a_sum_is_not_known(name):
    for given in settings(" ".join(flag for flag in READS[name].split() if flag not in SUBTYPE.split())):
        for prefixes, totals in (((None,), (K, K + 1)), ((0, 1, 8191, 8192), (None,)), ((None,), (None,))):
            if None in prefixes and strict(name, given):
                for decide in (select_method, select_method_traced):
                    with pytest.raises(TypeError, match="sum_prefix_lens is None"):
                        decide(name, DispatchFacts(sum_prefix_lens=None, sum_seq_lens=None, **given), rules="newer")
            else:
                check(name, "newer", given, prefixes, totals)


@pytest.mark.parametrize("rules", ["seed", "newer"])
def test_native_decides_alike_inside_jit(rules):
    prefixes, totals = (0, 1, 8192), (8192, 8363, K, K + 1)
    for given in settings(NATIVE):
        for capacity, batch_size in ((K, 1), (0, 3)):
            limits = dict(max_chunk_capacity=capacity, batch_size=batch_size)
            for known in itertools.product((prefixes, (None,)), (totals, (None,))):
                check("native", rules, given | limits, *known)


@pytest.mark.parametrize("rules", ["seed", "newer"])
@pytest.mark.parametrize("name", READS)
def test_limits_beyond_the_sums_width(name, rules):
    for threshold, capacity, prefixes, totals in MORE_LIMITS:
        given: Any = dict(mode=ForwardMode.EXTEND, chunked_prefix_threshold=threshold, max_chunk_capacity=capacity)
        check(name, rules, given, prefixes, totals)


@pytest.mark.parametrize("rules", ["seed", "newer"])
def test_inside_a_larger_program_every_name_decides_as_outside(rules):
    names, modes = (*READS, "native"), (ForwardMode.EXTEND, ForwardMode.DECODE)
    prefixes, totals = jnp.array([0, 100, 9000, 9000]), jnp.array([500, 500, 9500, K + 1])

    @jax.jit
    def decide(prefix, total):
        made = [DispatchFacts(mode=mode, sum_prefix_lens=prefix, sum_seq_lens=total) for mode in modes]
        return [select_method_traced(name, facts, rules=rules) for name in names for facts in made]

    for got, (name, mode) in zip(decide(prefixes, totals), itertools.product(names, modes), strict=True):
        for at, index in enumerate(got.tolist()):
            facts = DispatchFacts(mode=mode, sum_prefix_lens=prefixes[at], sum_seq_lens=totals[at])
            assert METHODS[index] is select_method(name, facts, rules=rules)
