"""The portable merge of states, interpreted, against float64."""

import functools

import jax.numpy as jnp
import pytest
from partial_states import assert_merged

from pallas_kernels.merge_states import gpu, reference

CASES = [(2, (5,), 64, "bfloat16"), (11, (3, 44), 128, "float32")]
WIDE = [(1, (8,), 512, "float32"), (8, (300,), 80, "float16"), (33, (2, 7), 640, "float32"), (4, (257,), 20, "float32")]


@pytest.mark.parametrize("splits, lead, v_dim, dtype", CASES + [pytest.param(*c, marks=pytest.mark.long) for c in WIDE])
def test_the_merge_is_that_of_float64(splits, lead, v_dim, dtype):
    merge = functools.partial(gpu.merge_states, interpret=True)
    assert_merged(merge, reference.merge_states, splits, lead, v_dim, dtype)


def test_states_whose_shapes_disagree_are_refused():
    with pytest.raises(ValueError, match="one more axis"):
        gpu.merge_states(jnp.zeros((2, 3, 4)), jnp.zeros((2, 4)))
