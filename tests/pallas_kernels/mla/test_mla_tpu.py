"""Latent attention on TPU, interpreted with race detection and NaN in all memory that was not written."""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false, reportCallIssue=false

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import Setup
from tpu_latents import check

import jattn
from pallas_kernels.attention.tpu_config import Config
from pallas_kernels.mla import tpu

_BASE = Setup(name="", num_kv_heads=1, group=3, head_dim=20, v_head_dim=16, dtype="bfloat16", page_size=16)
# four tiles of heads and queries, blocks of two parts
_AHEAD = Config(block_q=8, block_pages=16, heads=1, unroll_heads=False, parts=2)
SETUPS = (
    (dataclasses.replace(_BASE, name="tree", group=4, mask="tree", max_q_len=8, num_tokens=24, max_nodes=11), _AHEAD),
)
_LONG = dict(page_size=128, num_tokens=40)
WIDE = (
    (dataclasses.replace(_BASE, name="decode, several blocks", group=32, max_q_len=1, **_LONG),
     Config(block_q=1, block_pages=2, heads=2, unroll_heads=False, parts=2)),
    (dataclasses.replace(_BASE, name="prefill, tiles in turn", group=48, **_LONG),
     Config(block_q=8, block_pages=2, heads=1, unroll_heads=False, parts=2)),
    (dataclasses.replace(_BASE, name="without parts", group=5, dtype="float32"),
     Config(block_q=8, block_pages=2, heads=1, unroll_heads=False)),
    (dataclasses.replace(_BASE, name="two classes", group=16, max_q_len=24, **_LONG),
     (Config(block_q=1, block_pages=2, parts=2), dataclasses.replace(_AHEAD, block_pages=4))),
    (dataclasses.replace(_BASE, name="sizes chosen", group=16, head_dim=384, v_head_dim=192, dtype="float32"), None),
    (dataclasses.replace(_BASE, name="splits", group=4, num_splits=2, **_LONG), _AHEAD),
    (dataclasses.replace(_BASE, name="two cores", group=4, **_LONG),
     dataclasses.replace(_AHEAD, block_pages=2, cores=2)),
    (dataclasses.replace(_BASE, name="tree over blocks", group=16, mask="tree", max_q_len=8, max_nodes=70, **_LONG),
     dataclasses.replace(_AHEAD, block_pages=2)),
)  # fmt: skip


@pytest.mark.parametrize(("setup", "config"), SETUPS, ids=lambda x: getattr(x, "name", ""))
@hypothesis.settings(max_examples=1, phases=[hypothesis.Phase.generate])
@hypothesis.given(data=st.data())
def test_latent_attention_is_as_right_as_plain_jax(setup, config, data):
    check(setup, config, data)


@pytest.mark.long
@pytest.mark.parametrize(("setup", "config"), SETUPS + WIDE, ids=lambda x: getattr(x, "name", ""))
@hypothesis.settings(max_examples=6, phases=[hypothesis.Phase.generate])
@hypothesis.given(data=st.data())
def test_latent_attention_is_as_right_as_plain_jax_widely(setup, config, data):
    check(setup, config, data)


@pytest.mark.parametrize(("page_size", "kv_dtype"), [pytest.param(3, None, marks=pytest.mark.long), (16, "fp8_e4m3")])
def test_a_layer_on_tpu_writes_gathers_and_attends_as_plain_jax_does(page_size, kv_dtype):
    sizes = dict(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
    spec = jattn.MLASpec(num_q_heads=4, kv_dtype=kv_dtype, **sizes)
    rng = np.random.default_rng(0)
    latent, key = (jnp.asarray(rng.normal(size=(9, n)), jnp.bfloat16) for n in (16, 4))
    q = jnp.asarray(rng.normal(size=(9, 4, 20)), jnp.bfloat16)
    lens, table = np.array([5, 4]), np.array([[4, 1], [3, 0]])
    plan = jattn.make_plan(jattn.ForwardMode.EXTEND, lens, lens, table, page_size=page_size)
    slots, results = plan.write_slots, []
    for platform, more in (("cpu", {}), ("tpu-v6e", dict(interpret=True))):
        choice = jattn.resolve(spec, "native", platform, **more)
        sizes = dict(num_layers=2, num_pages=5, page_size=page_size)
        cache = jattn.MLACache.create(spec, **sizes, layout=choice.kv_layout)
        static = dict(layer=1, spec=spec, choice=choice)
        out, lse, cache = jattn.write_attend(q, latent, key, cache, plan, **static)
        assert cache.dtype == (jnp.float8_e4m3fn if kv_dtype else jnp.bfloat16) and cache.page_size == page_size
        read = dict(latent_dim=16, rope_dim=4, page_offset=5, dtype=jnp.float32, **cache.words)
        results.append((out, lse, *choice.function("gather_latent")(cache.latent, slots, **read)))
    want, got = ([np.asarray(x, np.float64) for x in result] for result in results)
    np.testing.assert_allclose(got[0], want[0], atol=2e-2)
    np.testing.assert_allclose(got[1], want[1], atol=1e-2)
    np.testing.assert_array_equal(got[2], want[2])
    np.testing.assert_array_equal(got[3], want[3])


def test_rows_of_other_widths_are_refused():
    with pytest.raises(ValueError, match="build both alike"):
        tpu.write_latent(jnp.zeros((2, 4, 256)), jnp.zeros((1, 16)), jnp.zeros((1, 4)), jnp.zeros(1, jnp.int32))
