"""The public failure cases, through every path of the door."""

import dataclasses
import functools

import cases
import door
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import AttnSpec, NoBackendError
from jattn.draft.block_tables import branch_tables
from jattn.draft.slots import DraftShape, draft_slots, tail_copies

DTYPES = ("float32", "bfloat16", "float16")


def of(dtype, *more):
    """A parameter set; float16 takes the code of bfloat16, so its sets are run by hand."""
    return pytest.param(dtype, *more, marks=pytest.mark.long if dtype == "float16" else ())


PATHS = pytest.mark.parametrize("path", door.PATHS)
# every path in float32; the narrower dtypes where the arithmetic differs
DTYPE_PATHS = pytest.mark.parametrize(
    ("dtype", "path"),
    [("float32", path) for path in door.PATHS] + [of(d, p) for d in DTYPES[1:] for p in ("prefill", "decode")],
)
EVERY_DTYPE = pytest.mark.parametrize("dtype", [of(dtype) for dtype in DTYPES])


def attend_one(case_inputs, dtype, path, **kwargs):
    out, lse = door.attend_all([case_inputs], path=path, dtype=jnp.dtype(dtype), **kwargs)
    return out[0], lse[0]


DRAFTED = AttnSpec(num_q_heads=2, num_kv_heads=1, head_dim=8)


