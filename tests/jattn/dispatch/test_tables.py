"""Every cell that a handler reads against a literal table, on the host and traced.

The tables are typed from the description of the original's dispatch, a line a row, first match wins. A column is a
fact in classes: P (prefix tokens): `0`, `<` below the threshold, `>` at or above it; S (all tokens): `fit` or `not`;
W: a non-speculative extend; `*`: anything. Nothing here imports a rule.
"""

import functools
import itertools
import random
import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jattn.dispatch import METHODS, AttnForwardMethod, DispatchFacts, select_method, select_method_traced
from jattn.modes import ForwardMode

GENERIC = """
    PCG CP  R  W  P  C  S   -> method
    1   *   *  *  *  *  *   -> MLA
    *   1   *  *  *  *  *   -> SUB
    *   *   1  *  *  *  *   -> SUB
    *   *   *  0  *  *  *   -> SUB
    *   *   *  1  0  *  fit -> MHA_ONE_SHOT
    *   *   *  1  0  *  *   -> MHA_CHUNKED_KV
    *   *   *  1  >  0  fit -> MHA_ONE_SHOT
    *   *   *  1  >  0  *   -> MHA_CHUNKED_KV
    *   *   *  1  <  *  *   -> SUB
    *   *   *  1  >  1  *   -> SUB
"""
FA3 = """
    DET PCG CP  W  P  C  S   -> method
    1   *   *   *  *  *  *   -> SUB
    *   1   *   *  *  *  *   -> MLA
    *   *   1   *  *  *  *   -> SUB
    *   *   *   0  *  *  *   -> SUB
    *   *   *   1  0  *  fit -> MHA_ONE_SHOT
    *   *   *   1  0  *  *   -> MHA_CHUNKED_KV
    *   *   *   1  >  0  fit -> MHA_ONE_SHOT
    *   *   *   1  >  0  *   -> MHA_CHUNKED_KV
    *   *   *   1  <  *  *   -> SUB
    *   *   *   1  >  1  *   -> SUB
"""
NEVER_ONE_SHOT = """
    PCG CP  W  P  C  -> method
    1   *   *  *  *  -> MLA
    *   1   *  *  *  -> SUB
    *   *   0  *  *  -> SUB
    *   *   1  0  *  -> MHA_CHUNKED_KV
    *   *   1  >  0  -> MHA_CHUNKED_KV
    *   *   1  <  *  -> SUB
    *   *   1  >  1  -> SUB
"""
TRTLLM = """
    PCG W  C  P  -> method
    1   *  *  *  -> MLA
    *   1  0  *  -> MHA_CHUNKED_KV
    *   1  *  0  -> MHA_CHUNKED_KV
    *   *  *  *  -> SUB
"""
FA4 = """
    W  -> method
    *  -> MHA_CHUNKED_KV
"""
AITER = """
    PCG BCG W  -> method
    1   *   *  -> MHA
    *   1   *  -> MHA
    *   *   1  -> MHA
    *   *   *  -> MLA
"""
DSA = """
    UM -> method
    1  -> MHA_ONE_SHOT
    0  -> MLA
"""
ASCEND = """
    DSA W  -> method
    1   *  -> DSA_NPU
    *   1  -> MHA_NPU
    *   0  -> MLA_NPU
"""
TRITON = """
    PCG DET W  P  -> method
    1   *   *  *  -> MLA
    *   1   *  *  -> SUB
    *   *   1  0  -> MHA
    *   *   *  *  -> SUB
"""
HANDLERS = {
    "flashinfer": GENERIC,
    "flashmla": GENERIC,
    "fa3": FA3,
    "cutlass_mla": NEVER_ONE_SHOT,
    "intel_xpu": NEVER_ONE_SHOT,
    "fa4": FA4,
    "trtllm_mla": TRTLLM,
    "tokenspeed_mla": TRTLLM,
    "aiter": AITER,
    "dsa": DSA,
    "nsa": DSA,
    "ascend": ASCEND,
    "triton": TRITON,
}
HANDLERS |= dict.fromkeys(("cutedsl_mla", "no such backend", None), TRITON)
UNKNOWN = (
    "trtllm_mha torch_native flex_attention intel_amx wave dsv4 qsa hybrid_linear_attn dual_chunk_flash_attn hpc_ops"
).split()

