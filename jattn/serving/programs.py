"""The compiled programs of an engine: lowered and compiled before the first token, so that serving never compiles."""

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
    on_program: Callable[[str], None],
) -> Programs:
    """Compile every program an engine will run. `on_program` hears the name of each when it is done."""

    def build(name: str, function: Callable, *args, donate: int) -> Callable:
        compiled = jax.jit(function, donate_argnums=donate).lower(*args).compile()
        on_program(name)
        return compiled

    def with_model(function, params, *args):
        return function(nnx.merge(graphdef, params), *args)

    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    step = functools.partial(decode_round, num_steps=config.num_steps, shapes=config.shapes)
    return Programs(
        round=build("round", functools.partial(with_model, step), params, state, donate=1),
        prefill={
            rows: build(
                f"prefill of {rows}",
                functools.partial(with_model, functools.partial(extend, rows=rows, report_width=config.num_steps + 1)),
                params,
                state,
                ints((config.num_seqs,)),
                donate=1,
            )
            for rows in config.prefill_rows
        },
        admit=build(
            "admit",
            admit,
            state,
            scalar,
            ints((config.max_context,)),
            ints((2,)),
            ints((config.max_stops,)),
            jax.ShapeDtypeStruct((4,), jnp.float32),
            jax.ShapeDtypeStruct((), jnp.uint32),
            donate=0,
        ),
        release=build("release", release, state, scalar, donate=0),
    )


def program_names(config: ProgramConfig) -> list[str]:
    """What `compile_programs` will report, in order."""
    return ["round", *(f"prefill of {rows}" for rows in config.prefill_rows), "admit", "release"]
