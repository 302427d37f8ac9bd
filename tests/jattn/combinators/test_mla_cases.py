"""The public failure cases, through latent attention: its own, and those of plain attention as an equal MLA layer."""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false, reportCallIssue=false

import dataclasses
import functools

import cases
import door
import jax
import jax.numpy as jnp
import latent_door
import numpy as np
import pytest
from latent_door import FORMS

import jattn
from jattn import ForwardMode, MLACache, MLASpec
from jattn.combinators.latent_chunks import make_chunks
from jattn.combinators.mla import mla_attend
from jattn.dispatch import AttnForwardMethod as M

NARROW = ("bfloat16", "float16")
QUICK = {"xla_backend_optimization_level": 0}  # the same operations, compiled faster
LONG = pytest.mark.long
DTYPE_FORMS = pytest.mark.parametrize(
    ("dtype", "method"), [(dtype, form) for dtype in ("float32", *NARROW) for form in FORMS], ids=str
)


def attend(spec):
    """The compiled door of a layer."""
    choice = jattn.resolve(spec, "native", "cpu")
    return jax.jit(functools.partial(jattn.attend, spec=spec, choice=choice), compiler_options=QUICK)


def latent_cache(rows, dtype, *, num_layers=1):
    """A cache of one layer's rows [pages, page_size, row]."""
    return MLACache(latent=jnp.asarray(rows, dtype), num_layers=num_layers)


@pytest.mark.parametrize(
    ("dtype", "method"),
    [
        ("float32", M.MLA),
        ("float32", M.MHA_ONE_SHOT),
        *(pytest.param("float32", form, marks=LONG) for form in (M.MHA_CHUNKED_KV, M.MHA)),
        *(pytest.param(dtype, M.MLA, marks=LONG) for dtype in NARROW),
    ],
)
def test_every_form_keeps_the_scale_of_the_original_key_size(dtype, method):
    case = cases.build("C11", dtype)
    ins = {name: jnp.asarray(x, dtype) for name, x in case.inputs.items() if name != "key_dim"}
    (fresh, heads, nope), (total, rank) = ins["q_nope"].shape, ins["c_kv"].shape
    widths = dict(kv_lora_rank=rank, qk_nope_head_dim=nope, qk_rope_head_dim=8, v_head_dim=16)
    spec = MLASpec(num_q_heads=heads, **widths)
    assert nope + 8 == case.inputs["key_dim"]
    choice, table = jattn.resolve(spec, "native", "cpu"), np.array([[1, 3, 0]])
    cache = MLACache.create(spec, num_layers=1, num_pages=4, page_size=4, dtype=dtype)
    prefix, lens = total - fresh, dict(page_size=4)
    cache = jattn.write_kv(
        ins["c_kv"][:prefix], ins["k_rope"][:prefix], cache,
        jattn.make_plan(ForwardMode.EXTEND, [prefix], [prefix], table, **lens), layer=0, choice=choice,
    )  # fmt: skip
    out, _ = mla_attend(
        ins["q_nope"], ins["q_rope"], ins["c_kv"][prefix:], ins["k_rope"][prefix:], cache,
        jattn.make_plan(ForwardMode.EXTEND, [total], [fresh], table, **lens), layer=0, spec=spec, choice=choice,
        w_kc=ins["w_uk"], w_vc=ins["w_uv"], method=method,
        chunks=make_chunks(method, [total], [fresh], table, page_size=4, capacity=16),
    )  # fmt: skip
    assert case.check({"o": np.asarray(out.astype(jnp.float32))}) == []


@pytest.mark.parametrize("dtype", ["float32", *(pytest.param(d, marks=LONG) for d in NARROW)])
def test_prefix_chunks_are_merged_into_one_pass(dtype):
    case = cases.build("C12", dtype)
    seqs, chunk = case.inputs["sequences"], case.inputs["chunk"]
    capacity = chunk * len(seqs)
    out = latent_door.attend_all(seqs, M.MHA_CHUNKED_KV, dtype=jnp.dtype(dtype), capacity=capacity)
    assert case.check({"sequences": [{"o": o} for o in out]}) == []


