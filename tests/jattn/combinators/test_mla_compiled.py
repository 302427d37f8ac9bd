"""What a compiled MLA layer does with its pool, and what it refuses while it is traced."""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import AttnSpec, ForwardMode, MLACache, MLASpec, NoBackendError, PagedKV, RaggedKV, make_plan
from jattn.combinators.latent_chunks import make_chunks
from jattn.combinators.mla import FORMS, mla_attend
from jattn.dispatch import METHODS
from jattn.dispatch import AttnForwardMethod as M
from jattn.modes import ForwardMode as Mode

WIDTHS = dict(num_q_heads=4, kv_lora_rank=32, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
SPEC = MLASpec(**WIDTHS)
DEEPSEEK = MLASpec(num_q_heads=16, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
PAGES, PAGE, LAYERS, TOKENS = 65536, 16, 2, 24  # only shapes: the pool is large so that a copy stands out
IN_PLACE = {"parameter", "bitcast", "get-tuple-element"}  # another name for the same bytes
WRITES = IN_PLACE | {"dynamic-update-slice", "fusion"}  # a fusion's own ops are in the text too
_OP = re.compile(r"^\s*(?:ROOT )?\S+ = (\w+)\[([\d,]*)\]\S* ([\w-]+)\(", re.MULTILINE)


def program(method, kv_dtype):
    """The program of one step, its buffers assigned, with no time spent on machine code; and the cache's shapes."""
    spec = dataclasses.replace(SPEC, kv_dtype=kv_dtype)
    choice = jattn.resolve(spec, "native", "cpu")

    def make():
        ints, table = jnp.zeros(2, jnp.int32), jnp.zeros((2, 8), jnp.int32)
        plan = make_plan(Mode.MIXED, ints, ints, table, page_size=PAGE, num_tokens=TOKENS, max_q_len=TOKENS)
        cache = MLACache.create(spec, num_layers=LAYERS, num_pages=PAGES, page_size=PAGE)
        return cache, plan, *inputs(jnp.bfloat16)

    capacity = 256 if method is M.MHA_ONE_SHOT else 64
    chunks = make_chunks(method, [90, 70], [20, 4], np.zeros((2, 8)), page_size=PAGE, capacity=capacity)

    def run(cache, plan, q_nope, q_rope, latent, k_rope, w_kc, w_vc):
        static = dict(layer=1, spec=spec, choice=choice, method=method)
        return mla_attend(q_nope, q_rope, latent, k_rope, cache, plan, w_kc=w_kc, w_vc=w_vc, chunks=chunks, **static)

    args = jax.eval_shape(make)
    lowered = jax.jit(run, donate_argnums=0).lower(*args)
    return lowered.compile({"xla_backend_optimization_level": 0}), args[0]


def inputs(dtype):
    q = jnp.zeros((TOKENS, 4, 8), dtype)
    return (
        q,
        q[..., :4],
        jnp.zeros((TOKENS, 32), dtype),
        q[:, 0, :4],
        jnp.zeros((4, 8, 32), dtype),
        jnp.zeros((4, 32, 8), dtype),
    )


def ops(compiled):
    """(number of elements, dtype, shape, op) of all that is computed."""
    found = _OP.findall(compiled.as_text())
    return [(math.prod(map(int, shape.split(","))) if shape else 1, dtype, shape, op) for dtype, shape, op in found]


@pytest.mark.parametrize(
    ("method", "kv_dtype"),
    [
        (M.MLA, "fp8_e4m3"),
        (M.MHA_CHUNKED_KV, None),
        *(pytest.param(*pair, marks=pytest.mark.long) for pair in ((M.MLA, None), (M.MHA_ONE_SHOT, None))),
    ],
)
def test_the_pool_is_updated_in_place_and_never_copied(method, kv_dtype):
    compiled, cache = program(method, kv_dtype)
    assert {op for size, _, _, op in ops(compiled) if size == cache.latent.size} <= WRITES
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == cache.nbytes
    assert memory.temp_size_in_bytes < 0.05 * cache.nbytes


@pytest.mark.parametrize("kv_dtype", [None, pytest.param("fp8_e4m3", marks=pytest.mark.long)])
def test_a_tile_is_gathered_once_for_keys_and_values(kv_dtype):
    spec = dataclasses.replace(SPEC, kv_dtype=kv_dtype)
    choice = jattn.resolve(spec, "native", "cpu")

    def make():
        ints, table = jnp.zeros(2, jnp.int32), jnp.zeros((2, 64), jnp.int32)
        plan = make_plan(Mode.DECODE, ints, ints, table, page_size=PAGE, num_tokens=2, max_q_len=1)
        cache = MLACache.create(spec, num_layers=LAYERS, num_pages=PAGES, page_size=PAGE)
        return jnp.zeros((2, 4, 36), jnp.float32), cache, plan

    args = jax.eval_shape(make)
    read = jax.jit(lambda q, cache, plan: jattn.attend(q, cache, plan, layer=1, spec=spec, choice=choice))
    compiled = read.lower(*args).compile({"xla_backend_optimization_level": 0})
    row = args[1].latent.shape[2]
    gathers = [shape for size, _, shape, op in ops(compiled) if op == "gather" and size in (256 * row, 256 * 32)]
    assert len(gathers) == 1, gathers


def traced(*, method=M.MLA, spec=SPEC, choice=None, chunks=None, cache=None, **changed):
    """Traces a step, with some inputs changed: errors come before anything is compiled."""
    ins = (
        dict(zip(("q_nope", "q_rope", "latent", "k_rope", "w_kc", "w_vc"), inputs(jnp.float32), strict=True)) | changed
    )
    plan = make_plan(Mode.EXTEND, [20, 4], [20, 4], np.arange(16).reshape(2, 8), page_size=PAGE)
    cache = cache or MLACache.create(SPEC, num_layers=1, num_pages=16, page_size=PAGE, dtype=jnp.float32)
    choice = choice or jattn.resolve(SPEC, "native", "cpu")
    static = dict(layer=0, spec=spec, choice=choice, method=method, chunks=chunks)
    return jax.eval_shape(lambda ins: mla_attend(**ins, cache=cache, plan=plan, **static), ins)


def test_every_form_but_that_over_selected_tokens_is_traced():
    assert set(METHODS) - set(FORMS) == {M.DSA_NPU}
    for method in FORMS:
        out, _ = traced(method=method, chunks=make_chunks(method, [20, 4], [20, 4], np.zeros((2, 8)), page_size=PAGE))
        assert (out.shape, out.dtype) == ((TOKENS, 4, 8), jnp.float32)


CHUNKS = make_chunks(M.MHA_CHUNKED_KV, [9], [1], np.zeros((1, 8)), page_size=PAGE)
REFUSED = [
    (dict(method=M.DSA_NPU), "method DSA_NPU attends to selected tokens, for which there is no kernel yet: use MLA"),
    (
        dict(method=M.MHA_CHUNKED_KV),
        r"method MHA_CHUNKED_KV expands cached latents but chunks is None: give make_chunks",
    ),
    (dict(method=M.MHA_ONE_SHOT), "method MHA_ONE_SHOT expands cached latents but chunks is None"),
    (dict(method=M.MHA_CHUNKED_KV, chunks=CHUNKS), "chunks are of 1 requests, the plan of 2: build both from the same"),
    (dict(w_kc=jnp.zeros((4, 32, 8))), r"w_kc.shape=\(4, 32, 8\): want \(4, 8, 32\)"),
    (dict(w_vc=jnp.zeros((4, 8, 32))), r"w_vc.shape=\(4, 8, 32\): want \(4, 32, 8\)"),
    (dict(latent=jnp.zeros((TOKENS, 31))), r"latent.shape=\(24, 31\): want \(24, 32\)"),
    (dict(q_rope=jnp.zeros((TOKENS, 4, 4), jnp.bfloat16)), "q_nope is float32 but q_rope is bfloat16: want one dtype"),
    (
        dict(cache=MLACache.create(SPEC, num_layers=1, num_pages=2, page_size=8)),
        "cache has pages of 8 tokens, plan of 16: build both alike",
    ),
    (
        dict(cache=MLACache.create(DEEPSEEK, num_layers=1, num_pages=2, page_size=PAGE)),
        r"cache holds \(kv_lora_rank, qk_rope_head_dim\)=\(32, 544\), spec says \(32, 4\): create it from this spec",
    ),
    (
        dict(choice=jattn.resolve(AttnSpec(num_q_heads=4, num_kv_heads=4, head_dim=8), "native", "cpu")),
        "this choice serves attend, write_kv, merge_states, not attend_latent: resolve the spec of the layer",
    ),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED, ids=[message[:32] for _, message in REFUSED])
def test_what_does_not_fit_is_refused_in_a_sentence(changed, message):
    error = (
        NoBackendError if "method" in changed and changed["method"] is M.DSA_NPU or "choice" in changed else ValueError
    )
    with pytest.raises(error, match=message):
        traced(**changed)


def test_a_latent_layer_and_plain_keys_do_not_mix():
    plain = AttnSpec(num_q_heads=4, num_kv_heads=4, head_dim=8)
    latent, paged = (kind.create(spec, num_layers=1, num_pages=4, page_size=4) for kind, spec in
                     ((MLACache, SPEC), (PagedKV, plain)))  # fmt: skip
    plan = make_plan(ForwardMode.EXTEND, [3], [3], [[2]], page_size=4)
    q = jnp.zeros((3, 4, 8))
    fresh = RaggedKV(k=q, v=q, cu_kv_lens=plan.cu_q_lens)
    pairs = (latent, plain, "MLACache"), (paged, SPEC, "PagedKV"), (fresh, SPEC, "RaggedKV")
    for kv, spec, name in pairs:
        choice = jattn.resolve(spec, "native", "cpu")
        with pytest.raises(ValueError, match=f"keys are a {name} but spec is of {type(spec).__name__}: want MLACache"):
            jattn.attend(q, kv, plan, spec=spec, choice=choice)
    with pytest.raises(ValueError, match="keys are a PagedKV but spec is of MLASpec"):
        jattn.write_attend(q, q, q, paged, plan, layer=0, spec=SPEC, choice=jattn.resolve(SPEC, "native", "cpu"))
    with pytest.raises(ValueError, match="sinks are given but spec is an MLASpec: latent attention has none; leave"):
        jattn.attend(jnp.zeros((3, 4, 36)), latent, plan, spec=SPEC, choice=jattn.resolve(SPEC, "native", "cpu"),
                     sinks=jnp.zeros(4))  # fmt: skip
    with pytest.raises(ValueError, match=r"q.shape=\(3, 4, 8\): want \(3, 4, 36\)"):
        jattn.attend(q, latent, plan, spec=SPEC, choice=jattn.resolve(SPEC, "native", "cpu"))