# HIP RF decode FQ AMX -> method
SUB = """
    1 1 1 * * -> MLA_FUSED_ROPE_ROCM
    1 * * * * -> MLA
    0 * * 1 1 -> MLA_FUSED_ROPE_CPU
    0 * * * * -> MLA
"""
FLAGS = {
    "PCG": "piecewise_graph",
    "BCG": "breakable_graph",
    "CP": "prefill_context_parallel",
    "R": "ragged_disabled",
    "C": "chunked_prefix_disabled",
    "DET": "deterministic",
    "UM": "dsa_use_mha",
    "DSA": "dsa_model",
    "HIP": "hip",
    "RF": "rocm_fused_decode",
    "FQ": "fused_qkv_a",
    "AMX": "amx",
}
SUB_FLAGS = ("HIP", "RF", "FQ", "AMX")
W_MODES = {"EXTEND", "MIXED", "SPLIT_PREFILL", "DLLM_EXTEND"}
K = 131072
# threshold, capacity, prefixes on the threshold's sides, totals on the capacity's. None: not known on the host.
LIMITS = (
    (8192, K, (None, 0, 1, 8191, 8192, 8193), (None, K, K + 1)),
    (7, 0, (0, 6, 7), (0, 1)),
    (0, 7, (0, 1), (7, 8)),
)


@functools.cache
def parsed(table: str):
    head, *rows = [line.split("->") for line in table.strip().splitlines()]
    return tuple(head[0].split()), tuple((tuple(cells.split()), method.strip()) for cells, method in rows)


@functools.cache
def first_match(rows, cells: tuple[str, ...]) -> str:
    return next(m for row, m in rows if all(want in ("*", is_) for want, is_ in zip(row, cells, strict=True)))


SUB_ROWS = tuple((tuple(c.split()), m.strip()) for c, m in (line.split("->") for line in SUB.strip().splitlines()))


def subtype(mode: str, flags: dict) -> str:
    on = [flags["HIP"], flags["RF"], mode == "DECODE", flags["FQ"], flags["AMX"]]
    return first_match(SUB_ROWS, tuple(str(int(x)) for x in on))


def facts(**fields: Any) -> DispatchFacts:
    return DispatchFacts(**fields)


def flag_values(columns: tuple[str, ...], has_sub: bool):
    names = [name for name in columns if name in FLAGS] + (list(SUB_FLAGS) if has_sub else [])
    domains = [(None, False, True) if name == "DSA" else (False, True) for name in names]
    for values in itertools.product(*domains):
        yield dict(zip(names, values, strict=True))


@functools.cache
def limits_of(columns: tuple[str, ...]) -> list:
    """Limits, each with its cells: a pair of sums and their classes. One sum stands for each that no column reads."""
    limits = []
    for threshold, capacity, prefixes, totals in LIMITS if {"P", "S"} & set(columns) else LIMITS[:1]:
        cells = {}
        for prefix in prefixes if "P" in columns else (9000,):
            side = "<" if (prefix or 0) < threshold else ">"
            for total in totals if "S" in columns else (None,):
                fits = "fit" if (total or 0) <= capacity else "not"
                cells[prefix, total] = "0" if not prefix else side, fits
        limits.append((dict(chunked_prefix_threshold=threshold, max_chunk_capacity=capacity), cells, batches_of(cells)))
    return limits


def batches_of(cells) -> list:
    """The cells in batches that know the same sums, each with its two arrays; all are padded to one length."""
    batches = []
    for known in itertools.product((False, True), repeat=2):
        alike = [cell for cell in cells if tuple(x is not None for x in cell) == known]
        if alike:
            sums = [None if None in x else jnp.asarray(np.resize(x, 12), jnp.int32) for x in zip(*alike, strict=True)]
            batches.append((alike, dict(zip(("sum_prefix_lens", "sum_seq_lens"), sums, strict=True))))
    return batches


def statics_of(name):
    """Every combination of the static facts that the table of a name reads.

    Yields: the facts; the method for each class of sums; whether an unknown prefix is an error.
    """
    columns, rows = parsed(HANDLERS[name])
    has_sub = any(method == "SUB" for _, method in rows)
    for mode, flags in itertools.product(ForwardMode.__members__, flag_values(columns, has_sub)):
        static = {key: str(int(bool(value))) for key, value in flags.items()} | {"W": str(int(mode in W_MODES))}
        methods = {}
        for p, s in itertools.product("0<>", ("fit", "not")):
            method = first_match(rows, tuple([{**static, "P": p, "S": s}[column] for column in columns]))
            methods[p, s] = AttnForwardMethod[subtype(mode, flags) if method == "SUB" else method]
        must_know = HANDLERS[name] is TRITON and [static[c] for c in ("W", "PCG", "DET")] == ["1", "0", "0"]
        yield dict(mode=ForwardMode[mode], **{FLAGS[key]: value for key, value in flags.items()}), methods, must_know