@pytest.mark.parametrize("dtype", ["float32", *(pytest.param(d, marks=LONG) for d in NARROW)])
def test_each_query_of_a_chain_sees_its_own_keys(dtype):
    case = cases.build("C27", dtype)
    ins = case.inputs
    (seqs, fresh, heads, width), rank = ins["q"].shape, ins["latent_dim"]
    sizes = dict(kv_lora_rank=rank, qk_nope_head_dim=16, qk_rope_head_dim=width - rank, v_head_dim=16)
    spec = MLASpec(num_q_heads=heads, **sizes, sm_scale=ins["scale"])
    page, lens = ins["kv_pages"].shape[1], np.full(seqs, fresh)
    plan = jattn.make_plan(ForwardMode.TARGET_VERIFY, ins["kv_lens"], lens, ins["page_table"], page_size=page)
    cache = latent_cache(ins["kv_pages"][:, :, 0], dtype)
    q = jnp.asarray(ins["q"].reshape(-1, heads, width), dtype)
    out, _ = attend(spec)(q, cache, plan)
    assert case.check({"o": np.asarray(out.astype(jnp.float32)).reshape(seqs, fresh, heads, rank)}) == []


@LONG
def test_a_selection_of_everything_is_dense():
    case = cases.build("C13")
    ins = case.inputs
    (tokens, heads, width), rank = ins["q"].shape, ins["latent_dim"]
    sizes = dict(kv_lora_rank=rank, qk_nope_head_dim=1, qk_rope_head_dim=width - rank, v_head_dim=1)
    spec = MLASpec(num_q_heads=heads, **sizes, sm_scale=ins["scale"])
    plan = jattn.make_plan(ForwardMode.EXTEND, [tokens], [tokens], np.arange(tokens)[None], page_size=1)
    cache = latent_cache(ins["latent_kv"], jnp.float32)
    out, lse = attend(spec)(jnp.asarray(ins["q"], jnp.float32), cache, plan)
    assert case.check({"o": np.asarray(out), "lse": np.asarray(lse)}) == []


@LONG
@DTYPE_FORMS
def test_causal_masks_line_up_at_the_bottom_right(dtype, method):
    case = cases.build("C02", dtype)
    seqs = case.inputs["sequences"]
    written = [i for i, seq in enumerate(seqs) if len(seq["q"]) <= len(seq["k"])]
    assert len(written) >= 3
    out = latent_door.attend_all([seqs[i] for i in written], method, dtype=jnp.dtype(dtype))
    got = [{"o": want["o"], "lse": want["lse"]} for want in case.expected["sequences"]]  # not asked for
    for i, o in zip(written, out, strict=True):
        got[i] = {**got[i], "o": o}
    assert case.check({"sequences": got}) == []


@LONG
@DTYPE_FORMS
def test_query_heads_read_the_kv_head_of_their_group(dtype, method):
    case = cases.build("C06", dtype)
    seqs = case.inputs["sequences"]
    got = [{"o": latent_door.attend_all([seq], method, dtype=jnp.dtype(dtype))[0]} for seq in seqs]
    assert case.check({"sequences": got}) == []


@pytest.mark.parametrize("page", [1, *(pytest.param(n, marks=LONG) for n in (4, 16, 64)), 256])
def test_every_page_size_gives_the_same_answer(page):
    case = cases.build("C10")
    ins = case.inputs
    layout = ins["layouts"][f"page{page}"]
    plan = jattn.make_plan(ForwardMode.MIXED, ins["kv_lens"], ins["q_lens"], layout["page_table"], page_size=page)
    out = attend_pages(np.concatenate(ins["q"]), layout, plan)
    assert case.check({"o": np.split(np.asarray(out), np.cumsum(ins["q_lens"])[:-1])}) == []


@LONG
def test_nothing_past_the_length_reaches_the_output():
    case = cases.build("C08")
    ins = case.inputs
    page = ins["k_pages"].shape[1]
    plan = jattn.make_plan(ForwardMode.DECODE, ins["kv_lens"], np.ones(4, int), ins["page_table"], page_size=page)
    assert case.check({"o": attend_pages(ins["q"], ins, plan)}) == []


def attend_pages(q, pages, plan, dtype=jnp.float32):
    """Output of paged keys and values [pages, page_size, kv_heads, dim], as latent rows."""
    kv_heads = pages["k_pages"].shape[2]
    spec = latent_door.spec_of({"q": q, "v": pages["v_pages"][0]})
    rows = [pages[name].reshape(*pages[name].shape[:2], -1) for name in ("v_pages", "k_pages")]
    wide = jnp.asarray(latent_door.queries(q, kv_heads), dtype)
    wide = jnp.concatenate([jnp.zeros((*wide.shape[:2], spec.kv_lora_rank), dtype), wide], axis=-1)
    out, _ = attend(spec)(wide, latent_cache(np.concatenate(rows, axis=-1), dtype), plan)
    return np.einsum("thr,hrv->thv", out, latent_door.values(spec, kv_heads, dtype))


