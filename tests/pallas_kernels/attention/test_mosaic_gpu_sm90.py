"""The Hopper attention kernel against float64: on a GPU (marker `device`), and interpreted with race detection here."""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false, reportCallIssue=false

import dataclasses
import functools

import float64
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import mosaic_gpu_sm90 as sm90
from pallas_kernels.attention import xla
from pallas_kernels.attention.mosaic_gpu_sm90_config import Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A ragged batch. Lists of lengths; the query rows are the newest keys."""

    seq_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    kv_heads: int = 2
    group: int = 4
    dim: int = 128
    v_dim: int | None = None
    page: int = 16
    mask: str = "causal"
    window: int | None = None
    cap: float | None = None
    sinks: bool = False
    padding: int = 0  # rows after the last request
    dtype: str = "bfloat16"
    kv_dtype: str | None = None  # 8-bit pages, with a scale
    config: Config | None = None
    seed: int = 0
    q_size: float = 1.0  # of queries; keys are as much smaller
    rise: float = 1.0  # how much larger the newest keys are than the oldest, so that maxima keep growing

    @property
    def scales(self) -> tuple[float, float]:
        """Of 8-bit keys and values."""
        return (0.03 / self.q_size, 0.07) if self.kv_dtype else (1.0, 1.0)


def draw(case: Case):
    """Arguments of the kernel, with NaN in all that must not be read and wild ids in table tails, and the parts."""
    rng = np.random.default_rng(case.seed)
    heads, v_dim = case.kv_heads * case.group, case.v_dim or case.dim
    need = [-(-n // case.page) for n in case.seq_lens]
    total = 2 * (sum(need) + 2)  # two layers; the second is attended to
    order = rng.permutation(total // 2)
    table = rng.integers(-(2**31), 2**31 - 1, (len(need), max(*need, 1) + 2), dtype=np.int64).astype(np.int32)
    k = np.full((total, case.page, case.kv_heads, case.dim), np.nan, np.float32)
    v = np.full((total, case.page, case.kv_heads, v_dim), np.nan, np.float32)
    at, parts = 0, []
    round_ = functools.partial(np.asarray, dtype=np.float32)
    for b, n in enumerate(case.seq_lens):
        table[b, : need[b]] = order[at : at + need[b]]
        at += need[b]
        keys, values = (round_(rng.standard_normal((n, case.kv_heads, d))) for d in (case.dim, v_dim))
        keys *= np.linspace(1, case.rise, n, dtype=np.float32)[:, None, None] / np.float32(case.q_size)
        slots = table[b, np.arange(n) // case.page] + total // 2, np.arange(n) % case.page
        k[slots], v[slots] = keys, values
        parts.append((keys, values))
    q = round_(rng.standard_normal((sum(case.q_lens) + case.padding, heads, case.dim)) * case.q_size)
    cu = np.cumsum([0, *case.q_lens]).astype(np.int32)
    args = dict(
        page_table=jnp.asarray(table),
        page_offset=jnp.int32(total // 2),
        seq_lens=jnp.asarray(case.seq_lens, jnp.int32),
        cu_q_lens=jnp.asarray(cu),
    )
    if case.kv_dtype:
        k, v = (_stored(case, x, scale) for x, scale in zip((k, v), case.scales, strict=True))
        args |= dict(zip(("k_scale", "v_scale"), map(jnp.float32, case.scales), strict=True))
    if case.sinks:
        args["sinks"] = jnp.asarray(rng.standard_normal(heads), jnp.float32)
    trees = [None] * len(need)
    if case.mask == "tree":
        trees, arrays = draw_trees(case, rng, cu, q.shape[0])
        args |= arrays
    return (q, k, v), args, parts, trees


def _stored(case: Case, x, scale: float):
    # the bits of the 8-bit floats that hold x / scale
    kind = jnp.dtype(case.kv_dtype)
    return np.asarray(x / scale, np.float32).astype(kind).view(np.uint8)


def draw_trees(case: Case, rng, cu, num_tokens: int):
    """Random trees whose nodes are the queries: for the oracle, and as the kernel's arrays."""
    most = max(case.q_lens)
    bits = np.zeros((num_tokens, -(-most // 32)), np.uint32)
    kv_positions = np.zeros((len(case.q_lens), most), np.int32)
    q_positions = np.zeros(num_tokens, np.int32)
    starts = np.asarray(case.seq_lens, np.int32) - np.asarray(case.q_lens, np.int32)
    trees = []
    for b, n in enumerate(case.q_lens):
        seen = np.zeros((n, n), bool)
        for i in range(n):
            if i:
                seen[i] = seen[rng.integers(0, i)]
            seen[i, i] = True
            for j in np.flatnonzero(seen[i]):
                bits[cu[b] + i, j // 32] |= np.uint32(1) << np.uint32(j % 32)
        positions = starts[b] + seen.sum(1) - 1
        kv_positions[b, :n], q_positions[cu[b] : cu[b] + n] = positions, positions
        trees.append(dict(start=starts[b], bits=seen, q_positions=positions, kv_positions=positions))
    arrays = dict(tree_bits=bits, tree_starts=starts, tree_kv_positions=kv_positions, q_positions=q_positions)
    return trees, {name: jnp.asarray(x) for name, x in arrays.items()}


def oracle(case: Case, q, args, parts, trees, dtype):
    """out and lse in float64, from inputs rounded to `dtype`; zeros and -inf for padding."""

    def rounded(x, scale=None):
        if scale is not None and case.kv_dtype:
            return _stored(case, x, scale).view(jnp.dtype(case.kv_dtype)).astype(np.float64) * np.float32(scale)
        return np.asarray(jnp.asarray(x, dtype).astype(jnp.float32), np.float64)

    out = np.zeros((*q.shape[:2], case.v_dim or case.dim))
    lse = np.full(q.shape[:2], -np.inf)
    at = 0
    for n, (keys, values), tree in zip(case.q_lens, parts, trees, strict=True):
        if n:
            seen = float64.visible(n, len(keys), mask=case.mask, sliding_window=case.window, tree=tree)
            out[at : at + n], lse[at : at + n] = float64.attend(
                rounded(q[at : at + n]),
                rounded(keys, case.scales[0]),
                rounded(values, case.scales[1]),
                seen,
                sm_scale=case.dim**-0.5,
                logit_soft_cap=case.cap,
                sinks=None if "sinks" not in args else np.asarray(args["sinks"]),
            )
        at += n
    return out, lse


def attend(function, case: Case, arrays, args, **more):
    """Run one form of the op."""
    static = dict(
        max_q_len=max(case.q_lens),
        sm_scale=case.dim**-0.5,
        mask=case.mask,
        logit_soft_cap=case.cap,
        sliding_window=case.window,
        kv_dtype=case.kv_dtype,
        **more,
    )
    run = jax.jit(lambda q, k, v, args: function(q, k, v, **args, **static))
    return [np.asarray(x, np.float64) for x in run(*arrays, args)]


def check(case: Case, interpret=False):
    """The kernel's error is at most twice plain JAX's in the same dtype, and a repeat has the same bits."""
    dtype = jnp.dtype(case.dtype)
    (q, k, v), args, parts, trees = draw(case)
    arrays = [jnp.asarray(x, x.dtype if x.dtype == np.uint8 else dtype) for x in (q, k, v)]
    more = dict(config=case.config, interpret=interpret)
    got, got_lse = attend(sm90.paged_attention, case, arrays, args, **more)
    want, want_lse = oracle(case, q, args, parts, trees, dtype)
    peer, _ = attend(xla.paged_attention, case, arrays, args)
    assert np.isfinite(got).all()
    ulp = float(jnp.finfo(dtype).eps) * np.abs(want).max(initial=0.0)
    error, allowed = np.abs(got - want).max(initial=0.0), 2 * np.abs(peer - want).max(initial=0.0) + ulp
    worst = np.unravel_index(np.argmax(np.abs(got - want)), got.shape)
    assert error <= allowed, f"error {error:.3g} at {worst}, plain JAX's {(allowed - ulp) / 2:.3g}"
    np.testing.assert_array_equal(np.isneginf(got_lse), np.isneginf(want_lse))
    np.testing.assert_allclose(got_lse, want_lse, rtol=2e-5, atol=2e-5)
    assert (got[np.isneginf(want_lse)] == 0).all()
    if not interpret:
        for _ in range(3):
            again, again_lse = attend(sm90.paged_attention, case, arrays, args, **more)
            assert (again == got).all() and (again_lse == got_lse).all()
    return got, got_lse


LONG = (1000, 17, 64, 1, 0, 333)
ONE = tuple(min(n, 1) for n in LONG)
E4, E5 = "float8_e4m3fn", "float8_e5m2"
WIDE = Config(groups=2, stages=2, block_kv=128)
TREES = dict(seq_lens=(1000, 150, 700), q_lens=(64, 64, 33), mask="tree")
SPLIT = Config(splits=True, parts=24)
DEVICE_CASES = dict(
    decode=Case(seq_lens=LONG, q_lens=ONE, padding=2),
    decode_direct=Case(seq_lens=LONG, q_lens=ONE, padding=2, config=Config()),
    decode_p64=Case(seq_lens=LONG, q_lens=ONE, page=64, kv_heads=8),
    decode_p256=Case(seq_lens=LONG, q_lens=ONE, page=256, group=8),
    decode_p8=Case(seq_lens=LONG, q_lens=ONE, page=8, group=1),
    decode_f16=Case(seq_lens=LONG, q_lens=ONE, page=32, group=7, dtype="float16"),
    decode_d64=Case(seq_lens=LONG, q_lens=ONE, dim=64, group=3, kv_heads=3),
    decode_d80=Case(seq_lens=LONG, q_lens=ONE, dim=80, group=6),
    decode_d96=Case(seq_lens=LONG, q_lens=ONE, dim=96, group=16),
    decode_d256=Case(seq_lens=LONG, q_lens=ONE, dim=256, group=4),
    decode_v64=Case(seq_lens=LONG, q_lens=ONE, dim=128, v_dim=64),
    decode_v64_direct=Case(seq_lens=LONG, q_lens=ONE, dim=128, v_dim=64, config=Config()),
    decode_p1=Case(seq_lens=LONG, q_lens=ONE, page=1),
    decode_p4_d64=Case(seq_lens=LONG, q_lens=ONE, page=4, dim=64, config=Config()),
    decode_p2_d80=Case(seq_lens=LONG, q_lens=ONE, page=2, dim=80, v_dim=96, group=8),
    tree_p1=Case(seq_lens=(1000, 50, 700), q_lens=(16, 16, 9), mask="tree", page=1),
    decode_window=Case(seq_lens=LONG, q_lens=ONE, window=100, cap=20.0, sinks=True),
    decode_invariant=Case(seq_lens=LONG, q_lens=ONE, sinks=True, config=Config(splits=True, part_blocks=4)),
    chain=Case(seq_lens=(1000, 50, 9, 700), q_lens=(5, 3, 1, 8), group=4),
    chain_window=Case(seq_lens=(1000, 50, 9, 700), q_lens=(5, 3, 1, 8), group=3, window=33, padding=3, sinks=True),
    chain_early=Case(seq_lens=(3, 500), q_lens=(6, 2), group=7),
    full=Case(seq_lens=(100, 31), q_lens=(10, 4), mask="full"),
    tree=Case(seq_lens=(1000, 50, 700), q_lens=(16, 16, 9), mask="tree"),
    tree_split=Case(seq_lens=(1000, 50, 700), q_lens=(16, 16, 9), mask="tree", config=SPLIT, sinks=True),
    tree_window=Case(seq_lens=(1000, 50, 700), q_lens=(16, 16, 9), mask="tree", window=40, group=6),
    tree_wide=Case(seq_lens=(1000, 150, 700), q_lens=(64, 64, 33), mask="tree"),
    tree_wide_direct=Case(seq_lens=(1000, 150, 700), q_lens=(64, 64, 33), mask="tree", config=WIDE),
    tree_wide_64=Case(seq_lens=(1000, 150, 700), q_lens=(64, 64, 33), mask="tree", config=Config(groups=2, stages=5)),
    chain_wide=Case(seq_lens=(1000, 150, 700), q_lens=(64, 64, 33), page=64),
    tree_wide_window=Case(seq_lens=(1000, 150, 700), q_lens=(64, 64, 33), mask="tree", window=70, cap=20.0),
    tree_wide_sharers=Case(**TREES, config=Config(groups=2, stages=3, block_kv=128, sharers=2)),
    tree_wide_sharers_split=Case(
        **TREES, sinks=True, config=Config(groups=2, stages=2, block_kv=128, sharers=2, splits=True, parts=12)
    ),
    tree_wide_sharers_p64=Case(**TREES, page=64, padding=3, kv_heads=8, config=Config(groups=2, stages=5, sharers=2)),
    tree_wide_sharers_p8=Case(**TREES, page=8, dim=64, config=Config(groups=2, stages=3, block_kv=128, sharers=2)),
    tree_wide_rise=Case(**TREES, rise=9.0, config=WIDE),
    tree_wide_rise_sharers=Case(**TREES, rise=3.0, group=6, page=32, dtype="float16"),
    chain_wide_sharers=Case(
        seq_lens=(1000, 150, 700, 0), q_lens=(64, 40, 33, 0), page=64, window=77, sinks=True, padding=5,
        config=Config(groups=2, stages=3, sharers=2),
    ),
    padded=Case(seq_lens=(100, 50, 60), q_lens=(1, 1, 1), padding=200, dim=64),
    fp8=Case(seq_lens=LONG, q_lens=ONE, padding=2, kv_dtype=E4),
    fp8_direct=Case(seq_lens=LONG, q_lens=ONE, page=64, kv_heads=8, kv_dtype=E4, config=Config(stages=4)),
    fp8_large=Case(seq_lens=LONG, q_lens=ONE, kv_dtype=E4, q_size=3e5),
    fp8_small=Case(seq_lens=LONG, q_lens=ONE, kv_dtype=E4, q_size=1e-6, page=64, rise=2.0),
    fp8_f16=Case(seq_lens=LONG, q_lens=ONE, dim=64, group=7, dtype="float16", kv_dtype=E4),
    fp8_e5m2=Case(seq_lens=LONG, q_lens=ONE, dim=96, v_dim=64, page=256, kv_dtype=E5),
    fp8_e5m2_f16=Case(seq_lens=LONG, q_lens=ONE, page=8, dtype="float16", kv_dtype=E5, config=Config()),
    fp8_p1=Case(seq_lens=LONG, q_lens=ONE, page=1, dim=80, group=3, kv_dtype=E4, config=Config()),
    fp8_d256=Case(seq_lens=LONG, q_lens=ONE, dim=256, kv_dtype=E4, sinks=True, window=200),
    fp8_tree=Case(seq_lens=(1000, 50, 700), q_lens=(16, 16, 9), mask="tree", kv_dtype=E4, cap=20.0, sinks=True),
    fp8_tree_wide=Case(seq_lens=(1000, 150, 700), q_lens=(64, 64, 33), mask="tree", kv_dtype=E4),
    fp8_cluster=Case(seq_lens=LONG, q_lens=ONE, kv_dtype=E4, config=Config(cluster=4)),
    decode_copier=Case(seq_lens=LONG, q_lens=ONE, padding=2, config=Config(stages=3, copier=True)),
    chain_copier=Case(
        seq_lens=(1000, 50, 9, 700),
        q_lens=(5, 3, 1, 8),
        group=3,
        window=33,
        padding=3,
        sinks=True,
        config=Config(stages=2, copier=True, splits=True, parts=12),
    ),
    decode_cluster=Case(seq_lens=LONG, q_lens=ONE, padding=2, config=Config(cluster=16, stages=2)),
    decode_cluster_p1=Case(seq_lens=LONG, q_lens=ONE, page=1, config=Config(cluster=4)),
    decode_cluster_v64=Case(seq_lens=LONG, q_lens=ONE, dim=128, v_dim=64, sinks=True, config=Config(cluster=8)),
    decode_cluster_d80=Case(seq_lens=LONG, q_lens=ONE, dim=80, group=6, window=100, config=Config(cluster=2)),
    tree_cluster=Case(
        seq_lens=(1000, 50, 700), q_lens=(16, 16, 9), mask="tree", sinks=True, config=Config(cluster=16, stages=2)
    ),
    tree_wide_cluster=Case(
        seq_lens=(1000, 150, 700), q_lens=(64, 64, 33), mask="tree", config=Config(groups=2, stages=3, cluster=4)
    ),
    tree_wide_narrow=Case(seq_lens=(1000, 150, 700), q_lens=(64, 64, 33), mask="tree", config=Config(), group=8),
)  # fmt: skip
INTERPRETED = dict(
    decode=Case(seq_lens=(70, 0, 5), q_lens=(1, 0, 1), kv_heads=1, dim=64, padding=1, config=Config(stages=2)),
    fp8=Case(seq_lens=(70,), q_lens=(1,), kv_heads=1, dim=64, page=64, kv_dtype=E4, config=Config(stages=2)),
    tree=Case(
        seq_lens=(140,), q_lens=(5,), dim=64, kv_heads=1, page=64, mask="tree", window=30,
        config=Config(stages=2, splits=True, parts=3),
    ),
)  # fmt: skip
INTERPRETED_LONG = dict(
    window=Case(
        seq_lens=(150, 20), q_lens=(5, 3), dim=64, kv_heads=1, group=3, page=64, window=40, cap=5.0, sinks=True,
        config=Config(stages=2),
    ),
    small_pages=Case(seq_lens=(70,), q_lens=(1,), kv_heads=1, dim=64, page=4, config=Config(stages=2)),
    copier=Case(seq_lens=(200,), q_lens=(1,), kv_heads=1, dim=64, config=Config(stages=2, copier=True)),
    trees=Case(
        seq_lens=(150, 20), q_lens=(5, 3), dim=64, kv_heads=1, mask="tree", window=30,
        config=Config(stages=2, splits=True, parts=6),
    ),
)  # fmt: skip


@pytest.mark.device
@pytest.mark.parametrize("name", DEVICE_CASES)
def test_the_kernel_is_as_accurate_as_plain_jax_on_a_gpu(name):
    check(DEVICE_CASES[name])


@pytest.mark.parametrize(
    "name", [*INTERPRETED, *(pytest.param(name, marks=pytest.mark.long) for name in INTERPRETED_LONG)]
)
def test_the_interpreted_kernel_is_as_accurate_as_plain_jax_and_has_no_race(name):
    check((INTERPRETED | INTERPRETED_LONG)[name], interpret=plgpu.InterpretGPUParams(detect_races=True))


@pytest.mark.device
@pytest.mark.parametrize("v_dim", [64, 128])
def test_values_narrower_than_keys_come_out_of_splits_each_time(v_dim):
    # An early version once failed here with an error of 0.2; many lengths and many repeats look for a race.
    run = jax.jit(
        lambda q, k, v, args: sm90.paged_attention(q, k, v, **args, max_q_len=1, sm_scale=128**-0.5, config=SPLIT)
    )
    for seed in range(8):
        lens = (2999, *np.random.default_rng(seed).integers(500, 3000, 5).tolist())
        case = Case(seq_lens=lens, q_lens=(1,) * 6, v_dim=v_dim, config=SPLIT, seed=seed)
        (q, k, v), args, parts, trees = draw(case)
        room = 6 * 190 * 2 - k.shape[0]  # one shape for all lengths
        k, v = (np.concatenate([x, np.full((room, *x.shape[1:]), np.nan, np.float32)]) for x in (k, v))
        arrays = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
        outs = np.asarray([np.asarray(run(*arrays, args)[0], np.float32) for _ in range(200)])
        want, _ = oracle(case, q, args, parts, trees, jnp.bfloat16)
        np.testing.assert_allclose(outs[0], want, rtol=1e-2, atol=2e-3)
        assert (outs == outs[:1]).all()


@pytest.mark.device
def test_fixed_parts_give_the_same_bits_at_any_batch_size():
    case = Case(seq_lens=LONG, q_lens=ONE, config=Config(splits=True, part_blocks=4))
    (q, k, v), args, _, _ = draw(case)
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    together, _ = attend(sm90.paged_attention, case, arrays, args, config=case.config)
    single = dataclasses.replace(case, seq_lens=LONG[:1], q_lens=(1,))
    alone = args | dict(
        page_table=args["page_table"][:1], seq_lens=args["seq_lens"][:1], cu_q_lens=args["cu_q_lens"][:2]
    )
    out, _ = attend(sm90.paged_attention, single, [arrays[0][:1], *arrays[1:]], alone, config=case.config)
    assert (out[0] == together[0]).all()
