"""The TPU merge of states, interpreted with races watched and memory poisoned, against float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from watched import CHECKED, assert_no_race

from pallas_kernels.merge_states import reference, tpu


def parts(splits, lead, v_dim, dtype, seed=0):
    """Partial states of which some are empty, with NaN where they are, and rows with nothing but empty parts."""
    rng = np.random.default_rng(seed)
    out = rng.normal(size=(splits, *lead, v_dim))
    lse = rng.normal(size=(splits, *lead)) * 5
    empty = rng.random(lse.shape) < 0.3
    empty[:, 0] = True
    out[empty] = np.nan
    lse[empty] = -np.inf
    lse[-1][empty[-1]] = np.inf
    return jnp.asarray(out, dtype), jnp.asarray(lse, jnp.float32)


def in_float64(out, lse):
    out, lse = np.asarray(out, np.float64), np.asarray(lse, np.float64)
    lse = np.where(np.isposinf(lse), -np.inf, lse)
    top = np.where(np.isneginf(lse.max(0)), 0, lse.max(0))
    weights = np.exp(lse - top)
    total = weights.sum(0)
    some = np.where(total > 0, total, 1)
    merged = (np.where(weights[..., None] > 0, out, 0) * weights[..., None]).sum(0) / some[..., None]
    return merged, np.where(total > 0, top + np.log(some), -np.inf)


CASES = [(2, (5,), 64, "bfloat16"), (11, (3, 44), 128, "float32")]
WIDE = [
    (1, (8,), 512, "float32"),
    (8, (300,), 80, "bfloat16"),
    (33, (2, 7), 640, "float32"),
    (4, (257,), 200, "float32"),
]


@pytest.mark.parametrize("splits, lead, v_dim, dtype", CASES + [pytest.param(*c, marks=pytest.mark.long) for c in WIDE])
def test_the_merge_is_that_of_float64(splits, lead, v_dim, dtype):
    out, lse = parts(splits, lead, v_dim, dtype)
    got, got_lse = tpu.merge_states(out, lse, config=tpu.Config(block_rows=128, block_v=128), interpret=CHECKED)
    assert_no_race()
    assert got.dtype == out.dtype and got.shape == (*lead, v_dim)
    want, want_lse = in_float64(out, lse)
    peer = np.asarray(reference.merge_states(out, lse)[0], np.float64)
    tolerance = 2 * np.abs(peer - want).max() + float(jnp.finfo(dtype).eps) * np.abs(want) + 1e-7
    assert (np.abs(np.asarray(got, np.float64) - want) <= tolerance).all()
    np.testing.assert_allclose(got_lse, want_lse, rtol=1e-6, atol=1e-6)


def test_sizes_fit_the_memory_they_are_given():
    config = tpu.heuristic(splits=128, v_dim=512, itemsize=4)
    assert tpu.vmem_bytes(config, splits=128, v_dim=512, itemsize=4) <= 12 << 20
    with pytest.raises(ValueError, match="merge fewer"):
        tpu.heuristic(splits=1 << 17, v_dim=512, itemsize=4)


def test_states_whose_shapes_disagree_are_refused():
    with pytest.raises(ValueError, match="one more axis"):
        tpu.merge_states(jnp.zeros((2, 3, 4)), jnp.zeros((2, 4)))
