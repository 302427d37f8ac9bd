"""Every form of a latent layer over the TPU kernels, interpreted, equals plain JAX."""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false

import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn.combinators.latent_chunks import make_chunks
from jattn.combinators.mla import mla_attend
from jattn.dispatch import AttnForwardMethod as M

SPEC = jattn.MLASpec(num_q_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
LENS, NEW, TABLE, PAGE = np.array([13, 6]), np.array([5, 2]), np.array([[4, 1, 2, 7], [3, 0, 6, 5]]), 4


def layer(method: M, platform: str):
    """Output of a step behind a cached prefix."""
    rng = np.random.default_rng(0)
    shapes = ((19, 32), (19, 8), (4, 16, 32), (4, 32, 16), (7, 4, 16), (7, 4, 8))
    latent, key, w_kc, w_vc, q_nope, q_rope = (jnp.asarray(rng.normal(size=s) * 0.3, jnp.float32) for s in shapes)
    choice = jattn.resolve(SPEC, "native", platform, interpret=True)
    sizes = dict(num_layers=1, num_pages=8, page_size=PAGE)
    cache = jattn.MLACache.create(SPEC, **sizes, dtype=jnp.float32, layout=choice.kv_layout)
    before = jattn.make_plan(jattn.ForwardMode.EXTEND, LENS - NEW, LENS - NEW, TABLE, page_size=PAGE)
    held, new = np.r_[0:8, 13:17], np.r_[8:13, 17:19]
    cache = jattn.write_kv(latent[held], key[held], cache, before, layer=0, choice=choice)
    plan = jattn.make_plan(jattn.ForwardMode.EXTEND, LENS, NEW, TABLE, page_size=PAGE)
    chunks = make_chunks(method, LENS, NEW, TABLE, page_size=PAGE, capacity=64 if method is M.MHA_ONE_SHOT else 8)
    weights = dict(w_kc=w_kc, w_vc=w_vc, method=method, chunks=chunks)
    step = (q_nope, q_rope, latent[new], key[new], cache, plan)
    return choice, np.asarray(mla_attend(*step, layer=0, spec=SPEC, choice=choice, **weights)[0])


@pytest.mark.long
@pytest.mark.parametrize("method", [M.MLA, M.MHA_ONE_SHOT, M.MHA_CHUNKED_KV], ids=lambda m: m.name)
def test_a_form_over_the_tpu_kernels_equals_plain_jax(method):
    _, want = layer(method, "cpu")
    choice, got = layer(method, "tpu-v6e")
    assert all(row.set == "tpu" for row in choice.rows)
    np.testing.assert_allclose(got, want, atol=2e-6)