def pages_a_branch(seqs, page, dtype, choice):
    """Each branch behind pages of its own, the prefix's tail copied there: the plans of `jattn.draft`."""
    topk, steps = seqs[0]["branch_k"].shape[:2]
    shape, lens = DraftShape(topk=topk, num_steps=steps, page_size=page), jnp.array([len(seq["k"]) for seq in seqs])
    pages = np.random.default_rng(0).permutation(8 * len(seqs))
    slots = (pages[:, None] * page + np.arange(page)).reshape(len(seqs), -1)
    source, target = (np.asarray(x).reshape(-1) for x in tail_copies(slots, lens, shape))
    own = np.asarray(draft_slots(slots, lens, shape))
    cache = door.poisoned(DRAFTED, num_layers=1, num_pages=len(pages), page_size=page, dtype=jnp.dtype(dtype))
    pools = {}
    for n in ("k", "v"):
        flat = np.array(getattr(cache, n)).reshape(-1, 1, 8)
        for row, at, seq in zip(slots, own, seqs, strict=True):
            flat[row[: len(seq[n])]], flat[at] = seq[n], seq[f"branch_{n}"]
        flat[target[target >= 0]] = flat[source[source >= 0]]
        pools[n] = jnp.asarray(flat.reshape(cache.k.shape))
    kv_lens = jnp.repeat(lens + steps, topk)
    table = branch_tables(jnp.asarray(slots), lens, kv_lens, shape).page_table
    plan = jattn.make_plan(jattn.ForwardMode.DECODE, kv_lens, np.ones(len(table), int), table, page_size=page)
    q = jnp.asarray(np.concatenate([seq["q"] for seq in seqs]), dtype)
    run = jax.jit(functools.partial(jattn.attend, spec=DRAFTED, choice=choice))
    out, _ = run(q, dataclasses.replace(cache, **pools), plan)
    counts = [len(set((row[1] // page).tolist())) for row in own]
    return [
        {"o": o, "shared_pages": n // page, "pages_per_branch": count}
        for o, n, count in zip(_by_sequence(out, topk), lens.tolist(), counts, strict=True)
    ]


def branches_as_a_tree(seqs, page, dtype, choice):
    """All drafts as nodes behind the prefix, written step by step, told apart by ancestor bits: no page is copied."""
    topk, steps = seqs[0]["branch_k"].shape[:2]
    num_seqs, pre = len(seqs), np.array([len(seq["k"]) for seq in seqs])
    table, num_pages = door.tables(pre + topk * steps, page)
    cache = door.poisoned(DRAFTED, num_layers=1, num_pages=num_pages, page_size=page, dtype=jnp.dtype(dtype))
    k, v = (jnp.asarray(np.concatenate([seq[n] for seq in seqs]), dtype) for n in ("k", "v"))
    plan = jattn.make_plan(jattn.ForwardMode.EXTEND, pre, pre, table, page_size=page)
    cache = jax.jit(functools.partial(jattn.write_kv, layer=0, choice=choice))(k, v, cache, plan)
    run = jax.jit(functools.partial(jattn.write_attend, layer=0, spec=DRAFTED, choice=choice))
    q = jnp.asarray(np.concatenate([seq["q"] for seq in seqs]), dtype)
    places = np.tile(np.repeat(np.arange(steps), topk), (num_seqs, 1)) + pre[:, None]
    out = q
    for step in range(steps):
        bits = [[sum(1 << (s * topk + t) for s in range(step + 1))] for t in range(topk)] * num_seqs
        tree = jattn.Tree(bits=jnp.asarray(bits, jnp.uint32), starts=jnp.asarray(pre), kv_positions=jnp.asarray(places))
        lens, rows = pre + (step + 1) * topk, np.full(num_seqs, topk)
        plan = jattn.make_plan(jattn.ForwardMode.TARGET_VERIFY, lens, rows, table, page_size=page, tree=tree)
        k, v = (jnp.asarray(np.concatenate([seq[f"branch_{n}"][:, step] for seq in seqs]), dtype) for n in ("k", "v"))
        out, _, cache = run(q, k, v, cache, plan)
    return [{"o": o} for o in _by_sequence(out, topk)]


def _by_sequence(out, rows):
    return np.asarray(out.astype(jnp.float32)).reshape(-1, rows, *out.shape[1:])


@EVERY_DTYPE
@pytest.mark.parametrize("prefer", [(), ("hopper",)])
def test_merging_states_where_some_saw_no_key(dtype, prefer):
    case = cases.build("C01", dtype)
    ins = case.inputs
    out = jnp.asarray(np.stack([ins["o_a"], ins["o_b"]]), dtype)[:, :, None, :]
    lse = jnp.asarray(np.stack([ins["lse_a"], ins["lse_b"]]), jnp.float32)[:, :, None]
    spec = AttnSpec(num_q_heads=1, num_kv_heads=1, head_dim=4)
    choice = jattn.resolve(spec, "native", "cpu", prefer=prefer)
    out, lse = jattn.merge_states(out, lse, choice=choice)
    assert case.check({"o": np.asarray(out.astype(jnp.float32))[:, 0], "lse": np.asarray(lse)[:, 0]}) == []


@DTYPE_PATHS
def test_causal_masks_line_up_at_the_bottom_right(dtype, path):
    case = cases.build("C02", dtype)
    out, lse = door.attend_all(case.inputs["sequences"], path=path, dtype=jnp.dtype(dtype))
    got = [{"o": o, "lse": s} for o, s in zip(out, lse, strict=True)]
    if path == "decode":  # a query before the first key has no token to write, so decoding never asks for it
        got = [{"o": g["o"]} for g in got]
    assert case.check({"sequences": got}) == []


@DTYPE_PATHS
def test_a_window_counts_the_querys_own_token(dtype, path):
    case = cases.build("C03", dtype)
    want = case.expected
    got = {}
    for key in want:
        window = int(key.split("_w")[1].split("_")[0])
        ins = {name: case.inputs[name] for name in ("q", "k", "v")}
        if key.startswith("decode"):
            ins["q"] = ins["q"][-1:]
        got[key] = attend_one(ins, dtype, path, sliding_window=window)[0].reshape(np.shape(want[key]))
    assert case.check(got) == []


@DTYPE_PATHS
def test_a_soft_cap_comes_after_the_scale_and_before_the_mask(dtype, path):
    case = cases.build("C04", dtype)
    out, lse = attend_one(case.inputs, dtype, path, logit_soft_cap=case.inputs["soft_cap"])
    assert case.check({"o": out, "lse": lse}) == []


@DTYPE_PATHS
def test_sinks_are_one_logit_a_query_head(dtype, path):
    case = cases.build("C05", dtype)
    ins = case.inputs
    out, lse = attend_one(ins, dtype, path, sinks=ins["sinks"])
    empty, _ = attend_one({**ins, "k": ins["k"][:0], "v": ins["v"][:0]}, dtype, path, sinks=ins["sinks"])
    assert case.check({"o": out, "o_no_keys": empty, "lse_keys_only": lse}) == []


@DTYPE_PATHS
def test_query_heads_read_the_kv_head_of_their_group(dtype, path):
    case = cases.build("C06", dtype)
    got = [{"o": attend_one(ins, dtype, path)[0]} for ins in case.inputs["sequences"]]
    assert case.check({"sequences": got}) == []


def test_alibi_is_refused_by_name():
    with pytest.raises(NoBackendError, match="xla/attend lacks alibi"):
        jattn.resolve(AttnSpec(num_q_heads=12, num_kv_heads=12, head_dim=8, alibi=True), "native", "cpu")


@EVERY_DTYPE
@pytest.mark.parametrize("splits", [1, 3])
def test_nothing_past_the_length_reaches_the_output(dtype, splits):
    case = cases.build("C08", dtype)
    ins = case.inputs
    spec = AttnSpec(num_q_heads=4, num_kv_heads=2, head_dim=16)
    page = ins["k_pages"].shape[1]
    cache = jattn.PagedKV(k=jnp.asarray(ins["k_pages"], dtype), v=jnp.asarray(ins["v_pages"], dtype), num_layers=1)
    plan = jattn.make_plan(jattn.ForwardMode.DECODE, ins["kv_lens"], np.ones(4, int), ins["page_table"], page_size=page)
    choice = jattn.resolve(spec, "native", "cpu", num_splits=splits)
    out, _ = jattn.attend(jnp.asarray(ins["q"], dtype), cache, plan, spec=spec, choice=choice)
    assert case.check({"o": np.asarray(out.astype(jnp.float32))}) == []


@EVERY_DTYPE
def test_padding_rows_write_nothing(dtype):
    case = cases.build("C09", dtype)
    ins = case.inputs
    spec = AttnSpec(num_q_heads=2, num_kv_heads=2, head_dim=4)
    before = jnp.asarray(ins["cache"], dtype).reshape(4, 4, 2, 4)
    # the layer under test lies between two others, so that a write past its end would be seen
    pool = jnp.concatenate([before * 0 + 7, before, before * 0 + 9])
    cache = jattn.PagedKV(k=pool, v=pool, num_layers=3)
    plan = door._free_plan([len(ins["slots"])], [16])
    plan = jattn.Plan(**{**{f: getattr(plan, f) for f in plan.__dataclass_fields__}, "write_slots": ins["slots"]})
    choice = jattn.resolve(spec, "native", "cpu")
    rows = jnp.asarray(ins["rows"], dtype)
    cache = jax.jit(lambda c: jattn.write_kv(rows, rows, c, plan, layer=1, choice=choice))(cache)
    for array in (cache.k, cache.v):
        got = np.asarray(array.astype(jnp.float32))
        assert case.check({"cache": got[4:8].reshape(16, 2, 4)}) == []
        assert (got[:4] == 7).all() and (got[8:] == 9).all()


@EVERY_DTYPE
@pytest.mark.parametrize("splits", [1, 3])
def test_every_page_size_gives_the_same_answer(dtype, splits):
    case = cases.build("C10", dtype)
    ins = case.inputs
    spec = AttnSpec(num_q_heads=2, num_kv_heads=1, head_dim=8)
    choice = jattn.resolve(spec, "native", "cpu", num_splits=splits)
    for layout in ins["layouts"].values():
        page = layout["k_pages"].shape[1]
        k, v = (jnp.asarray(layout[name], dtype) for name in ("k_pages", "v_pages"))
        cache = jattn.PagedKV(k=k, v=v, num_layers=1)
        plan = jattn.make_plan(
            jattn.ForwardMode.MIXED, ins["kv_lens"], ins["q_lens"], layout["page_table"], page_size=page
        )
        q = jnp.concatenate([jnp.asarray(q, dtype) for q in ins["q"]])
        out, _ = jattn.attend(q, cache, plan, spec=spec, choice=choice)
        cuts = np.cumsum(ins["q_lens"])[:-1]
        assert case.check({"o": np.split(np.asarray(out.astype(jnp.float32)), cuts)}) == [], page


@pytest.mark.parametrize(("dtype", "splits"), [*(of(dtype, 1) for dtype in DTYPES), ("float32", 3)])
@pytest.mark.parametrize("branches", [pages_a_branch, branches_as_a_tree])
def test_draft_branches_see_the_prefix_and_themselves(dtype, splits, branches):
    case = cases.build("C20", dtype)
    ins = case.inputs
    choice = jattn.resolve(DRAFTED, "native", "cpu", num_splits=splits)
    assert case.check({"sequences": branches(ins["sequences"], ins["page"], dtype, choice)}) == []


@pytest.mark.parametrize("path", [path for path in door.PATHS if path != "ragged"])  # packed keys carry no scales
@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2", "int8"])
def test_scales_of_a_quantised_cache_are_applied_once(path, kv_dtype):
    case = cases.build("C23")
    ins = case.inputs
    seq = {"q": ins["q"], "k": ins["k_quantised"] * ins["k_scale"], "v": ins["v_quantised"] * ins["v_scale"]}
    scales = dict(k_scale=ins["k_scale"], v_scale=ins["v_scale"])
    out, _ = attend_one(seq, "float32", path, kv_dtype=kv_dtype, kv_scales="tensor", scales=scales)
    assert case.check({"o": out}) == []


@PATHS
def test_float32_is_computed_in_float32(path):
    case = cases.build("C26")
    assert case.check({"o": attend_one(case.inputs, "float32", path)[0]}) == []
