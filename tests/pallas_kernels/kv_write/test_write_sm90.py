"""The Hopper write against plain JAX's, bit for bit: on a GPU (marker `device`), and interpreted here."""
# The interpreter's settings stand where the checker reads a flag.
# pyright: reportArgumentType=false, reportCallIssue=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kv_write import mosaic_gpu_sm90 as sm90
from pallas_kernels.kv_write import mosaic_gpu_sm90_rotate as rotated
from pallas_kernels.kv_write import xla

SHAPES = [
    *((8, 128, 128, "bfloat16"), (3, 64, 64, "bfloat16"), (1, 80, 128, "float16"), (2, 16, 8, "float32")),
    *((8, 128, 128, "bfloat16", "float8_e4m3fn"), (3, 64, 80, "float16", "float8_e5m2")),
    (2, 16, 8, "float32", "float8_e4m3fn"),
]


def draw(heads: int, k_dim: int, v_dim: int, dtype: str, kind: str | None = None, *, tokens: int = 7):
    """Two layers of pages, rows, and slots with -1 and one past the layer's end."""
    rng = np.random.default_rng(0)
    pages, size = 5, 16
    pools = [jnp.full((2 * pages, size, heads, d), *((jnp.nan, dtype) if kind is None else (127, jnp.uint8)))
             for d in (k_dim, v_dim)]  # fmt: skip
    rows = [jnp.asarray(20 * rng.standard_normal((tokens, heads, d)), dtype) for d in (k_dim, v_dim)]
    slots = rng.permutation(pages * size)[:tokens].astype(np.int32)
    slots[1], slots[3] = -1, pages * size
    where = dict(page_offset=pages, num_pages=pages)
    if kind is not None:  # some of the keys go past the largest number
        where |= dict(kv_dtype=kind, k_scale=jnp.float32(0.07), v_scale=jnp.float32(3.1))
    return pools, rows, jnp.asarray(slots), where


def check(shape, interpret=False):
    """Same bits everywhere, in the pages of the other layer too."""
    pools, rows, slots, where = draw(*shape)
    want = xla.write_kv(*pools, *rows, slots, **where)
    got = jax.jit(lambda *x: sm90.write_kv(*x, **where, interpret=interpret))(*pools, *rows, slots)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(one).view(np.uint8), np.asarray(other).view(np.uint8))


@pytest.mark.device
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_go_where_plain_jax_puts_them_on_a_gpu(shape):
    check(shape)


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[6]])
def test_rows_go_where_plain_jax_puts_them_without_a_race(shape):
    check(shape, interpret=plgpu.InterpretGPUParams(detect_races=True))


def test_heads_that_are_no_multiple_of_8_values_are_refused():
    pools, rows, slots, where = draw(1, 4, 4, "bfloat16")
    with pytest.raises(ValueError, match="heads of 4 and 4 values of bfloat16"):
        sm90.write_kv(*pools, *rows, slots, **where)


ROTATED = [  # query heads, then as SHAPES
    (32, 8, 128, 128, "bfloat16"),
    (9, 3, 64, 64, "bfloat16"),
    (2, 1, 80, 128, "float16"),
    (1, 1, 96, 64, "bfloat16"),
    (16, 16, 256, 256, "float16"),
    (8, 2, 128, 64, "bfloat16", "float8_e4m3fn"),
    (3, 3, 64, 80, "float16", "float8_e5m2"),
]


def check_rotated(shape, interpret=False, tokens: int = 7):
    """Values as plain JAX's bit for bit, rotated queries and keys within one rounding, nothing written elsewhere."""
    q_heads, heads, k_dim, v_dim, dtype, *kind = shape
    pools, (k, v), slots, where = draw(heads, k_dim, v_dim, dtype, *kind, tokens=tokens)
    rng = np.random.default_rng(1)
    q = jnp.asarray(rng.standard_normal((tokens, q_heads, k_dim)), dtype)
    rows = jnp.concatenate([x.reshape(tokens, -1) for x in (q, k, v)], axis=1)
    phase = jnp.asarray(rng.uniform(0, 7, (tokens, k_dim // 2)), jnp.float32)
    given = (*pools, rows, jnp.cos(phase), jnp.sin(phase), slots)
    want = xla.rotate_write_kv(*given, **where)
    got = jax.jit(lambda *x: rotated.rotate_write_kv(*x, **where, interpret=interpret))(*given)
    assert [x.dtype for x in got] == [x.dtype for x in want] and [x.shape for x in got] == [x.shape for x in want]
    np.testing.assert_array_equal(np.asarray(got[2]).view(np.uint8), np.asarray(want[2]).view(np.uint8))
    stored = jnp.dtype(kind[0]) if kind else jnp.dtype(dtype)
    for one, other, ulp in ((got[0], want[0], dtype), (got[1], want[1], stored)):
        one, other = (np.asarray(x) if x.dtype != np.uint8 else np.asarray(x).view(stored) for x in (one, other))
        one, other = one.astype(np.float32), other.astype(np.float32)
        np.testing.assert_array_equal(np.isnan(one), np.isnan(other))  # NaN wherever nothing was written
        np.testing.assert_allclose(one, other, rtol=2 * float(jnp.finfo(ulp).eps), atol=1e-4)


@pytest.mark.device
@pytest.mark.parametrize("shape", ROTATED)
@pytest.mark.parametrize("tokens", [7, 80])
def test_rotated_rows_go_where_plain_jax_puts_them_on_a_gpu(shape, tokens):
    check_rotated(shape, tokens=tokens)


@pytest.mark.parametrize("shape", [ROTATED[1], ROTATED[5]])
def test_rotated_rows_go_where_plain_jax_puts_them_without_a_race(shape):
    check_rotated(shape, interpret=plgpu.InterpretGPUParams(detect_races=True))


def test_rows_that_cannot_be_rotated_are_refused():
    pools, (k, v), slots, where = draw(2, 24, 16, "bfloat16")
    rows = jnp.zeros((7, 2 * 24 + 2 * (24 + 16)), jnp.bfloat16)
    phase = jnp.zeros((7, 12), jnp.float32)
    with pytest.raises(ValueError, match="heads of 24 and 16 values of bfloat16: this kernel rotates"):
        rotated.rotate_write_kv(*pools, rows, phase, phase, slots, **where)
    with pytest.raises(ValueError, match="a phase for half the features"):
        rotated.rotate_write_kv(*pools, rows[:, 1:], phase, phase, slots, **where)
    assert not rotated.serves(head_dim=64, v_dim=64, dtype=jnp.float32)
