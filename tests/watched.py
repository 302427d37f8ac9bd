"""Interpreted TPU kernels whose accesses are watched: memory that was not written is NaN, and a race fails the test."""

from jax._src.pallas.mosaic.interpret import interpret_pallas_call as machine
from jax.experimental.pallas import tpu as pltpu

CHECKED = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")


def assert_no_race():
    """Fail if accesses of the last interpreted kernel raced, or if it was not watched."""
    assert machine.races is not None, "no kernel was interpreted with race detection"
    assert not machine.races.races_found, "two accesses of the kernel race"
