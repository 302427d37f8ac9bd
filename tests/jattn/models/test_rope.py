"""Rotary phases, in float32 whatever the model's dtype, by each way that a layer can get them."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.models.rope import Llama3Scaling, cos_sin, inv_freq, rope, rotate

CASE = cases.build("C22")
POSITIONS, DIM, THETA = (CASE.inputs[name] for name in ("positions", "dim", "theta"))
AT = jnp.asarray(POSITIONS, jnp.int32)


def by_table(positions):
    return cos_sin(positions, inv_freq(DIM, THETA))


def by_rotation(positions):
    """What (1, 0) becomes: the first half of the features is cos, the second sin."""
    ones = jnp.concatenate([jnp.ones((len(POSITIONS), 1, DIM // 2)), jnp.zeros((len(POSITIONS), 1, DIM // 2))], axis=2)
    return jnp.split(rope(ones, ones, positions, theta=THETA)[0][:, 0], 2, axis=1)


@pytest.mark.parametrize("jit", [jax.jit, lambda function: function], ids=["jit", "eager"])
@pytest.mark.parametrize("way", [by_table, by_rotation])
def test_phases_are_float32_at_long_positions(way, jit):
    cos, sin = jit(way)(AT)
    assert CASE.check({"cos": np.asarray(cos), "sin": np.asarray(sin)}) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_narrow_dtype_comes_in_after_cos_and_sin(dtype):
    """Rotated narrow features are the float64 rotation of those features, rounded once."""
    x = np.asarray(jnp.asarray(cases.draw(7, len(POSITIONS), 2, DIM), dtype).astype(jnp.float32))
    cos, sin = by_table(AT)
    got = np.asarray(rotate(jnp.asarray(x, dtype), cos, sin).astype(jnp.float32), np.float64)
    want = cases.rope(x, POSITIONS, cases.inv_freq(DIM, THETA))
    phase = np.tile(CASE.expected["limit"], 2)[:, None]
    size = np.abs(np.roll(x, DIM // 2, axis=2)) + np.abs(x)  # of the two features that a phase error turns
    assert (np.abs(got - want) <= float(jnp.finfo(dtype).eps) / 2 * np.abs(want) + 2 * phase * size).all()


def test_llama3_scaling_has_three_bands():
    c = CASE.inputs["llama3"]
    scaling = Llama3Scaling(
        factor=c["factor"], low_freq_factor=c["low"], high_freq_factor=c["high"], original_max_context=c["original"]
    )
    ratio = inv_freq(DIM, c["theta"], scaling) / inv_freq(DIM, c["theta"])
    assert CASE.check({"llama3_ratio": ratio}) == []
    assert ratio[0] == 1 and ratio[-1] == 1 / c["factor"] and ((ratio > 0.126) & (ratio < 0.99)).any()
