"""The compiled programs of an engine: lowered and compiled before the first token, so that serving never compiles."""

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.combinators.costs import Variant, variants
from jattn.combinators.extend import admit, extend, release
from jattn.combinators.round import decode_round
from jattn.combinators.state import DecodeState


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProgramConfig:
    """Static facts that shape the programs."""

    num_seqs: int
    max_context: int
    num_steps: int  # drafts a request and round; 0 decodes plainly
    max_stops: int
    prefill_rows: tuple[int, ...]  # chunk sizes, ascending
    kind: str  # of the platform, for the cost table

    @property
    def shapes(self) -> tuple[Variant, ...]:
        """Target-step shapes inside the round."""
        return variants(num_seqs=self.num_seqs, num_steps=self.num_steps, kind=self.kind)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """Executables. All but `params` donate the state."""

    round: Callable  # (params, state) -> (state, report)
    prefill: dict[int, Callable]  # rows -> (params, state, q_lens) -> (state, report)
    admit: Callable
    release: Callable


def compile_programs(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    state: DecodeState,
    config: ProgramConfig,
    on_program: Callable[[int, int], None],
) -> Programs:
    """Compile every program an engine will run, side by side. `on_program` hears (done, total) as each is ready."""
    lowered = {name: lower() for name, lower in _lowerings(graphdef, params, state, config).items()}
    ready: dict[str, Callable] = {}
    with concurrent.futures.ThreadPoolExecutor() as pool:  # XLA compiles outside Python's lock
        waiting = {pool.submit(low.compile): name for name, low in lowered.items()}
        for done, future in enumerate(concurrent.futures.as_completed(waiting), start=1):
            ready[waiting[future]] = future.result()
            on_program(done, len(waiting))
    return Programs(
        round=ready["round"],
        prefill={rows: ready[f"prefill of {rows}"] for rows in config.prefill_rows},
        admit=ready["admit"],
        release=ready["release"],
    )


def _lowerings(graphdef, params, state, config: ProgramConfig) -> dict[str, Callable]:
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    scalar = ints(())

    def lower(function: Callable, *args, donate: int) -> Callable:
        return lambda: jax.jit(function, donate_argnums=donate).lower(*args)

    def with_model(function, params, *args):
        return function(nnx.merge(graphdef, params), *args)

    step = functools.partial(decode_round, num_steps=config.num_steps, shapes=config.shapes)
    table = {"round": lower(functools.partial(with_model, step), params, state, donate=1)}
    for rows in config.prefill_rows:
        chunk = functools.partial(extend, rows=rows, report_width=config.num_steps + 1)
        table[f"prefill of {rows}"] = lower(
            functools.partial(with_model, chunk), params, state, ints((config.num_seqs,)), donate=1
        )
    floats = jax.ShapeDtypeStruct((4,), jnp.float32)
    seed = jax.ShapeDtypeStruct((), jnp.uint32)
    row = (ints((config.max_context,)), ints((2,)), ints((config.max_stops,)))
    table["admit"] = lower(admit, state, scalar, *row, floats, seed, donate=0)
    table["release"] = lower(release, state, scalar, donate=0)
    return table