@pytest.mark.parametrize("dtype", ["float32", *(pytest.param(d, marks=LONG) for d in NARROW)])
def test_padding_rows_write_nothing(dtype):
    case = cases.build("C09", dtype)
    ins = case.inputs
    spec = MLASpec(num_q_heads=1, kv_lora_rank=5, qk_nope_head_dim=1, qk_rope_head_dim=3, v_head_dim=1)
    before = jnp.asarray(ins["cache"], dtype).reshape(4, 4, 8)
    # the layer under test lies between two others, so that a write past its end would be seen
    cache = latent_cache(jnp.concatenate([before * 0 + 7, before, before * 0 + 9]), dtype, num_layers=3)
    plan = dataclasses.replace(door._free_plan([len(ins["slots"])], [16]), write_slots=jnp.asarray(ins["slots"]))
    rows, choice = jnp.asarray(ins["rows"], dtype).reshape(-1, 8), jattn.resolve(spec, "native", "cpu")
    write = functools.partial(jattn.write_kv, layer=1, choice=choice)
    got = np.asarray(jax.jit(write)(rows[:, :5], rows[:, 5:], cache, plan).latent.astype(jnp.float32))
    assert case.check({"cache": got[4:8].reshape(16, 2, 4)}) == []
    assert (got[:4] == 7).all() and (got[8:] == 9).all()


@pytest.mark.parametrize("method", [M.MLA, *(pytest.param(form, marks=LONG) for form in FORMS[1:])], ids=str)
def test_draft_branches_see_the_prefix_and_themselves(method):
    """All drafts as nodes behind the prefix, written step by step, told apart by ancestor bits."""
    case = cases.build("C20")
    seqs, page = case.inputs["sequences"], case.inputs["page"]
    topk, steps = seqs[0]["branch_k"].shape[:2]
    pre = np.array([len(seq["k"]) for seq in seqs])
    spec = latent_door.spec_of({"q": seqs[0]["q"], "v": seqs[0]["v"]})
    table, num_pages = door.tables(pre + topk * steps, page)
    cache = MLACache.create(spec, num_layers=1, num_pages=num_pages, page_size=page, dtype=jnp.float32)
    choice = jattn.resolve(spec, "native", "cpu")
    plan = jattn.make_plan(ForwardMode.EXTEND, pre, pre, table, page_size=page)
    cache = jattn.write_kv(*flat(seqs, lambda seq, n: seq[n]), cache, plan, layer=0, choice=choice)
    q = jnp.asarray(np.concatenate([seq["q"] for seq in seqs]), jnp.float32)
    weights = dict(w_kc=jnp.zeros((spec.num_q_heads, 0, spec.kv_lora_rank)), w_vc=latent_door.values(spec, 1, q.dtype))
    run = functools.partial(mla_attend, layer=0, spec=spec, choice=choice, method=method)
    run = jax.jit(run, compiler_options=QUICK)
    places = np.tile(np.repeat(np.arange(steps), topk), (len(seqs), 1)) + pre[:, None]
    out = q
    for step in range(steps):
        bits = [[sum(1 << (s * topk + t) for s in range(step + 1))] for t in range(topk)] * len(seqs)
        tree = jattn.Tree(bits=jnp.asarray(bits, jnp.uint32), starts=jnp.asarray(pre), kv_positions=jnp.asarray(places))
        lens, rows = pre + (step + 1) * topk, np.full(len(seqs), topk)
        plan = jattn.make_plan(ForwardMode.TARGET_VERIFY, lens, rows, table, page_size=page, tree=tree)
        fresh = flat(seqs, lambda seq, n: seq[f"branch_{n}"][:, step])  # noqa: B023  (called at once)
        chunks = make_chunks(method, lens, rows, table, page_size=page, min_chunks=1)
        out, cache = run(q[..., :0], q, *fresh, cache, plan, chunks=chunks, **weights)
    got = [{"o": o} for o in np.asarray(out).reshape(-1, topk, *out.shape[1:])]
    want = case.expected["sequences"]
    pages = [{key: x for key, x in seq.items() if key != "o"} for seq in want]  # of branches that copy pages
    assert case.check({"sequences": [g | p for g, p in zip(got, pages, strict=True)]}) == []


def flat(seqs, pick):
    """Latents (values) and keys of a step, packed."""
    return (jnp.asarray(np.concatenate([pick(s, n)[:, 0] for s in seqs]), jnp.float32) for n in ("v", "k"))


@LONG
@pytest.mark.parametrize("method", FORMS, ids=str)
def test_float32_is_computed_in_float32(method):
    case = cases.build("C26")
    assert case.check({"o": latent_door.attend_all([case.inputs], method)[0]}) == []
