"""The TPU merge of states, interpreted with races watched and memory poisoned, against float64."""

import functools

import jax.numpy as jnp
import pytest
from partial_states import assert_merged
from watched import CHECKED, assert_no_race

from pallas_kernels.merge_states import reference, tpu

CASES = [(2, (5,), 64, "bfloat16"), (11, (3, 44), 128, "float32")]
WIDE = [
    (1, (8,), 512, "float32"),
    (8, (300,), 80, "bfloat16"),
    (33, (2, 7), 640, "float32"),
    (4, (257,), 200, "float32"),
]


@pytest.mark.parametrize("splits, lead, v_dim, dtype", CASES + [pytest.param(*c, marks=pytest.mark.long) for c in WIDE])
def test_the_merge_is_that_of_float64(splits, lead, v_dim, dtype):
    config = tpu.Config(block_rows=128, block_v=128)
    merge = functools.partial(tpu.merge_states, config=config, interpret=CHECKED)
    assert_merged(merge, reference.merge_states, splits, lead, v_dim, dtype)
    assert_no_race()


def test_sizes_fit_the_memory_they_are_given():
    config = tpu.heuristic(splits=128, v_dim=512, itemsize=4)
    assert tpu.vmem_bytes(config, splits=128, v_dim=512, itemsize=4) <= 12 << 20
    with pytest.raises(ValueError, match="merge fewer"):
        tpu.heuristic(splits=1 << 17, v_dim=512, itemsize=4)


def test_states_whose_shapes_disagree_are_refused():
    with pytest.raises(ValueError, match="one more axis"):
        tpu.merge_states(jnp.zeros((2, 3, 4)), jnp.zeros((2, 4)))
