"""The Hopper prefill against float64 on a GPU (marker `device`), and its schedule here."""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false, reportCallIssue=false

import dataclasses
import functools

import float64
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._common.masks import Rules
from pallas_kernels.attention import mosaic_gpu_sm90_forms as forms
from pallas_kernels.attention import mosaic_gpu_sm90_prefill as prefill
from pallas_kernels.attention import mosaic_gpu_sm90_prefill_schedule as schedules
from pallas_kernels.attention import xla
from pallas_kernels.attention.mosaic_gpu_sm90_prefill_config import SHARED_BYTES, WIDTHS, Config, heuristic


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A ragged batch. Lists of lengths; the query rows are the newest keys."""

    seq_lens: tuple[int, ...] = (1000, 300, 64, 1, 0, 333)
    q_lens: tuple[int, ...] = (700, 300, 64, 1, 0, 200)
    kv_heads: int = 2
    group: int = 4
    dim: int = 128
    v_dim: int | None = None
    page: int | None = 64  # None: packed keys
    mask: str = "causal"
    window: int | None = None
    cap: float | None = None
    sinks: bool = False
    padding: int = 0  # rows after the last request
    max_q_len: int | None = None  # below a request's rows: that one is not attended
    poisoned: int | None = None  # a request all of whose arrays are NaN: the others must not notice
    dtype: str = "bfloat16"
    kv_dtype: str | None = None  # 8-bit keys and values, with a scale
    config: Config | None = None
    seed: int = 0

    @property
    def bound(self) -> int:
        """Most query rows that are attended."""
        return self.max_q_len or max(self.q_lens)

    @property
    def scales(self) -> tuple[float, float]:
        """Of 8-bit keys and values."""
        return (0.03, 0.07) if self.kv_dtype else (1.0, 1.0)


def draw(case: Case):
    """q, k, v as stored, the other arrays, and keys and values of each request: NaN in all that must not be read."""
    rng = np.random.default_rng(case.seed)
    heads, v_dim, page = case.kv_heads * case.group, case.v_dim or case.dim, case.page or 1
    q = rng.standard_normal((sum(case.q_lens) + case.padding, heads, case.dim), np.float32)
    cu = np.cumsum([0, *case.q_lens]).astype(np.int32)
    parts = [[rng.standard_normal((n, case.kv_heads, d), np.float32) for d in (case.dim, v_dim)] for n in case.seq_lens]
    if case.poisoned is not None:
        q[cu[case.poisoned] : cu[case.poisoned + 1]] = np.nan
        for part in parts[case.poisoned]:
            part[...] = np.nan
    q[cu[-1] :] = np.nan
    args = dict(cu_q_lens=jnp.asarray(cu))
    if case.page is None:
        k, v = (np.concatenate([part[i] for part in parts]) for i in range(2))
        k, v = (np.concatenate([x, np.full((70, *x.shape[1:]), np.nan, np.float32)]) for x in (k, v))
        args["cu_kv_lens"] = jnp.asarray(np.cumsum([0, *case.seq_lens]), jnp.int32)
    else:
        need = [-(-n // page) for n in case.seq_lens]
        total = 2 * (sum(need) + 2)  # two layers; the second is attended to
        order = rng.permutation(total // 2)
        table = rng.integers(-(2**31), 2**31 - 1, (len(need), max(*need, 1) + 2), dtype=np.int64).astype(np.int32)
        k, v = (np.full((total, page, case.kv_heads, d), np.nan, np.float32) for d in (case.dim, v_dim))
        at = 0
        for b, n in enumerate(case.seq_lens):
            table[b, : need[b]] = order[at : at + need[b]]
            at += need[b]
            slots = table[b, np.arange(n) // page] + total // 2, np.arange(n) % page
            k[slots], v[slots] = parts[b]
        args |= dict(page_table=jnp.asarray(table), page_offset=jnp.int32(total // 2))
        args["seq_lens"] = jnp.asarray(case.seq_lens, jnp.int32)
    if case.kv_dtype:
        k, v = (_stored(case, x, scale) for x, scale in zip((k, v), case.scales, strict=True))
        args |= dict(zip(("k_scale", "v_scale"), map(jnp.float32, case.scales), strict=True))
    if case.sinks:
        args["sinks"] = jnp.asarray(rng.standard_normal(heads), jnp.float32)
    arrays = tuple(jnp.asarray(x, x.dtype if x.dtype == np.uint8 else case.dtype) for x in (q, k, v))
    return arrays, args, parts


def _stored(case: Case, x, scale: float):
    # the bits of the 8-bit floats that hold x / scale
    return np.asarray(x / scale, np.float32).astype(jnp.dtype(case.kv_dtype)).view(np.uint8)


def oracle(case: Case, q, args, parts):
    """out and lse in float64, from inputs as rounded; zeros and -inf for rows that nothing answers for."""

    def rounded(x, scale=1.0):
        if case.kv_dtype:
            return _stored(case, x, scale).view(jnp.dtype(case.kv_dtype)).astype(np.float64) * np.float32(scale)
        return np.asarray(jnp.asarray(x, case.dtype).astype(jnp.float32), np.float64)

    q = np.asarray(jnp.asarray(q).astype(jnp.float32), np.float64)
    out, lse = np.zeros((*q.shape[:2], case.v_dim or case.dim)), np.full(q.shape[:2], -np.inf)
    sinks = np.full(q.shape[1], -np.inf) if "sinks" not in args else np.asarray(args["sinks"], np.float64)
    for b, n in enumerate(case.q_lens):
        rows = slice(sum(case.q_lens[:b]), sum(case.q_lens[: b + 1]))
        if not n or n > case.bound or not case.seq_lens[b]:
            continue
        keys, values = (rounded(x, scale) for x, scale in zip(parts[b], case.scales, strict=True))
        seen = float64.visible(n, len(keys), mask=case.mask, sliding_window=case.window)
        for head in range(q.shape[1]):
            scores = q[rows, head] @ keys[:, head // case.group].T * case.dim**-0.5
            scores = scores if case.cap is None else case.cap * np.tanh(scores / case.cap)
            scores = np.where(seen, scores, -np.inf)
            top = scores.max(axis=1)
            top[~seen.any(axis=1)] = 0.0
            weights = np.exp(scores - top[:, None])
            total = weights.sum(axis=1)
            with np.errstate(divide="ignore", invalid="ignore"):
                lse[rows, head] = top + np.log(total)
                made = weights @ values[:, head // case.group] / (total + np.exp(sinks[head] - top))[:, None]
            out[rows, head] = np.where(seen.any(axis=1)[:, None], made, 0.0)
    return out, lse


def compiled(case: Case):
    """The kernel's call and plain JAX's, and what they take."""
    arrays, args, parts = draw(case)
    static = dict(
        max_q_len=case.bound,
        sm_scale=case.dim**-0.5,
        mask=case.mask,
        logit_soft_cap=case.cap,
        sliding_window=case.window,
    )
    name = "ragged_attention" if case.page is None else "paged_attention"
    if case.page is not None:
        static["kv_dtype"] = case.kv_dtype

    def build(function, **more):
        return jax.jit(lambda q, k, v, args: function(q, k, v, **args, **static, **more)).lower(*arrays, args).compile()

    mine, plain = build(getattr(prefill, name), config=case.config), build(getattr(xla, name))
    return mine, plain, arrays, args, parts


def check(case: Case, made=None):
    """The kernel's error is at most twice plain JAX's in the same dtype, and a repeat has the same bits."""
    mine, plain, arrays, args, parts = made or compiled(case)
    got, got_lse = (np.asarray(x, np.float64) for x in mine(*arrays, args))
    want, want_lse = oracle(case, arrays[0], args, parts)
    peer = np.asarray(plain(*arrays, args)[0], np.float64)
    keep = np.ones(len(got), bool)
    if case.poisoned is not None:
        cu = np.asarray(args["cu_q_lens"])
        keep[cu[case.poisoned] : cu[case.poisoned + 1]] = False
    got, got_lse, want, want_lse, peer = (x[keep] for x in (got, got_lse, want, want_lse, peer))
    assert np.isfinite(got).all()
    ulp = float(jnp.finfo(case.dtype).eps) * np.abs(want).max(initial=0.0)
    error, allowed = np.abs(got - want).max(initial=0.0), 2 * np.abs(peer - want).max(initial=0.0) + ulp
    worst = np.unravel_index(np.argmax(np.abs(got - want)), got.shape)
    assert error <= allowed, f"error {error:.3g} at {worst}, plain JAX's {(allowed - ulp) / 2:.3g}"
    np.testing.assert_array_equal(np.isneginf(got_lse), np.isneginf(want_lse))
    np.testing.assert_allclose(got_lse, want_lse, rtol=2e-5, atol=2e-5)
    assert (got[np.isneginf(want_lse)] == 0).all()
    for _ in range(3):
        again, again_lse = (np.asarray(x, np.float64)[keep] for x in mine(*arrays, args))
        assert (again == got).all() and (again_lse == got_lse).all()


E4, E5 = "float8_e4m3fn", "float8_e5m2"
F16 = dict(dtype="float16")
EARLY = dict(seq_lens=(3, 500, 0, 40), q_lens=(6, 200, 100, 300))
DEVICE_CASES = dict(
    base=Case(padding=300),
    page16=Case(page=16),
    page256_group8=Case(page=256, group=8),
    page8_group1=Case(page=8, group=1),
    page32_group7_f16=Case(page=32, group=7, dtype="float16"),
    page128_group3=Case(page=128, group=3),
    page1=Case(page=1),
    page4_d64=Case(page=4, dim=64, group=6),
    d64=Case(dim=64, group=3, kv_heads=3),
    d64_poly=Case(dim=64, config=Config(groups=3, stages=3, polynomial=6)),
    d64_192=Case(dim=64, config=Config(groups=2, stages=2, block_kv=192)),
    d80=Case(dim=80, group=6),
    d96=Case(dim=96, group=16),
    d256=Case(dim=256),
    d192_v128=Case(dim=192, v_dim=128, group=1, kv_heads=4),
    d128_v64=Case(dim=128, v_dim=64, page=2),
    window=Case(window=100, cap=20.0, sinks=True),
    window_d64=Case(window=33, dim=64, group=3, sinks=True, padding=3),
    window_1=Case(window=1),
    cap_d256=Case(dim=256, cap=5.0, sinks=True),
    full=Case(mask="full"),
    full_cap=Case(mask="full", cap=9.0, sinks=True, dim=96, page=16),
    early=Case(**EARLY, group=7),
    early_window=Case(**EARLY, window=30, sinks=True, dim=64),
    early_full=Case(**EARLY, mask="full"),
    too_long=Case(max_q_len=300, padding=10),
    poisoned=Case(poisoned=1, padding=10),
    many_tiles=Case(seq_lens=(5000, 2100, 900), q_lens=(4000, 2100, 31), kv_heads=4, page=16),
    many_tiles_d64=Case(seq_lens=(5000, 2100, 900), q_lens=(4000, 2100, 31), kv_heads=4, dim=64),
    many_requests=Case(
        seq_lens=tuple(range(1, 400, 7)), q_lens=tuple(1 + n // 3 for n in range(1, 400, 7)), kv_heads=4
    ),
    small_blocks=Case(config=Config(block_kv=64, stages=3)),
    packed=Case(page=None, padding=300),
    packed_f16_d64=Case(page=None, dtype="float16", dim=64, group=8),
    packed_d192=Case(page=None, dim=192, v_dim=128, group=1, kv_heads=4),
    packed_full=Case(page=None, mask="full", group=16),
    packed_window=Case(page=None, window=77, cap=20.0, sinks=True, dim=80, group=3),
    packed_poisoned=Case(page=None, poisoned=1),
    packed_poisoned_d256=Case(page=None, poisoned=2, dim=256, padding=5),
    packed_short=Case(page=None, seq_lens=(20, 7), q_lens=(20, 3)),
    packed_early=Case(page=None, **EARLY, group=6),
    fp8=Case(**F16, kv_dtype=E4, padding=3),
    fp8_p16_e5m2=Case(**F16, kv_dtype=E5, page=16, dim=96, group=3),
    fp8_p1=Case(**F16, kv_dtype=E4, page=1, dim=80),
    fp8_d64=Case(**F16, kv_dtype=E4, dim=64, page=256),
    fp8_d192=Case(**F16, kv_dtype=E5, dim=192, v_dim=128, page=16, window=200, sinks=True),
    fp8_many_tiles=Case(**F16, seq_lens=(5000, 2100, 900), q_lens=(4000, 2100, 31), kv_heads=4, page=16, kv_dtype=E4),
)


@pytest.mark.device
@pytest.mark.parametrize("name", DEVICE_CASES)
def test_the_kernel_is_as_accurate_as_plain_jax_on_a_gpu(name):
    check(DEVICE_CASES[name])


@functools.cache
def drawn_programs(page, dim):
    """Both calls for any lengths up to 600 rows of 4 requests, a shape for all draws."""
    return compiled(Case(seq_lens=(700,) * 4, q_lens=(150,) * 4, page=page, dim=dim, window=250, padding=20))[:2]


@pytest.mark.device
@pytest.mark.parametrize(("page", "dim"), [(16, 128), (None, 64), (256, 64), (None, 128)])
@hypothesis.settings(max_examples=40, deadline=None, phases=[hypothesis.Phase.generate])
@hypothesis.given(data=st.data())
def test_any_lengths_are_attended_on_a_gpu(page, dim, data):
    edges = st.sampled_from([0, 1, 15, 31, 32, 33, 64, 127, 128, 129, 150])
    q_lens = tuple(data.draw(st.one_of(edges, st.integers(0, 150))) for _ in range(4))
    prefixes = st.sampled_from([0, 1, 96, 127, 128, 129, 500, 550])
    seq_lens = tuple(max(n + data.draw(prefixes) - data.draw(st.sampled_from([0, 0, 0, 5])), 0) for n in q_lens)
    case = Case(
        seq_lens=seq_lens, q_lens=q_lens, page=page, dim=dim, window=250, padding=620 - sum(q_lens),
        max_q_len=150, seed=data.draw(st.integers(0, 99)),
    )  # fmt: skip
    (q, k, v), args, parts = draw(case)
    big = Case(seq_lens=(700,) * 4, q_lens=(150,) * 4, page=page, dim=dim, padding=20)
    (_, k_big, _), args_big, _ = draw(big)
    rows = ((0, k_big.shape[0] - k.shape[0]), *[(0, 0)] * (k.ndim - 1))
    k, v = (jnp.pad(x, rows, constant_values=float("nan")) for x in (k, v))
    if page is not None:
        short = args_big["page_table"].shape[1] - args["page_table"].shape[1]
        args["page_table"] = jnp.pad(args["page_table"], ((0, 0), (0, short)), constant_values=2**30)
    check(case, (*drawn_programs(page, dim), (q, k, v), args, parts))


def walk(case: Case, config: Config):
    """The schedule of a case, and the program of each (tile, head)."""
    rules = Rules(sm_scale=1.0, mask=case.mask, sliding_window=case.window)
    sizes = dict(num_tokens=sum(case.q_lens) + case.padding, max_q_len=case.bound, group=case.group)
    lens = jnp.asarray(case.seq_lens, jnp.int32), jnp.asarray(np.cumsum([0, *case.q_lens]), jnp.int32)
    run = jax.jit(lambda seq_lens, cu: schedules.make(config, rules, seq_lens=seq_lens, cu_q_lens=cu, **sizes))
    made = run(*lens)
    return np.asarray(made.tiles)[: int(made.counts[1])], made


@pytest.mark.parametrize(
    "case",
    [
        Case(padding=300),
        Case(**EARLY, group=7, window=30),
        Case(mask="full", max_q_len=300, group=1),
        Case(window=100, group=16),
    ],
)
@pytest.mark.parametrize("config", [Config(), pytest.param(Config(block_kv=64, groups=3), marks=pytest.mark.long)])
def test_a_schedule_has_every_row_once_with_all_the_keys_it_sees(case, config):
    tiles, made = walk(case, config)
    assert (np.diff(tiles[:, schedules.BLOCKS]) <= 0).all()  # longest first
    assert (np.asarray(made.tiles)[len(tiles) :, schedules.TOKENS] == 0).all()
    cu = np.cumsum([0, *case.q_lens])
    rows = np.zeros(cu[-1] + case.padding, int)
    for seq, row, tokens, first, begin, blocks, kv_len, low, high, _ in tiles[:, : len(schedules.COLUMNS)]:
        rows[row : row + tokens] += 1
        assert 0 < tokens <= config.rows // case.group
        attended = row < cu[-1] and case.q_lens[seq] <= case.bound
        if not attended:
            assert blocks == 0
            continue
        assert cu[seq] <= row and row + tokens <= cu[seq + 1] and kv_len == case.seq_lens[seq]
        assert first == kv_len - case.q_lens[seq] + row - cu[seq]
        if not kv_len:
            assert blocks == 0
            continue
        seen = float64.visible(case.q_lens[seq], kv_len, mask=case.mask, sliding_window=case.window)
        seen = seen[row - cu[seq] : row - cu[seq] + tokens]
        keys = np.flatnonzero(seen.any(axis=0))
        if not keys.size:
            assert blocks == 0
            continue
        assert begin == keys[0] // config.block_kv and begin + blocks == keys[-1] // config.block_kv + 1
        held = np.flatnonzero(seen.all(axis=0))
        open_ = range(max(low, 0), high)
        assert len(open_) == 0 or (open_.start == held[0] and open_.stop == held[-1] + 1)
    assert (rows == 1).all()


@pytest.mark.parametrize(("kv_heads", "some", "every"), [(8, 5, 7), (40, 0, 3), (40, 7, 12)])
def test_places_have_every_tile_and_head_once_and_tiles_with_keys_first(kv_heads, some, every):
    places = jnp.arange(every * kv_heads, dtype=jnp.int32)
    tile, head = (
        np.asarray(x) for x in jax.jit(schedules.of_place, static_argnums=2)(places, jnp.int32(some), kv_heads)
    )
    assert len({*zip(tile.tolist(), head.tolist(), strict=True)}) == every * kv_heads
    assert set(tile) == set(range(every)) and set(head) == set(range(kv_heads))
    assert (tile[: some * kv_heads] < some).all() and (tile[some * kv_heads :] >= some).all()
    for start in range(0, some * kv_heads, some * 16 if some else 1):
        assert len(set(head[start : min(start + some * 16, some * kv_heads)])) <= 16


def test_every_pair_of_head_dims_fits_shared_memory():
    for k_dim in WIDTHS:
        for v_dim in WIDTHS:
            for narrow in (False,) if k_dim > 192 or v_dim > 128 else (False, True):
                config = heuristic(k_dim=k_dim, v_dim=v_dim, narrow_kv=narrow)
                assert config.shared_bytes(k_dim=k_dim, v_dim=v_dim, narrow_kv=narrow) <= SHARED_BYTES


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(dim=72), "head dims 72 and 72"),
        (dict(page=48), "page_size=48"),
        (dict(group=65), "65 query heads a KV head"),
        (dict(dtype="float32"), "wants bfloat16 or float16"),
        (dict(mask="tree"), "trees are the decode kernel's"),
        (dict(dim=256, config=Config(stages=4)), "bytes of shared memory"),
        (dict(kv_dtype="float8_e4m3fn"), "wants float16 queries"),
        (dict(dim=256, kv_dtype="float8_e4m3fn", dtype="float16"), "widening them takes registers"),
    ],
)
def test_what_the_kernel_was_not_built_for_is_refused_in_a_sentence(change, message):
    case = Case(seq_lens=(8,), q_lens=(8,), kv_heads=1, **({"group": 1} | change))
    page = case.page or 1
    q = jnp.zeros((8, case.group, case.dim), case.dtype)
    k = jnp.zeros((2, page, 1, case.dim), case.kv_dtype or case.dtype)
    args = dict(page_table=jnp.zeros((1, 1), jnp.int32), seq_lens=jnp.array([8]), cu_q_lens=jnp.array([0, 8]))
    with pytest.raises(ValueError, match=message):
        prefill.paged_attention(q, k, k, **args, max_q_len=8, sm_scale=1.0, mask=case.mask, config=case.config)


@pytest.mark.parametrize("page", [64, *(pytest.param(page, marks=pytest.mark.long) for page in (1, None))])
def test_a_call_lowers_without_the_device(page):
    case = Case(seq_lens=(70, 30), q_lens=(40, 30), kv_heads=1, page=page)
    arrays, args, _ = draw(case)
    function = prefill.ragged_attention if page is None else prefill.paged_attention
    run = jax.jit(lambda q, k, v, args: function(q, k, v, **args, max_q_len=40, sm_scale=1.0))
    text = run.trace(*arrays, args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize(
    ("rows", "mask", "narrow", "dtype", "want"),
    [
        (65, "causal", False, "bfloat16", True),
        (65, "full", False, "float16", True),
        (64, "causal", False, "bfloat16", False),
        (500, "tree", False, "bfloat16", False),
        (500, "causal", True, "bfloat16", False),
        (500, "causal", True, "float16", True),
    ],
)
def test_calls_of_many_rows_without_a_tree_over_wide_pages_are_the_prefill_kernels(rows, mask, narrow, dtype, want):
    assert forms.is_prefill(max_q_len=rows, mask=mask, narrow_kv=narrow, dtype=dtype, k_dim=128, v_dim=128) == want


def test_the_door_on_hopper_prefills_with_this_kernel(monkeypatch):
    taken = []
    monkeypatch.setattr(forms.prefill, "paged_attention", lambda *args, **given: taken.append(("prefill", given)))
    monkeypatch.setattr(forms.decode, "paged_attention", lambda *args, **given: taken.append(("decode", given)))
    pages, q = jnp.zeros((1, 16, 1, 64), jnp.bfloat16), jnp.zeros((65, 2, 64), jnp.bfloat16)
    for rows in (64, 65):
        forms.paged_attention(q, pages, pages, max_q_len=rows, tree_bits=None, tree_starts=None)
    assert [name for name, _ in taken] == ["decode", "prefill"]
    assert "tree_starts" not in taken[1][1]
    with pytest.raises(ValueError, match="tree_bits given with mask='causal'"):
        forms.paged_attention(q, pages, pages, max_q_len=65, tree_bits=1)
    monkeypatch.setattr(forms.prefill, "ragged_attention", lambda *args, **given: given)
    assert forms.ragged_attention(q, q, q, cu_kv_lens=None, tree_bits=None) == dict(mask="causal", cu_kv_lens=None)


def test_trees_over_packed_keys_are_plain_jaxs_on_hopper():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((9, heads, 64)), jnp.bfloat16) for heads in (2, 1, 1))
    lens, starts = jnp.array([0, 4, 9], jnp.int32), jnp.zeros(2, jnp.int32)
    bits = jnp.asarray([[1], [3], [5], [9], [1], [3], [5], [9], [17]], jnp.uint32)
    tree = dict(mask="tree", tree_bits=bits, tree_starts=starts, cu_kv_lens=lens, cu_q_lens=lens)
    got, want = (
        op(q, k, v, max_q_len=5, sm_scale=0.1, **tree) for op in (forms.ragged_attention, xla.ragged_attention)
    )
    assert all((a == b).all() for a, b in zip(got, want, strict=True)) and (got[0] != 0).any()
