"""The watch itself: a kernel that reads what a copy is still writing is caught, and one that waits is not."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from watched import CHECKED, assert_no_race


def copied(*, waits):
    def body(source, out, held, arrived):
        copy = pltpu.make_async_copy(source, held, arrived)
        copy.start()
        if waits:
            copy.wait()
        out[...] = held[...]
        if not waits:
            copy.wait()

    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32), pltpu.SemaphoreType.DMA(())],
        interpret=CHECKED,
    )(jnp.ones((8, 128)))


def test_a_copy_that_is_waited_for_does_not_race():
    assert copied(waits=True).tolist() == [[1.0] * 128] * 8
    assert_no_race()


def test_a_read_during_a_copy_is_caught():
    with pytest.raises(Exception, match="(?i)race"):  # newer interpreters raise by themselves
        jax.block_until_ready(copied(waits=False))
        assert_no_race()
