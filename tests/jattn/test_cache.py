"""Caches: one array for all layers, dtype and scales as the spec names them, sizes checked before any allocation."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import AttnSpec, MLACache, MLASpec, PagedKV
from jattn.spec import KV_DTYPES

SIZES: dict[str, Any] = dict(num_layers=3, num_pages=5, page_size=4)


def spec(**fields):
    return AttnSpec(num_q_heads=4, num_kv_heads=2, head_dim=8, v_head_dim=6, **fields)


LATENT = MLASpec(num_q_heads=4, kv_lora_rank=32, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)


def test_all_layers_share_one_array_of_pages():
    cache = PagedKV.create(spec(), **SIZES)
    assert cache.k.shape == (15, 4, 2, 8)
    assert cache.v is not None and cache.v.shape == (15, 4, 2, 6)
    assert (cache.num_layers, cache.num_pages, cache.page_size) == (3, 5, 4)
    assert cache.k_scale is None and cache.v_scale is None and not cache.token_scales
    assert cache.nbytes == 15 * 4 * 2 * (8 + 6) * 4


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_rows_are_stored_in_the_dtype_that_the_spec_names(kv_dtype):
    cache = PagedKV.create(spec(kv_dtype=kv_dtype), **SIZES, dtype=jnp.float16)  # the spec's name wins
    assert cache.dtype == KV_DTYPES[kv_dtype]
    held = jnp.uint8 if kv_dtype.startswith("fp8") else KV_DTYPES[kv_dtype]
    assert cache.v is not None and cache.k.dtype == cache.v.dtype == held


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_kernel_may_want_8_bit_floats_as_they_are(kv_dtype):
    cache = PagedKV.create(spec(kv_dtype=kv_dtype), **SIZES, layout="token_major")
    assert cache.v is not None and cache.dtype == cache.k.dtype == cache.v.dtype == KV_DTYPES[kv_dtype]


@pytest.mark.parametrize(
    ("kv_dtype", "layout", "rule"),
    [
        ("fp8_e4m3", "token_major_e5m2_bits", "want 'token_major', 'rows', or None for 'token_major_e4m3_bits'"),
        ("int8", "heads_first", "want 'token_major', 'rows', or None for 'token_major'"),
    ],
)
def test_a_layout_that_the_dtype_does_not_have_is_refused(kv_dtype, layout, rule):
    with pytest.raises(ValueError, match=rf"layout={layout!r} for \w+: {rule}"):
        PagedKV.create(spec(kv_dtype=kv_dtype), **SIZES, layout=layout)


@pytest.mark.parametrize(("dtype", "stored"), [(None, "float32"), (jnp.bfloat16, "bfloat16"), ("float16", "float16")])
def test_the_model_dtype_is_used_where_the_spec_names_none(dtype, stored):
    assert PagedKV.create(spec(), **SIZES, dtype=dtype).k.dtype == stored


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int32, jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_a_dtype_that_needs_scales_is_refused_where_there_are_none(dtype):
    with pytest.raises(ValueError, match=rf"dtype={jnp.dtype(dtype)}: .*name it as AttnSpec.kv_dtype"):
        PagedKV.create(spec(), **SIZES, dtype=dtype)


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2", "int8"])
def test_scales_by_tensor_are_one_a_layer(kv_dtype):
    cache = PagedKV.create(spec(kv_dtype=kv_dtype, kv_scales="tensor"), **SIZES, k_scale=0.5, v_scale=0.25)
    np.testing.assert_array_equal(cache.k_scale, np.full(3, 0.5, np.float32))
    np.testing.assert_array_equal(cache.v_scale, np.full(3, 0.25, np.float32))
    assert not cache.token_scales


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2", "int8"])
def test_scales_by_token_are_one_a_row_and_kv_head(kv_dtype):
    cache = PagedKV.create(spec(kv_dtype=kv_dtype, kv_scales="token"), **SIZES)
    for scale in (cache.k_scale, cache.v_scale):
        assert scale is not None and (scale.shape, scale.dtype) == ((15, 4, 2), jnp.float32)
    assert cache.token_scales
    assert cache.nbytes == 15 * 4 * 2 * (8 + 6 + 2 * 4)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(page_size=0), "page_size=0: want 1 to 256"),
        (dict(page_size=257), "page_size=257: want 1 to 256"),
        (dict(num_pages=0), "num_layers=3, num_pages=0: want at least 1 of each"),
        (dict(num_layers=0), "num_layers=0, num_pages=5: want at least 1 of each"),
        (dict(num_layers=32, num_pages=2**18, page_size=256), "2147483648 rows, past the int32 index limit 2147483647"),
    ],
)
@pytest.mark.parametrize(
    "create", [lambda **kw: PagedKV.create(spec(), **kw), lambda **kw: MLACache.create(LATENT, **kw)]
)
def test_sizes_are_checked_before_anything_is_allocated(create, sizes, message):
    with pytest.raises(ValueError, match=message):
        create(**{**SIZES, **sizes})


def test_the_largest_pool_that_int32_can_index_is_allowed():
    one = AttnSpec(num_q_heads=1, num_kv_heads=1, head_dim=1)
    shapes = jax.eval_shape(lambda: PagedKV.create(one, num_layers=1, num_pages=2**31 - 1, page_size=1))
    assert shapes.k.shape == (2**31 - 1, 1, 1, 1)


@pytest.mark.parametrize("page_size", [1, 3, 256])
def test_any_page_size_from_1_to_256_is_allowed(page_size):
    assert PagedKV.create(spec(), num_layers=1, num_pages=2, page_size=page_size).page_size == page_size


def test_a_latent_row_holds_the_latent_and_the_rotated_key():
    cache = MLACache.create(LATENT, **SIZES)
    assert cache.latent.shape == (15, 4, 36)
    assert (cache.latent.dtype, cache.num_layers, cache.layout) == (jnp.bfloat16, 3, "latent_rope")


@pytest.mark.parametrize("kv_dtype", [None, "fp8_e4m3"])
def test_accepted_rows_move_in_every_layer(kv_dtype):
    spec = dataclasses.replace(LATENT, kv_dtype=kv_dtype)
    cache = MLACache.create(spec, num_layers=2, num_pages=3, page_size=4)
    pool = np.random.default_rng(0).integers(0, 100, cache.latent.shape).astype(cache.latent.dtype)
    cache = dataclasses.replace(cache, latent=jnp.asarray(pool))
    want = pool.reshape(2, 12, -1).copy()
    want[:, 2], want[:, 3] = want[:, 5].copy(), want[:, 9].copy()
    moved = jax.jit(MLACache.move, donate_argnums=0)(cache, jnp.array([5, -1, 9, 4]), jnp.array([2, 1, 3, -1]))
    np.testing.assert_array_equal(np.asarray(moved.latent), want.reshape(pool.shape))
    assert (moved.layout, moved.num_pages, moved.page_size) == (cache.layout, 3, 4)


@pytest.mark.parametrize(
    ("kv_dtype", "rank", "layout", "dtype", "row"),
    [
        (None, 512, "latent_rope", jnp.bfloat16, 576),
        ("float32", 512, "latent_rope", jnp.float32, 576),
        ("fp8_e4m3", 512, "latent_e4m3_rope_bf16", jnp.float8_e4m3fn, 656),
        ("fp8_e4m3", 130, "latent_e4m3_rope_bf16", jnp.float8_e4m3fn, 130 + 8 + 128),
    ],
)
def test_a_cache_says_what_it_holds(kv_dtype, rank, layout, dtype, row):
    spec = dataclasses.replace(LATENT, qk_rope_head_dim=64, kv_dtype=kv_dtype, kv_lora_rank=rank)
    cache = MLACache.create(spec, num_layers=2, num_pages=3, page_size=4)
    assert (cache.layout, cache.dtype, cache.latent.shape) == (layout, dtype, (6, 4, row))
    assert cache.nbytes == 24 * row * cache.latent.dtype.itemsize


@pytest.mark.parametrize("kv_dtype", ["fp8_e5m2", "int8"])
def test_other_narrow_latents_are_refused(kv_dtype):
    with pytest.raises(ValueError, match=f"MLASpec.kv_dtype='{kv_dtype}': latents are stored as fp8_e4m3 or as a 16-"):
        MLACache.create(dataclasses.replace(LATENT, kv_dtype=kv_dtype), num_layers=1, num_pages=1, page_size=1)
    with pytest.raises(ValueError, match="dtype=int8: rows this narrow are stored with scales; name it as MLASpec.kv_"):
        MLACache.create(LATENT, num_layers=1, num_pages=1, page_size=1, dtype=jnp.int8)


def test_a_cache_goes_through_jit_and_keeps_what_is_static():
    cache = PagedKV.create(spec(kv_dtype="int8"), **SIZES)
    out = jax.jit(lambda cache: cache)(cache)
    assert (out.num_layers, out.layout, out.page_size) == (3, "token_major", 4)
    assert jax.tree.structure(out) == jax.tree.structure(cache)
    assert len(jax.tree.leaves(cache)) == 4
