"""What a layer compiled for a TPU does with its pool: no copy of it, whatever the heads, widths and page size.

Needs libtpu (extra `aot-tpu`), and no TPU.
"""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false, reportMissingImports=false, reportOptionalMemberAccess=false

import functools
import math
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jattn
from jattn import AttnSpec, ForwardMode, PagedKV, make_plan

pytest.importorskip("libtpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
LAYERS, SLOTS, SEQS = 2, 1 << 19, 4
_OP = re.compile(r"^\s*(?:ROOT )?\S+ = \w+\[([\d,]+)\]\S* ([\w-]+)\(", re.MULTILINE)
ROWS = {"decode": (1,), "prefill": (256,)}
IN_PLACE = {"parameter", "bitcast", "get-tuple-element", "scatter", "fusion", "custom-call", "while", "tuple"}


def layer(spec: AttnSpec, page_size: int, mode, q_len: int):
    """A step that writes and attends, traced layer, and the shapes of its arguments."""
    choice = jattn.resolve(spec, "native", "tpu-v6e")
    pages = SLOTS // page_size
    tokens = SEQS * q_len

    def step(index, cache, q, k, v, seq_lens, table):
        q_lens = jnp.full(SEQS, q_len, jnp.int32)
        sizes = dict(page_size=page_size, num_tokens=tokens, max_q_len=q_len)
        plan = make_plan(mode, seq_lens, q_lens, table, **sizes)
        return jattn.write_attend(q, k, v, cache, plan, layer=index, spec=spec, choice=choice)

    make = lambda: PagedKV.create(  # noqa: E731
        spec, num_layers=LAYERS, num_pages=pages, page_size=page_size, dtype=jnp.bfloat16, layout=choice.kv_layout
    )
    rows = [jax.ShapeDtypeStruct((tokens, heads, spec.head_dim), jnp.bfloat16) for heads in (spec.num_q_heads,)]
    rows += [jax.ShapeDtypeStruct((tokens, spec.num_kv_heads, d), jnp.bfloat16) for d in (spec.head_dim,) * 2]
    i32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    return step, (i32(), jax.eval_shape(make), *rows, i32(SEQS), i32(SEQS, 4096 // page_size))


@pytest.mark.long
@pytest.mark.parametrize("mode", ["decode", "prefill"])  # written by the kernel, and before it
@pytest.mark.parametrize("page_size", [1, 3, 16, 256])
@pytest.mark.parametrize(("kv_heads", "dim"), [(1, 64), (3, 80), (2, 96), (8, 128), (1, 256)])
def test_no_op_has_the_size_of_the_pool_but_those_in_place(kv_heads, dim, page_size, mode):
    from tpu_target import GENERATIONS, Compiler

    spec = AttnSpec(num_q_heads=4 * kv_heads, num_kv_heads=kv_heads, head_dim=dim)
    step, args = layer(spec, page_size, ForwardMode.DECODE if mode == "decode" else ForwardMode.EXTEND, *ROWS[mode])
    compiled = Compiler(GENERATIONS["v6e"]).compile(step, args, donate=(1,))
    cache = args[1]
    sizes = {x.size for x in jax.tree.leaves(cache)}
    ops = {op for shape, op in _OP.findall(compiled.as_text()) if math.prod(map(int, shape.split(","))) in sizes}
    assert ops <= (IN_PLACE - {"scatter", "fusion"} if mode == "decode" else IN_PLACE)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= cache.nbytes
    assert memory.temp_size_in_bytes < 0.05 * cache.nbytes


@pytest.mark.long
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize(("kv_heads", "dim"), [(1, 64), (8, 128)])  # words of one tile row a token, and of several
def test_rows_move_in_place(kv_heads, dim, page_size):
    from tpu_target import GENERATIONS, Compiler

    spec = AttnSpec(num_q_heads=4 * kv_heads, num_kv_heads=kv_heads, head_dim=dim)
    sizes = dict(num_layers=LAYERS, num_pages=SLOTS // page_size, page_size=page_size, dtype=jnp.bfloat16)
    cache = jax.eval_shape(functools.partial(PagedKV.create, spec, layout="rows", **sizes))
    slots = jax.ShapeDtypeStruct((64,), jnp.int32)
    compiled = Compiler(GENERATIONS["v6e"]).compile(PagedKV.move, (cache, slots, slots), donate=(0,))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= cache.nbytes
    assert memory.temp_size_in_bytes < 0.05 * cache.nbytes
