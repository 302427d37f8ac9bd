"""Every pair of features of the TPU attention at least once, interpreted, against float64."""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false, reportCallIssue=false

import hypothesis
import hypothesis.strategies as st
import pytest
from drawn import Setup
from pairwise import cover, pairs_of
from tpu_pages import check, check_written

from pallas_kernels.attention.tpu_config import Config

FACTORS = dict(
    mask=("causal", "full", "tree"),
    q=("decode", "verify", "mixed"),
    nodes=("queries", "more"),
    head_dim=(20, 64, 80, 96, 128),
    v=("same", "narrow"),
    kv_heads=(1, 2, 3),
    group=(1, 3, 4),
    page=(1, 3, 8, 16, 24),
    dtype=("bfloat16", "float32"),
    kv=("own", "int8", "int8 token", "fp8_e4m3", "fp8_e4m3 token", "fp8_e5m2"),
    window=(None, 5),
    cap=(None, 2.0),
    sinks=(False, True),
    splits=(1, 2),
    cores=(1, 2),
    parts=(1, 2),
    heads=("one", "all"),
    unrolled=(True, False),
    writes=(False, True),
)


def allowed(row) -> bool:
    """Whether a call may have these, as far as they are given."""
    of = row.get
    return not (
        (of("mask") == "full" and of("window"))
        or (of("nodes") == "more" and of("mask", "tree") != "tree")
        or (of("sinks") and of("splits", 1) > 1)
        or (of("parts") == 2 and (of("page", 8) % 8 or "token" in of("kv", "")))
    )


ROWS = cover(FACTORS, allowed)


def setup_of(row) -> Setup:
    kind, _, scales = row["kv"].partition(" ")
    own = kind == "own"
    tokens = dict(decode=(1, 6), verify=(6, 20), mixed=(24, 50))[row["q"]]
    return Setup(
        name=" ".join(str(value) for value in row.values()),
        mask=row["mask"],
        max_q_len=tokens[0],
        num_tokens=tokens[1],
        max_nodes=row["mask"] == "tree" and row["nodes"] == "more" and tokens[0] + 9 or None,
        head_dim=row["head_dim"],
        v_head_dim=row["head_dim"] // 2 if row["v"] == "narrow" else None,
        num_kv_heads=row["kv_heads"],
        group=row["group"],
        page_size=row["page"],
        dtype=row["dtype"],
        kv_dtype=None if own else kind,
        kv_scales=None if own else scales or "tensor",
        layout="token_major" if kind.startswith("fp8") else None,
        sliding_window=row["window"],
        logit_soft_cap=row["cap"],
        sinks=row["sinks"],
        num_splits=row["splits"],
    )


def configs_of(row) -> tuple[Config, ...]:
    ahead = row["parts"] == 2
    pages = {1: 16, 3: 4, 8: 32 if ahead else 4, 16: 16 if ahead else 2, 24: 32 if ahead else 2}[row["page"]]
    sizes = dict(
        block_pages=pages,
        heads=row["kv_heads"] if row["heads"] == "all" else 1,
        unroll_heads=row["unrolled"] and not ahead,
        parts=row["parts"],
        cores=row["cores"],
    )
    return tuple(Config(block_q=n, **sizes) for n in dict(decode=(1,), verify=(8,), mixed=(1, 8))[row["q"]])


def test_the_list_has_every_pair():
    found = set().union(*map(pairs_of, ROWS))
    for a, b in (("kv", "page"), ("mask", "writes"), ("parts", "splits"), ("head_dim", "kv_heads"), ("cores", "nodes")):
        wanted = [(x, y) for x in FACTORS[a] for y in FACTORS[b] if allowed({a: x, b: y})]
        assert all(frozenset(((a, x), (b, y))) in found for x, y in wanted), (a, b)
    assert all(map(allowed, ROWS)) and len(ROWS) < 60


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS, ids=lambda row: setup_of(row).name)
@hypothesis.settings(max_examples=2, phases=[hypothesis.Phase.generate])
@hypothesis.given(data=st.data())
def test_every_pair_of_features_is_as_right_as_plain_jax(row, data):
    run = check_written if row["writes"] else check
    run(setup_of(row), configs_of(row), data)
