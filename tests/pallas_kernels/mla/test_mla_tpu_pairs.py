"""Every pair of features of the TPU latent attention at least once, interpreted, against float64."""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false, reportCallIssue=false

import hypothesis
import hypothesis.strategies as st
import pytest
from drawn import Setup
from pairwise import cover
from tpu_latents import check

from pallas_kernels.attention.tpu_config import Config

FACTORS = dict(
    mask=("causal", "full", "tree"),
    q=("decode", "verify", "mixed"),
    nodes=("queries", "more"),
    widths=((16, 4), (128, 64), (192, 192), (160, 16)),
    heads=(3, 16, 20, 32),
    page=(1, 3, 8, 16, 24, 64),
    dtype=("bfloat16", "float32"),
    packed=(False, True),
    splits=(1, 2),
    cores=(1, 2),
    parts=(1, 2),
    stacked=(False, True),
    writes=(False, True),
)


def allowed(row) -> bool:
    """Whether a call may have these, as far as they are given."""
    of = row.get
    return not (
        (of("nodes") == "more" and of("mask", "tree") != "tree")
        or (of("parts") == 2 and (of("page", 8) % 8 or of("packed")))
    )


ROWS = cover(FACTORS, allowed)


def setup_of(row) -> Setup:
    length, tokens = dict(decode=(1, 6), verify=(6, 20), mixed=(24, 50))[row["q"]]
    latent, rope = row["widths"]
    return Setup(
        name=" ".join(str(value) for value in row.values()),
        mask=row["mask"],
        max_q_len=length,
        num_tokens=tokens,
        max_nodes=length + 9 if row["nodes"] == "more" else length,
        num_kv_heads=1,
        group=row["heads"],
        head_dim=latent + rope,
        v_head_dim=latent,
        page_size=row["page"],
        dtype=row["dtype"],
        num_splits=row["splits"],
    )


def configs_of(row) -> tuple[Config, ...]:
    ahead = row["parts"] == 2
    pages = {1: 16, 3: 4, 8: 32 if ahead else 4, 16: 16 if ahead else 2, 24: 32 if ahead else 2, 64: 4}[row["page"]]
    tiles = {3: 1, 16: 1, 20: 2, 32: 2}[row["heads"]]  # groups of at most 16 heads that divide them
    sizes = dict(block_pages=pages, heads=tiles if row["stacked"] else 1, parts=row["parts"], cores=row["cores"])
    lengths = dict(decode=(1,), verify=(8,), mixed=(1, 8))[row["q"]]
    return tuple(Config(block_q=n, unroll_heads=False, **sizes) for n in lengths)


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS, ids=lambda row: setup_of(row).name)
@hypothesis.settings(max_examples=2, phases=[hypothesis.Phase.generate])
@hypothesis.given(data=st.data())
def test_every_pair_of_features_is_as_right_as_plain_jax(row, data):
    check(setup_of(row), configs_of(row), data, row["packed"], row["writes"])
