"""Latent attention: every form is the same layer, over drawn batches in caches full of poison."""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false

import dataclasses
import functools

import drawn
import drawn_latents
import float64
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import LAYER, Setup
from drawn_latents import Layer
from jax.sharding import PartitionSpec as P

from jattn import Tree, attend, make_plan
from jattn.combinators.latent_chunks import CHUNKED, ONE_SHOT, make_chunks
from jattn.combinators.mla import mla_attend
from jattn.dispatch import AttnForwardMethod as M
from jattn.serving.compilations import counting

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
MANY = hypothesis.settings(max_examples=60)
FORMS = (M.MLA, M.MHA_ONE_SHOT, M.MHA_CHUNKED_KV)
EVERY_FORM = pytest.mark.parametrize("method", FORMS, ids=str)
DEFAULT = [(MIXED, form) for form in FORMS] + [(LAYERS[i], M.MLA) for i in (2, 4)]
QUICK = {"xla_backend_optimization_level": 0}  # the same operations, compiled faster
BUCKETS = dict(capacity=24, min_rows=24, min_chunks=16)


def check(layer, method, data):
    ins = drawn_latents.build(layer, data.draw(drawn.batches(layer.shape)))
    out, cache = run(layer, method, ins, before(layer, ins))
    assert_right(layer, method, ins, out)
    stored, wanted = (np.asarray(x.latent).view(np.uint8) for x in (cache, drawn_latents.cache(layer, ins)))
    np.testing.assert_array_equal(stored, wanted)  # every byte, poison included


@pytest.mark.parametrize(("layer", "method"), DEFAULT, ids=str)
@FEW
@hypothesis.given(data=st.data())
def test_every_form_is_the_same_layer(layer, method, data):
    check(layer, method, data)


@pytest.mark.long
@EVERY_FORM
@pytest.mark.parametrize("layer", LAYERS, ids=str)
@MANY
@hypothesis.given(data=st.data())
def test_every_form_is_the_same_layer_over_many_batches(layer, method, data):
    check(layer, method, data)


# prefix and fresh tokens of four requests; the chunk length is the capacity over 4
CUTS = {
    "shorter than, equal to, one past and a multiple of the chunk": ([3, 4, 5, 8], [1, 2, 3, 4], 16),
    "no prefix among others, and an empty row": ([0, 12, 0, 5], [6, 1, 0, 2], 12),
    "no prefix anywhere": ([0, 0, 0, 0], [5, 1, 0, 7], 24),
    "one token a chunk": ([2, 0, 5, 3], [1, 1, 1, 9], 4),
    "a capacity that divides nothing": ([11, 7, 0, 13], [2, 3, 5, 1], 23),
    "one chunk": ([6, 1, 0, 3], [4, 4, 4, 4], 24),
}


@EVERY_FORM
@pytest.mark.parametrize("cut", CUTS)
def test_prefixes_however_they_are_cut(cut, method):
    prefixes, fresh, capacity = CUTS[cut]
    lens = [p + n for p, n in zip(prefixes, fresh, strict=True)]
    ins = drawn_latents.build(MIXED, drawn.Batch(seq_lens=lens, q_lens=fresh, parents=(), seed=len(cut), sharpness=2.0))
    out, _ = run(MIXED, method, ins, before(MIXED, ins), **(dict(capacity=capacity) if method in CHUNKED else {}))
    assert_right(MIXED, method, ins, out)


def test_one_chunk_equals_many():
    prefixes, fresh = [6, 5, 0, 2], [2, 1, 3, 9]
    lens = [p + n for p, n in zip(prefixes, fresh, strict=True)]
    ins = drawn_latents.build(MIXED, drawn.Batch(seq_lens=lens, q_lens=fresh, parents=(), seed=1, sharpness=2.0))
    answer = drawn_latents.answer(MIXED, ins, absorbed=False, fresh=True)
    counts = set()
    for capacity in (4, 8, 12, 16, 24):
        counts.add(int(chunks_of(MIXED, M.MHA_CHUNKED_KV, ins, capacity=capacity).num_chunks))
        out, _ = run(MIXED, M.MHA_CHUNKED_KV, ins, before(MIXED, ins), capacity=capacity)
        drawn_latents.assert_within(answer, out, ins)
    assert counts == {6, 3, 2, 1}


@EVERY_FORM
def test_permuted_pages_give_the_same_bits(method):
    ins = drawn_latents.build(MIXED, drawn.Batch(seq_lens=(9, 28, 1, 13), q_lens=(3, 20, 1, 6), parents=(), seed=4,
                                                 sharpness=1.0))  # fmt: skip
    table = drawn.table(np.random.default_rng(7), MIXED.shape, ins.seq_lens)
    moved = dataclasses.replace(ins, page_table=table)
    outs = [np.asarray(run(MIXED, method, x, before(MIXED, x))[0]) for x in (ins, moved)]
    np.testing.assert_array_equal(*outs)


@EVERY_FORM
def test_nothing_compiles_for_other_lengths(method):
    batches = [([5, 9, 0, 28], [5, 2, 0, 1]), ([28, 1, 13, 6], [1, 1, 7, 0]), ([2, 2, 2, 2], [2, 2, 2, 2])]
    drawn_batches = [drawn.Batch(seq_lens=s, q_lens=q, parents=(), seed=0, sharpness=1.0) for s, q in batches]
    steps = [drawn_latents.build(MIXED, batch) for batch in drawn_batches]
    caches = [before(MIXED, ins) for ins in steps]
    run(MIXED, method, steps[0], caches[0])
    with counting() as count:
        for ins, cache in zip(steps[1:], caches[1:], strict=True):
            run(MIXED, method, ins, cache)
    assert count.value == 0


