"""How a TPU pool holds a token: windows of heads, bytes of scales, and 8-bit latents."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._common import latent_rows, tpu_rows
from pallas_kernels._common.tpu_rows import LatentRow, Row

ROWS = [Row(kv_heads=6, k_dim=k, v_dim=v) for k, v in ((80, 80), (192, 128), (64, 32), (256, 96))]
ROWS += [LatentRow(kv_heads=6, k_dim=k, v_dim=v) for k, v in ((576, 512), (192, 128), (20, 16))]


@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("side", ["k", "v"])
def test_the_window_of_a_traced_tile_is_that_of_its_heads(row, heads, side):
    for tile in range(6 // heads):
        base, wide = row.window_of_tile(side, jnp.int32(tile), heads)
        assert (int(base), wide) == row.window(side, tile * heads, heads)
        dim = row.k_dim if side == "k" else row.v_dim
        for head in range(tile * heads, (tile + 1) * heads):
            assert base <= row.offset(side, head) and row.offset(side, head) + dim <= base + wide <= row.lanes


@pytest.mark.parametrize(("latent_dim", "rope_dim"), [(512, 64), (192, 192), (16, 4), (160, 16)])
def test_latents_in_8_bits_hold_the_same_numbers_as_plain_rows(latent_dim, rope_dim):
    rng = np.random.default_rng(0)
    latent, key = (jnp.asarray(rng.normal(size=(3, n)), jnp.bfloat16) for n in (latent_dim, rope_dim))
    held = tpu_rows.LatentBytes(latent_dim=latent_dim, rope_dim=rope_dim)
    rows = held.pack(latent, key)
    assert rows.shape == (3, held.lanes) and rows.dtype == jnp.int8 and held.lanes % 128 == 0
    want = latent_rows.unpack(latent_rows.pack(latent, key, jnp.uint8), latent_dim, jnp.float32)
    np.testing.assert_array_equal(held.unpack(rows, jnp.float32), want)


@pytest.mark.parametrize("heads", [1, 8, 17, 70])
def test_scales_come_back_from_their_bytes(heads):
    scales = jnp.asarray(np.random.default_rng(heads).normal(size=(2, 2 * heads)), jnp.float32)
    planes = tpu_rows.to_planes(scales)
    row = Row(kv_heads=heads, k_dim=64, v_dim=64, scales=True)
    assert planes.shape == (2, row.lanes - row.scales_at)
    np.testing.assert_array_equal(tpu_rows.from_planes(planes, 2 * heads, jnp.float32), scales)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_words_of_rows_known_while_compiling_are_those_of_any_rows(dtype):
    rows = jnp.asarray(np.arange(3 * 128).reshape(3, 128) % 120, dtype)
    words = tpu_rows.to_words(rows)
    np.testing.assert_array_equal(jax.jit(lambda: tpu_rows.to_words(rows))(), words)
    np.testing.assert_array_equal(jax.jit(tpu_rows.to_words)(rows), words)
    np.testing.assert_array_equal(jax.jit(lambda: tpu_rows.from_words(words, dtype, 128))(), rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_planes_known_while_compiling_are_read_as_any(dtype):
    planes = tpu_rows.to_planes(jnp.asarray(np.arange(1, 16).reshape(3, 5) / 3, dtype))
    want = tpu_rows.from_planes(planes, 5, dtype)
    np.testing.assert_array_equal(jax.jit(lambda: tpu_rows.from_planes(planes, 5, dtype))(), want)


def test_words_keep_the_bits_of_every_8_bit_float():
    bits = jnp.arange(2 * 128, dtype=jnp.uint8).reshape(2, 128)
    back = jax.jit(lambda x: tpu_rows.from_words(tpu_rows.to_words(x), x.dtype, 128))
    for kind in (jnp.float8_e4m3fn, jnp.float8_e5m2):
        got = back(jax.lax.bitcast_convert_type(bits, kind))
        np.testing.assert_array_equal(jax.lax.bitcast_convert_type(got, jnp.uint8), bits)