@pytest.mark.parametrize("name", HANDLERS)
def test_every_cell_is_its_row_of_the_table_on_the_host_and_traced(name):
    columns, _ = parsed(HANDLERS[name])
    for static, methods, must_know in statics_of(name):
        for limits, cells, batches in limits_of(columns):
            given: Any = static | limits
            for (prefix, total), sides in cells.items():
                made = DispatchFacts(sum_prefix_lens=prefix, sum_seq_lens=total, **given)
                if must_know and prefix is None:
                    with pytest.raises(TypeError, match="sum_prefix_lens is None"):
                        select_method(name, made)
                else:
                    assert select_method(name, made) is methods[sides], (name, made)
            for alike, sums in batches:
                made = DispatchFacts(**sums, **given)
                if must_know and sums["sum_prefix_lens"] is None:
                    with pytest.raises(TypeError, match="sum_prefix_lens is None"):
                        select_method_traced(name, made)
                else:
                    got = np.asarray(select_method_traced(name, made)).reshape(-1)[: len(alike)].tolist()
                    assert [METHODS[index] for index in got] == [methods[cells[cell]] for cell in alike], (name, made)


# What a handler may look at, in columns; a random change of anything else changes nothing.
@pytest.mark.parametrize("name", HANDLERS)
def test_what_a_handler_does_not_read_is_ignored(name):
    draw = random.Random(str(name))
    columns, rows = parsed(HANDLERS[name])
    reads = {FLAGS.get(c, c) for c in columns}
    reads |= {FLAGS[c] for c in SUB_FLAGS} if any(method == "SUB" for _, method in rows) else set()
    domains = {FLAGS[c]: (False, True) for c in FLAGS} | {"dsa_model": (None, False, True)}
    domains |= dict(no_rope=(False, True), sm100_or_sm110=(False, True), decode_context_parallel=(False, True))
    domains |= dict(fp8_gfx95_dense=(False, True), batch_size=(1, 7), policy=(None, "fa3"))
    if "P" not in columns:
        domains |= dict(sum_prefix_lens=(None, 0, 1, 9000))
    if columns[-1] != "S":
        domains |= dict(sum_seq_lens=(None, 0, K + 1), max_chunk_capacity=(0, K))
    if not {"P", "C"} <= set(columns):
        domains |= dict(chunked_prefix_threshold=(0, 1, 8192))
    ignored = {field: values for field, values in domains.items() if field not in reads}
    for _ in range(400):
        base = dict(
            mode=draw.choice(list(ForwardMode)),
            sum_prefix_lens=draw.choice((0, 1, 8192)),
            sum_seq_lens=draw.choice((None, K, K + 1)),
            **{field: draw.choice(domains[field]) for field in reads & domains.keys()},
        )
        want = select_method(name, facts(**base))
        change = {field: draw.choice(values) for field, values in ignored.items()}
        assert select_method(name, facts(**{**base, **change})) is want, (base, change)


def test_index_order_and_traced_choice_under_jit():
    import jax

    assert [m.name for m in METHODS[:9]] == (
        "MHA MLA MHA_CHUNKED_KV MHA_ONE_SHOT MLA_FUSED_ROPE_ROCM MLA_FUSED_ROPE_CPU MHA_NPU MLA_NPU DSA_NPU".split()
    )
    made = facts(mode=ForwardMode.EXTEND, sum_prefix_lens=9000, sum_seq_lens=9100)
    decide = jax.jit(lambda facts: select_method_traced("fa3", facts))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert METHODS[decide(made)] is AttnForwardMethod.MHA_ONE_SHOT
    with pytest.raises(TypeError, match="sum_prefix_lens is traced: decide with select_method_traced"):
        jax.jit(lambda facts: select_method("fa3", facts))(made)


def test_bad_facts_are_refused_in_a_sentence():
    good = dict(mode=ForwardMode.EXTEND, sum_prefix_lens=0, sum_seq_lens=8)
    with pytest.raises(ValueError, match="sum_prefix_lens=-1 is negative"):
        select_method("fa3", facts(**{**good, "sum_prefix_lens": -1}))
    with pytest.raises(TypeError, match="sum_seq_lens=1.5 is not a count"):
        select_method("fa3", facts(**{**good, "sum_seq_lens": 1.5}))
    with pytest.raises(ValueError, match="max_chunk_capacity=-1 is negative"):
        select_method_traced("fa3", facts(**good, max_chunk_capacity=-1))
    with pytest.raises(TypeError, match="mode='extend' is not a ForwardMode: want one of ForwardMode.EXTEND"):
        select_method("fa3", facts(**{**good, "mode": "extend"}))
    with pytest.raises(ValueError, match="unknown rules 'old': want one of seed, newer"):
        select_method("fa3", facts(**good), rules="old")


def test_sums_may_be_numpy_or_device_integers():
    for number in (np.int64(9000), jnp.int32(9000)):
        made = facts(mode=ForwardMode.EXTEND, sum_prefix_lens=number, sum_seq_lens=number)
        assert select_method("fa3", made) is AttnForwardMethod.MHA_ONE_SHOT
