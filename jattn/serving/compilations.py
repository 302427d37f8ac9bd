"""Counts what XLA compiles, through JAX's own monitoring events: the evidence for "nothing compiles after warm-up"."""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass(slots=True)
class Count:
    """Programs compiled while a `counting` block was open."""

    value: int = 0


@contextlib.contextmanager
def counting() -> Iterator[Count]:
    """Count compilations of this process within the block.

    >>> with counting() as count:
    ...     _ = jax.jit(lambda x: x + 41)(jax.numpy.ones(7)).block_until_ready()
    >>> count.value > 0
    True
    """
    count = Count()

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        count.value += event == _EVENT

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield count
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
