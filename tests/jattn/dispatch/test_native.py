"""`native`: the cheapest form by counted multiplications, and the absorbed one wherever lengths may not decide."""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jattn.dispatch import METHODS, DispatchFacts, FormCosts, select_method, select_method_traced
from jattn.modes import ForwardMode

EXTENDS = ("EXTEND", "MIXED", "SPLIT_PREFILL", "DLLM_EXTEND")


def native(prefix, total, mode: str = "EXTEND", **fields: Any) -> str:
    facts = DispatchFacts(mode=ForwardMode[mode], sum_prefix_lens=prefix, sum_seq_lens=total, **fields)
    return select_method("native", facts).name


def flops(q: float, p: float) -> tuple[float, float]:
    """(expanded, absorbed) of a request and head: 640 or 2176 a pair, 262144 a row that is expanded or absorbed."""
    pairs = q * p + q * q / 2
    return 640 * pairs + 262144 * (p + q), 2176 * pairs + 262144 * q


@pytest.mark.parametrize("num_seqs", [1, 3, 64])
def test_the_form_with_fewer_multiplications_wins(num_seqs):
    draw = np.random.default_rng(num_seqs)
    for _ in range(500):
        q, p = (int(2 ** draw.uniform(0, top)) for top in (11, 16))
        expanded, absorbed = flops(q, p)
        want = "MHA_ONE_SHOT" if expanded < absorbed else "MLA"
        got = native(num_seqs * p, num_seqs * (p + q), batch_size=num_seqs, max_chunk_capacity=2**30)
        assert got == want, (q, p)


def test_a_long_prefix_pays_from_171_tokens_on():
    assert native(1 << 20, (1 << 20) + 170, max_chunk_capacity=1 << 30) == "MLA"
    assert native(1 << 20, (1 << 20) + 171, max_chunk_capacity=1 << 30) == "MHA_ONE_SHOT"


def test_capacity_and_switches():
    assert native(0, 1 << 30) == "MHA"
    assert native(9000, 10000, max_chunk_capacity=9999) == "MHA_CHUNKED_KV"
    assert native(9000, 10000, max_chunk_capacity=9999, chunked_prefix_disabled=True) == "MLA"
    assert native(9000, 10000, chunked_prefix_disabled=True) == "MHA_ONE_SHOT"
    for flag in ("piecewise_graph", "breakable_graph", "prefill_context_parallel", "deterministic", "ragged_disabled"):
        on: Any = {flag: True}
        assert native(0, 10000, **on) == native(9000, 10000, **on) == "MLA"
    assert native(None, 10000) == native(None, None) == native(9000, None) == "MLA"
    assert native(0, None) == "MHA"


@pytest.mark.parametrize("mode", ForwardMode)
def test_only_certain_extends_expand(mode):
    want = ("MHA", "MHA_ONE_SHOT") if mode.name in EXTENDS else ("MLA", "MLA")
    assert (native(0, 10000, mode.name), native(9000, 10000, mode.name)) == want


def test_traced_equals_host_also_where_products_need_64_bits():
    draw = np.random.default_rng(0)
    edges = [0, 1, 170, 171, 172, 8192, 65535, 65536, 2**20, 2**29]
    cells = [(p, p + q) for p, q in itertools.product(edges, edges)] + [(5, 3)]
    for _ in range(500):  # around the break-even
        p = int(2 ** draw.uniform(0, 29))
        cells.append((p, p + max(int(draw.normal(171, 8)), 0)))
    prefixes, totals = (jnp.array(x, jnp.int32) for x in zip(*cells, strict=True))
    others = FormCosts(pair=7, row=5370), FormCosts(pair=0, row=1)
    for batch_size, capacity, costs in ((1, 131072, FormCosts()), (64, 2**30, others[0]), (4096, 0, others[1])):
        on: Any = dict(batch_size=batch_size, max_chunk_capacity=capacity, costs=costs)
        facts = DispatchFacts(mode=ForwardMode.EXTEND, sum_prefix_lens=prefixes, sum_seq_lens=totals, **on)
        got = [METHODS[i].name for i in np.asarray(select_method_traced("native", facts))]
        assert got == [native(p, s, **on) for p, s in cells]
