"""The Hopper merge of states against float64: on a GPU (marker `device`), and interpreted here."""
# The interpreter's settings stand where the checker reads a flag.
# pyright: reportArgumentType=false

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from partial_states import assert_merged

from pallas_kernels.merge_states import mosaic_gpu_sm90 as sm90
from pallas_kernels.merge_states import reference

CASES = [
    (2, (5,), 64, "bfloat16"),
    (11, (3, 44), 128, "float32"),
    (1, (8,), 512, "float32"),
    (8, (300,), 80, "bfloat16"),
    (33, (2, 7), 256, "float16"),
    (4, (257, 32), 128, "bfloat16"),
    (3, (65,), 20, "float32"),
]


@pytest.mark.device
@pytest.mark.parametrize("splits, lead, v_dim, dtype", CASES)
def test_the_merge_is_that_of_float64_each_time_on_a_gpu(splits, lead, v_dim, dtype):
    first = assert_merged(sm90.merge_states, reference.merge_states, splits, lead, v_dim, dtype)
    again = assert_merged(sm90.merge_states, reference.merge_states, splits, lead, v_dim, dtype)
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


def test_the_interpreted_merge_is_that_of_float64():
    merge = functools.partial(sm90.merge_states, interpret=plgpu.InterpretGPUParams(detect_races=True))
    assert_merged(merge, reference.merge_states, 3, (70,), 80, "bfloat16")


def test_states_whose_shapes_disagree_are_refused():
    with pytest.raises(ValueError, match="one more axis"):
        sm90.merge_states(jnp.zeros((2, 3, 4)), jnp.zeros((2, 4)))
