"""The door's step that rotates and writes at once gives what rotating, then writing gives."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import AttnSpec, ForwardMode, PagedKV, make_plan
from jattn.models.layers import split_heads
from jattn.models.rope import cos_sin, inv_freq, rotate

SPEC = AttnSpec(num_q_heads=6, num_kv_heads=2, head_dim=32, v_head_dim=16)


def step(spec: AttnSpec, prefer, dtype="bfloat16"):
    """Queries rotated and the cache written, by `rotate_write` and by the two steps apart."""
    choice = jattn.resolve(spec, "native", "cuda-sm90", prefer=prefer, interpret=True)
    cache = PagedKV.create(spec, num_layers=2, num_pages=6, page_size=4, dtype=jnp.dtype(dtype))
    plan = make_plan(ForwardMode.EXTEND, np.array([5, 3]), np.array([4, 2]), np.array([[3, 1], [5, 0]]), page_size=4)
    width = spec.num_q_heads * 32 + spec.num_kv_heads * (32 + 16)
    rows = jax.random.normal(jax.random.key(0), (6, width), dtype)
    phases = cos_sin(plan.positions, inv_freq(32, 1e4))
    call = functools.partial(
        jattn.rotate_write, rows, *phases, cache, plan, layer=jnp.int32(1), spec=spec, choice=choice
    )
    q, k, v = split_heads(rows, spec)
    written = jattn.write_kv(rotate(k, *phases), v, cache, plan, layer=jnp.int32(1), choice=choice)
    return call, rotate(q, *phases), written


@pytest.mark.parametrize("kv_dtype", [None, "fp8_e4m3"])
def test_rotating_and_writing_at_once_is_rotating_then_writing(kv_dtype):
    call, q, written = step(dataclasses.replace(SPEC, kv_dtype=kv_dtype), ())
    got = call()
    assert got is not None
    np.testing.assert_array_equal(got[0], q)
    for one, other in zip(jax.tree.leaves(got[1]), jax.tree.leaves(written), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("prefer", "dtype"), [(("xla",), "bfloat16"), ((), "float32")])
def test_a_set_or_dtype_without_such_a_kernel_says_so(prefer, dtype):
    call, *_ = step(SPEC, prefer, dtype)
    assert call() is None


def test_rows_or_phases_of_another_width_are_refused():
    call, *_ = step(SPEC, ())
    rows, cos, sin, *rest = call.args
    with pytest.raises(ValueError, match=r"rows.shape=\(6, 287\): want \(6, 288\)"):
        jattn.rotate_write(rows[:, 1:], cos, sin, *rest, **call.keywords)
    with pytest.raises(ValueError, match=r"sin.shape=\(6, 15\): want \(6, 16\)"):
        jattn.rotate_write(rows, cos, sin[:, 1:], *rest, **call.keywords)
