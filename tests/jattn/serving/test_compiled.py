"""What the compiled programs do with memory, and that serving compiles nothing."""

import re

import jax
import jax.numpy as jnp
import pytest
from engines import engine_of, serve
from flax import nnx
from tiny_model import tiny

from jattn.combinators.ngram import NUM_CLASSES
from jattn.combinators.state import DecodeState
from jattn.sampling import SamplerConfig
from jattn.serving.compilations import counting
from jattn.serving.programs import ProgramConfig, _lowerings


@pytest.mark.parametrize("kv_dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long), "int8", "fp8_e4m3"])
@pytest.mark.parametrize(
    ("program", "draft"),
    [
        ("round", dict(num_steps=0)),
        ("round", dict(num_steps=15)),
        ("round", dict(num_steps=4, topk=3, num_nodes=8)),
        ("prefill of 64", dict(num_steps=15)),
    ],
)
def test_a_program_updates_the_cache_in_place(program, draft, kv_dtype):
    model = tiny(kv_dtype)
    num_pages, page_size, num_seqs = 65536, 16, 2
    graphdef, params = nnx.split((model,))

    def empty():
        cache = model.new_cache(num_pages=num_pages, page_size=page_size)
        return DecodeState.create(cache, num_seqs=num_seqs, max_context=512, max_stops=2, num_classes=NUM_CLASSES)

    state = jax.eval_shape(empty)  # shapes only: the pool is large so that any copy of it stands out
    cache_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.cache))
    config = ProgramConfig(
        num_seqs=num_seqs,
        max_context=512,
        max_stops=2,
        prefill_rows=(64,),
        kind="cpu",
        sampler=SamplerConfig(),
        **draft,
    )
    compiled = _lowerings(graphdef, params, state, config)[program]().compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= cache_bytes  # the cache, and the small arrays around it
    assert memory.alias_size_in_bytes < 1.01 * cache_bytes
    assert memory.temp_size_in_bytes < 0.05 * cache_bytes
    pools = "|".join({_hlo_shape(x) for x in jax.tree.leaves(state.cache) if x.ndim > 1})
    copies = re.findall(rf"= (?:{pools})\{{[^}}]*\}} copy\(.*", compiled.as_text())
    assert copies == []


def _hlo_shape(x) -> str:
    # the pool with its pages and slots apart or flattened, in any element type
    pages, page_size, *rest = x.shape
    tail = "".join(f",{n}" for n in rest)
    return rf"\w+\[(?:{pages},{page_size}|{pages * page_size}){tail}\]"


def test_nothing_compiles_over_fifty_rounds_and_twenty_prompt_lengths(loaded):
    engine = engine_of(loaded, num_slots=2)
    serve(engine, [[504, 3575]], max_new_tokens=2)  # the first dispatch warms up JAX's own small helpers
    with counting() as count:
        for length in range(1, 21):
            serve(engine, [[504 + i for i in range(7 * length)]], max_new_tokens=2)
        serve(engine, [[504, 3575, 282], [1, 2, 3, 4, 5]], max_new_tokens=60)
    assert engine.num_rounds >= 50
    assert count.value == 0


def test_counting_sees_a_compilation():
    with counting() as count:
        jax.jit(lambda x: jnp.sin(x) + 12345.0)(jnp.ones(3)).block_until_ready()
    assert count.value > 0
