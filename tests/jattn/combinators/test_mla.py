"""Latent attention: every form is the same layer, over drawn batches in caches full of poison."""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false, reportCallIssue=false

import functools

import drawn
import drawn_latents
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import LAYER, Setup
from drawn_latents import Layer

from jattn import Tree, make_plan
from jattn.combinators.latent_chunks import make_chunks
from jattn.combinators.mla import mla_attend
from jattn.dispatch import AttnForwardMethod as M

_VERIFY = dict(max_q_len=6, num_tokens=26)
_DECODE = dict(max_q_len=1, num_tokens=6)
MIXED = Layer(shape=Setup(name="mixed"))
LAYERS = (
    MIXED,
    Layer(shape=Setup(name="decode, bf16, page 1", dtype="bfloat16", page_size=1, **_DECODE), num_heads=16),
    Layer(shape=Setup(name="tree, splits, page 3", mask="tree", page_size=3, num_splits=3, **_VERIFY)),
    Layer(shape=Setup(name="wide tree, bf16", mask="tree", dtype="bfloat16", page_size=16, max_nodes=40,
                      max_q_len=24, num_tokens=50)),
    Layer(shape=Setup(name="fp8, bf16, two groups", dtype="bfloat16", page_size=16), kv_dtype="fp8_e4m3", rank=160),
    Layer(shape=Setup(name="bf16 cache, no nope part", page_size=64, **_VERIFY), kv_dtype="bfloat16", nope=0, rope=12),
    Layer(shape=Setup(name="no rope part"), rope=0),
)  # fmt: skip
FEW = hypothesis.settings(max_examples=5, phases=[hypothesis.Phase.generate])
FORMS = (M.MLA, M.MHA_ONE_SHOT, M.MHA_CHUNKED_KV)
_DEFAULT = {(0, M.MLA), (0, M.MHA_ONE_SHOT), (0, M.MHA_CHUNKED_KV), (1, M.MLA), (2, M.MLA), (3, M.MHA_CHUNKED_KV),
            (4, M.MLA), (5, M.MHA_ONE_SHOT)}  # fmt: skip
PAIRS = [
    pytest.param(layer, method, marks=() if (i, method) in _DEFAULT else pytest.mark.long)
    for i, layer in enumerate(LAYERS)
    for method in FORMS
]
BUCKETS = dict(capacity=24, min_rows=24, min_chunks=16)


@pytest.mark.parametrize(("layer", "method"), PAIRS, ids=str)
@FEW
@hypothesis.given(data=st.data())
def test_every_form_is_the_same_layer(layer, method, data):
    ins = drawn_latents.build(layer, data.draw(drawn.batches(layer.shape)))
    out, cache = run(layer, method, ins, drawn_latents.cache(layer, ins, held=ins.seq_lens - ins.q_lens))
    want = drawn_latents.answer(layer, ins, absorbed=method is M.MLA, fresh=method is M.MHA_CHUNKED_KV)
    drawn_latents.assert_within(want, out, ins)
    stored, wanted = (np.asarray(x.latent).view(np.uint8) for x in (cache, drawn_latents.cache(layer, ins)))
    np.testing.assert_array_equal(stored, wanted)


def run(layer, method, ins, cache, **buckets):
    one = dict(capacity=1024, min_rows=1024) if method is M.MHA_ONE_SHOT else BUCKETS
    chunks = make_chunks(
        method, ins.seq_lens, ins.q_lens, ins.page_table, page_size=layer.shape.page_size, **(one | buckets)
    )
    return step(layer, method)(*ins.arrays, *plan_arrays(ins), chunks, cache)


def plan_arrays(ins):
    tree = None if ins.tree is None else {name: jnp.asarray(x) for name, x in ins.tree.items()}
    return *(jnp.asarray(x) for x in (ins.seq_lens, ins.q_lens, ins.page_table)), tree


@functools.cache
def step(layer, method):
    setup = layer.shape
    sizes = dict(page_size=setup.page_size, num_tokens=setup.num_tokens, max_q_len=setup.max_q_len)

    @jax.jit
    def run(q_nope, q_rope, latent, k_rope, w_kc, w_vc, seq_lens, q_lens, page_table, tree, chunks, cache):
        if tree is not None:
            tree = Tree(**tree) if setup.max_nodes is not None else tree["bits"]
        plan = make_plan(setup.mode, seq_lens, q_lens, page_table, tree=tree, **sizes)
        static = dict(layer=LAYER, spec=layer.spec, choice=layer.choice, method=method)
        return mla_attend(q_nope, q_rope, latent, k_rope, cache, plan, w_kc=w_kc, w_vc=w_vc, chunks=chunks, **static)

    return run
