"""Times of calls on this GPU, and the card's two roofs; `bench_attention.py` says what is measured."""

import contextlib
import fcntl
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

_WALL_FROM_MS = 0.3
_WARM_MS = 20.0  # an idle card needs some milliseconds to raise its clocks
_KEY = 1


class Turns:
    """Whose turn on the card it is, of several processes that compile side by side and must not disturb a timing."""

    def __init__(self):
        self.path: str | None = None  # of the file that is locked; None: this process is alone
        self._depth = 0

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Wait for the card, and keep it until the end of the block; may be nested."""
        if self.path is None or self._depth:
            yield
            return
        with open(self.path, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1


TURNS = Turns()


def input_sets(one: Callable, count: int) -> list:
    """`count` sets of inputs, `one` by key; compiled before the card is asked for."""
    keys = [jax.random.fold_in(jax.random.key(_KEY), i) for i in range(count)]
    compiled = jax.jit(one).lower(keys[0]).compile()
    with TURNS.taken():
        return jax.block_until_ready([compiled(key) for key in keys])


class Timer:
    """Times calls on this GPU; see the head of `bench_attention.py`."""

    def __init__(self, runs: int):
        self.runs = runs
        from jax._src.lib import mosaic_gpu  # its CUPTI reader has no public name, and there is none without a GPU

        self.cupti = mosaic_gpu._mosaic_gpu_ext  # pyright: ignore[reportPrivateImportUsage]

    def __call__(self, call: Callable, sets: list) -> dict[str, Any]:
        """Times of one call over its input sets."""
        return self.compare({"": (call, sets, jax.block_until_ready)})[""]

    def compare(self, calls: dict[str, tuple[Callable, list, Callable]]) -> dict[str, Any]:
        """Times of several calls, in turns, so that all meet the card in the same state.

        calls: name -> (call, input sets, what waits for the call's result). The exception of a call that failed.
        """
        counts, walls, kernels, names, found = {}, {}, {}, {}, {}
        for name, (call, sets, finish) in calls.items():
            try:
                for one in sets[:2]:
                    finish(call(*one))
                estimate = self._wall(call, sets, max(len(sets), 3), finish)
                self._wall(call, sets, max(1, int(_WARM_MS / max(estimate, 1e-3))), finish)
                counts[name] = int(max(len(sets), 5, min(1000, 60 / max(estimate, 1e-3))))
            except Exception as error:
                found[name] = error
        for _ in range(self.runs):
            for name, count in counts.items():
                call, sets, finish = calls[name]
                walls.setdefault(name, []).append(self._wall(call, sets, count, finish))
                own = self._kernels(call, sets, min(count, 200), finish)
                kernels.setdefault(name, []).append(sum(own.values()))
                names[name] = own
        for name in counts:
            wall, own = statistics.median(walls[name]), statistics.median(kernels[name])
            best, taken = (own, kernels[name]) if own < _WALL_FROM_MS else (wall, walls[name])
            spread = (max(taken) - min(taken)) / best
            each = dict(runs=taken, kernels=names[name])
            found[name] = dict(ms=best, ms_wall=wall, ms_cupti=own, spread=spread, **each)
        return found

    def _wall(self, call, sets, count: int, finish) -> float:
        start = time.perf_counter()
        out = None
        for i in range(count):
            out = call(*sets[i % len(sets)])
        finish(out)
        return (time.perf_counter() - start) * 1e3 / count

    def _kernels(self, call, sets, count: int, finish) -> dict[str, float]:
        self.cupti._cupti_init()
        try:
            out = None
            for i in range(count):
                out = call(*sets[i % len(sets)])
            finish(out)
        finally:
            timings = self.cupti._cupti_get_timings(True)
        each: dict[str, float] = {}
        for name, ms in timings:
            each[name] = each.get(name, 0.0) + ms / count
        return each


def roofs(timer: Timer) -> dict[str, float]:
    """Copy and read bandwidth in GB/s and bf16 matmul rate in TFLOP/s of this card."""
    big = jax.random.bits(jax.random.key(0), (1 << 30,), jnp.uint32)
    copy = timer(jax.jit(lambda x: x + jnp.uint32(1)), [(big,)])["ms"]
    read = timer(jax.jit(lambda x: jnp.max(x)), [(big,)])["ms"]
    del big
    a, b = (jax.random.normal(jax.random.key(i), (8192, 8192), jnp.bfloat16) for i in range(2))
    matmul = timer(jax.jit(lambda a, b: a @ b), [(a, b)])["ms"]
    nbytes = 4.0 * (1 << 30)
    return dict(copy_gbps=2 * nbytes / copy / 1e6, read_gbps=nbytes / read / 1e6, tflops=2 * 8192**3 / matmul / 1e9)
