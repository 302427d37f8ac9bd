"""What the compiled door does with the pool: reads and writes the rows that it must, whatever they are stored as."""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

import math
import re

import jax
import jax.numpy as jnp
import pytest

import jattn
from jattn import AttnSpec, ForwardMode, PagedKV, make_plan

PAGES, PAGE, LAYERS = 32768, 16, 2  # only shapes: the pool is large so that a copy stands out
STORED = (None, "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2", "int8")
IN_PLACE = {"parameter", "bitcast", "get-tuple-element"}  # another name for the same bytes
WRITES = IN_PLACE | {"dynamic-update-slice", "fusion"}  # a fusion's own ops are in the text too
_OP = re.compile(r"^\s*(?:ROOT )?\S+ = (\w+)\[([\d,]+)\]\S* ([\w-]+)\(", re.MULTILINE)


def steps(kv_dtype, kv_scales, mode, num_tokens):
    """Shapes of a step, and functions that attend and that write first."""
    spec = AttnSpec(num_q_heads=6, num_kv_heads=2, head_dim=16, kv_dtype=kv_dtype, kv_scales=kv_scales)
    choice = jattn.resolve(spec, "native", "cpu")

    def make():
        cache = PagedKV.create(spec, num_layers=LAYERS, num_pages=PAGES, page_size=PAGE)
        sizes = dict(page_size=PAGE, num_tokens=num_tokens, max_q_len=num_tokens if mode.is_mixed() else 1)
        plan = make_plan(mode, jnp.zeros(2, jnp.int32), jnp.zeros(2, jnp.int32), jnp.zeros((2, 8), jnp.int32), **sizes)
        q = jnp.zeros((num_tokens, 6, 16))
        return cache, q, q[:, :2], plan

    def read(cache, q, k, plan):
        return jattn.attend(q, cache, plan, layer=1, spec=spec, choice=choice)

    def write(cache, q, k, plan):
        return jattn.write_attend(q, k, k, cache, plan, layer=1, spec=spec, choice=choice)

    return jax.eval_shape(make), read, write


def compile_(function, args, **options):
    """The program, its buffers assigned, with no time spent on machine code."""
    return jax.jit(function, **options).lower(*args).compile({"xla_backend_optimization_level": 0})


def pool_sized(compiled, cache) -> set[tuple[str, str]]:
    """(dtype, op) of all that has as many elements as a pool of the cache."""
    sizes = {x.size for x in jax.tree.leaves(cache) if x.ndim > 1}  # not the scales of layers
    found = _OP.findall(compiled.as_text())
    return {(dtype, op) for dtype, shape, op in found if math.prod(map(int, shape.split(","))) in sizes}


@pytest.mark.parametrize("kv_dtype", [None, "fp8_e4m3", "fp8_e5m2"])
def test_reading_has_no_op_of_the_size_of_the_pool(kv_dtype):
    args, read, _ = steps(kv_dtype, None, ForwardMode.DECODE, 2)
    compiled = compile_(read, args)
    assert {op for _, op in pool_sized(compiled, args[0])} <= IN_PLACE
    assert compiled.memory_analysis().temp_size_in_bytes < 0.05 * args[0].nbytes


@pytest.mark.parametrize(
    ("kv_dtype", "kv_scales", "num_tokens"),
    [*((name, None, 2) for name in STORED), ("fp8_e4m3", "token", 2), ("int8", "tensor", 2), ("fp8_e4m3", None, 40)],
)
def test_writing_then_reading_has_none_but_the_update_in_place(kv_dtype, kv_scales, num_tokens):
    mode = ForwardMode.DECODE if num_tokens == 2 else ForwardMode.MIXED
    args, _, write = steps(kv_dtype, kv_scales, mode, num_tokens)
    compiled = compile_(write, args, donate_argnums=0)
    found = pool_sized(compiled, args[0])
    assert {op for _, op in found} <= WRITES
    assert {dtype for dtype, _ in found} <= {"f32", "bf16", "f16", "u8", "s8"}
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == args[0].nbytes
    assert memory.temp_size_in_bytes < 0.05 * args[0].nbytes


def test_the_text_shows_a_conversion_of_the_pool():
    spec = AttnSpec(num_q_heads=6, num_kv_heads=2, head_dim=16, kv_dtype="fp8_e4m3")
    cache = PagedKV.create(spec, num_layers=1, num_pages=64, page_size=16, layout="token_major")
    compiled = compile_(lambda cache: cache.k[3], (cache,))
    assert ("f16", "convert") in pool_sized(compiled, cache)