def before(layer, ins):
    """The cache before the step: its prefixes, poison elsewhere."""
    return drawn_latents.cache(layer, ins, held=ins.seq_lens - ins.q_lens)


def assert_right(layer, method, ins, out):
    want = drawn_latents.answer(layer, ins, absorbed=method is M.MLA, fresh=method in CHUNKED)
    drawn_latents.assert_within(want, out, ins)


def chunks_of(layer, method, ins, **buckets):
    most = 1 << (layer.shape.num_seqs * layer.shape.max_len - 1).bit_length()
    asked = (dict(capacity=most, min_rows=most, min_chunks=1) if method in ONE_SHOT else BUCKETS) | buckets
    return make_chunks(method, ins.seq_lens, ins.q_lens, ins.page_table, page_size=layer.shape.page_size, **asked)


def run(layer, method, ins, cache, **buckets):
    """out and cache of a step."""
    return step(layer, method)(*ins.arrays, *plan_arrays(ins), chunks_of(layer, method, ins, **buckets), cache)


def plan_arrays(ins):
    tree = None if ins.tree is None else {name: jnp.asarray(x) for name, x in ins.tree.items()}
    return *(jnp.asarray(x) for x in (ins.seq_lens, ins.q_lens, ins.page_table)), tree


@functools.cache
def step(layer, method):
    return jax.jit(stepped(layer, method), compiler_options=QUICK)


def stepped(layer, method):
    setup = layer.shape
    sizes = dict(page_size=setup.page_size, num_tokens=setup.num_tokens, max_q_len=setup.max_q_len)

    def run(q_nope, q_rope, latent, k_rope, w_kc, w_vc, seq_lens, q_lens, page_table, tree, chunks, cache):
        if tree is not None:
            tree = Tree(**tree) if setup.max_nodes is not None else tree["bits"]
        plan = make_plan(setup.mode, seq_lens, q_lens, page_table, tree=tree, **sizes)
        static = dict(layer=LAYER, spec=layer.spec, choice=layer.choice, method=method)
        return mla_attend(q_nope, q_rope, latent, k_rope, cache, plan, w_kc=w_kc, w_vc=w_vc, chunks=chunks, **static)

    return run


@pytest.mark.long
@EVERY_FORM
def test_shards_of_heads_equal_one_device(method):
    """Heads over devices, the latent cache on each."""
    layer = dataclasses.replace(MIXED, num_heads=4)
    ins = drawn_latents.build(layer, drawn.Batch(seq_lens=(9, 28, 1, 13), q_lens=(3, 20, 1, 6), parents=(), seed=4,
                                                 sharpness=1.0))  # fmt: skip
    local = dataclasses.replace(layer, num_heads=2)
    mesh = jax.make_mesh((2,), ("heads",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    rows, first, whole = P(None, "heads"), P("heads"), P()
    specs = (rows, rows, whole, whole, first, first, whole, whole, whole, whole, whole, whole)
    run = jax.shard_map(stepped(local, method), mesh=mesh, in_specs=specs, out_specs=(rows, whole))
    args = (*ins.arrays, *plan_arrays(ins), chunks_of(layer, method, ins), before(layer, ins))
    out, cache = jax.jit(run)(*args)
    assert_right(layer, method, ins, out)
    np.testing.assert_array_equal(cache.latent, drawn_latents.cache(layer, ins).latent)


@pytest.mark.long
@pytest.mark.parametrize("mask", ["causal", "full"])
@FEW
@hypothesis.given(data=st.data())
def test_the_absorbed_door_gives_the_lse_of_its_latents(mask, data):
    layer = Layer(shape=Setup(name=mask, mask=mask))
    ins = drawn_latents.build(layer, data.draw(drawn.batches(layer.shape)))
    q = np.concatenate([np.einsum("thn,hnr->thr", ins.q_nope, ins.w_kc), ins.q_rope], axis=-1)
    sizes = dict(page_size=layer.shape.page_size, num_tokens=layer.shape.num_tokens, max_q_len=layer.shape.max_q_len)
    plan = make_plan(layer.shape.mode, *plan_arrays(ins)[:2], jnp.asarray(ins.page_table), **sizes)
    static = dict(layer=LAYER, spec=layer.spec, choice=layer.choice, mask=mask)
    out, lse = (np.asarray(x) for x in attend(jnp.asarray(q), drawn_latents.cache(layer, ins), plan, **static))
    for rows, stored, seen in zip(ins.rows, ins.stored, drawn_latents.seen(layer, ins), strict=True):
        k = stored[:, None]
        want = float64.attend(q[rows], k, k[..., : layer.rank], seen, sm_scale=layer.spec.sm_scale)
        for got, value in zip((out[rows], lse[rows]), want, strict=True):
            np.testing.assert_allclose(got, value, rtol=2e-5, atol=2e-5)
    assert (lse[ins.q_lens.sum() :] == -np.inf).all() and (out[ins.q_lens.sum() :] == 0).all()
