"""The TPU half of `aot_check.py`: what is compiled for which generations, with its vector memory."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from tpu_target import GENERATIONS, Compiler, Generation

from pallas_kernels.merge_states import tpu as merge_states


@dataclasses.dataclass(frozen=True)
class Merge:
    """A call of the merge of states."""

    splits: int = 4
    rows: int = 512
    v_dim: int = 128
    dtype: str = "float32"

    def build(self, generation: Generation) -> tuple[Callable, dict]:
        """The call, and the shapes of its arrays."""
        arrays = dict(
            out=jax.ShapeDtypeStruct((self.splits, self.rows, self.v_dim), jnp.dtype(self.dtype)),
            lse=jax.ShapeDtypeStruct((self.splits, self.rows), jnp.float32),
        )
        return lambda arrays: merge_states.merge_states(**arrays), arrays


KERNELS: dict[str, Callable[[], list]] = {
    "tpu/merge_states": lambda: [
        *(Merge(), Merge(v_dim=64), Merge(v_dim=256), Merge(2, 64 * 128, 512), Merge(16, 24, 80), Merge(33, 130, 64)),
        *(Merge(2, 8192, 128, "bfloat16"), Merge(2, 5, 200, "bfloat16"), Merge(128, 64 * 32, 128)),
    ],
}


class Target:
    """A TPU that is not here."""

    def __init__(self, generation: Generation):
        self.name, self._generation, self._compiler = generation.name, generation, Compiler(generation)

    def compile(self, case) -> tuple[str, bool]:
        """What a compiled call takes beside its arrays. A TPU kernel's spills are memory, not a fault."""
        with self._compiler.described():
            function, arrays = case.build(self._generation)
        compiled = self._compiler.compile(function, arrays)
        memory = compiled.memory_analysis()
        return f"{memory.temp_size_in_bytes} bytes of HBM, {memory.generated_code_size_in_bytes} of code", False


def targets(names: str) -> list[Target]:
    """What is compiled for. Args: names of generations, comma between them; "" for all."""
    return [Target(GENERATIONS[name]) for name in (names.split(",") if names else GENERATIONS)]
