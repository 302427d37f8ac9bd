"""The Hopper latent attention against float64: on a GPU (marker `device`), and interpreted with race detection here."""
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

from pallas_kernels._common import latent_rows
from pallas_kernels._common.masks import Rules
from pallas_kernels.attention import mosaic_gpu_sm90_schedule as schedules
from pallas_kernels.mla import mosaic_gpu_sm90 as sm90
from pallas_kernels.mla import xla
from pallas_kernels.mla.mosaic_gpu_sm90_config import Config, heuristic, stages_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A ragged batch; the query rows are the newest keys."""

    seq_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    heads: int = 16
    latent: int = 512
    rope: int = 64
    page: int = 64
    mask: str = "causal"
    padding: int = 0  # rows after the last request
    dtype: str = "bfloat16"
    config: Config | None = None
    seed: int = 0
    packed: bool = False  # 8-bit rows with scales
    rise: float = 1.0  # how much larger the newest keys are than the oldest, so that maxima keep growing


def draw(case: Case):
    """Queries, pages, arguments, and each request's rows and tree; NaN and wild ids in all that must not be read."""
    rng = np.random.default_rng(case.seed)
    width = case.latent + case.rope
    need = [-(-n // case.page) for n in case.seq_lens]
    layer = sum(need) + 2
    order = layer + rng.permutation(layer)  # two layers; the second is attended to
    table = rng.integers(-(2**31), 2**31 - 1, (len(need), max(*need, 1) + 2), dtype=np.int64).astype(np.int32)
    pages = np.full((2 * layer, case.page, width), np.nan, np.float32)
    at, parts = 0, []
    for b, n in enumerate(case.seq_lens):
        ids = order[at : at + need[b]]
        at += need[b]
        table[b, : need[b]] = ids - layer
        rows = rng.standard_normal((n, width)).astype(np.float32)
        rows *= np.linspace(1, case.rise, n, dtype=np.float32)[:, None]
        pages[ids[np.arange(n) // case.page], np.arange(n) % case.page] = rows
        parts.append(rows)
    cu = np.cumsum([0, *case.q_lens]).astype(np.int32)
    if case.packed:
        pages, parts = _packed(case, pages), [_unpacked(case, _packed(case, rows)) for rows in parts]
    q = rng.standard_normal((cu[-1] + case.padding, case.heads, width)).astype(np.float32)
    args = dict(page_table=table, page_offset=np.int32(layer), seq_lens=np.int32(case.seq_lens), cu_q_lens=cu)
    trees = [None] * len(need)
    if case.mask == "tree":
        trees, arrays = _trees(case, rng, cu, len(q))
        args |= arrays
    return q, pages, {name: jnp.asarray(x) for name, x in args.items()}, parts, trees


def _packed(case: Case, rows):
    """Bytes of rows; of NaN where they are NaN."""
    flat = jnp.asarray(rows.reshape(-1, rows.shape[-1]))
    bits = np.array(latent_rows.pack(flat[:, : case.latent], flat[:, case.latent :], jnp.uint8))
    bits[np.isnan(np.asarray(flat)).any(1)] = 255
    return bits.reshape(*rows.shape[:-1], bits.shape[-1])  # of no row, too


def _unpacked(case: Case, bits):
    return np.asarray(latent_rows.unpack(jnp.asarray(bits), case.latent, jnp.float32))


def _trees(case: Case, rng, cu, num_tokens: int):
    bits = np.zeros((num_tokens, -(-max(case.q_lens) // 32)), np.uint32)
    starts, trees = np.int32(case.seq_lens) - np.int32(case.q_lens), []
    for b, n in enumerate(case.q_lens):
        seen = np.eye(n, dtype=bool)
        for i in range(1, n):
            seen[i] |= seen[rng.integers(0, i)]
        for i, j in zip(*np.nonzero(seen), strict=True):
            bits[cu[b] + i, j // 32] |= np.uint32(1) << np.uint32(j % 32)
        positions = starts[b] + seen.sum(1) - 1
        trees.append(dict(start=starts[b], bits=seen, q_positions=positions, kv_positions=positions))
    return trees, dict(tree_bits=bits, tree_starts=starts)


def rounded(x, dtype):
    """Float64 values of what `dtype` holds."""
    return np.asarray(jnp.asarray(x, dtype).astype(jnp.float32), np.float64)


def oracle(case: Case, q, parts, trees):
    """out and lse in float64, from inputs rounded to the dtype; zeros and -inf for padding."""
    out, lse = np.zeros((*q.shape[:2], case.latent)), np.full(q.shape[:2], -np.inf)
    at = 0
    for n, rows, tree in zip(case.q_lens, parts, trees, strict=True):
        if n:
            rows = rounded(rows, "float32" if case.packed else case.dtype)[:, None]
            seen = float64.visible(n, len(rows), mask=case.mask, tree=tree)
            out[at : at + n], lse[at : at + n] = float64.attend(
                rounded(q[at : at + n], case.dtype),
                rows,
                rows[..., : case.latent],
                seen,
                sm_scale=(case.latent + case.rope) ** -0.5,
            )
        at += n
    return out, lse


def compiled(function, case: Case, **more):
    """One form of the op, of (q, pages, args)."""
    static = dict(latent_dim=case.latent, max_q_len=max(case.q_lens), mask=case.mask, **more)
    static["sm_scale"] = (case.latent + case.rope) ** -0.5
    return jax.jit(lambda q, pages, args: function(q, pages, **args, **static))


def attend(run, case: Case, q, pages, args):
    """Results of what `compiled` made, in float64."""
    pages = jnp.asarray(pages, pages.dtype if case.packed else case.dtype)
    return [np.asarray(x, np.float64) for x in run(jnp.asarray(q, case.dtype), pages, args)]


def check(case: Case, interpret=False):
    """The kernel's error is at most twice plain JAX's in the same dtype, and a repeat has the same bits."""
    q, pages, args, parts, trees = draw(case)
    run = compiled(sm90.attend_latent, case, config=case.config, interpret=interpret)
    got, got_lse = attend(run, case, q, pages, args)
    want, want_lse = oracle(case, q, parts, trees)
    peer, peer_lse = attend(compiled(xla.attend_latent, case), case, q, pages, args)
    assert np.isfinite(got).all()
    ulp = float(jnp.finfo(case.dtype).eps) * np.abs(want).max(initial=0.0)
    error, allowed = np.abs(got - want).max(initial=0.0), 2 * np.abs(peer - want).max(initial=0.0) + ulp
    worst = np.unravel_index(np.argmax(np.abs(got - want)), got.shape)
    assert error <= allowed, f"error {error:.3g} at {worst}, plain JAX's {(allowed - ulp) / 2:.3g}"
    np.testing.assert_array_equal(np.isneginf(got_lse), np.isneginf(want_lse))
    seen = np.isfinite(want_lse)
    rounding = 2 * np.abs(peer_lse[seen] - want_lse[seen]).max(initial=0.0) if case.packed else 0.0  # of widened rows
    np.testing.assert_allclose(got_lse, want_lse, rtol=2e-5, atol=2e-5 + rounding)
    assert (got[np.isneginf(want_lse)] == 0).all()
    if not interpret:
        for _ in range(3):
            again, again_lse = attend(run, case, q, pages, args)
            assert (again == got).all() and (again_lse == got_lse).all()
    return got, got_lse


LONG = (1000, 17, 64, 1, 0, 333, 128)
ONE = tuple(min(n, 1) for n in LONG)
CHAIN = dict(seq_lens=(1000, 50, 9, 700), q_lens=(5, 3, 1, 8))
TREES = dict(seq_lens=(1000, 150, 700), q_lens=(64, 64, 33), mask="tree")
NARROW = dict(heads=9, latent=192, rope=192)
WHOLE, SPLIT, PAIR = Config(), Config(splits=True, parts=24), Config(sharers=2)
DEVICE_CASES = dict(
    decode=Case(seq_lens=LONG, q_lens=ONE, padding=2),
    decode_whole=Case(seq_lens=LONG, q_lens=ONE, padding=2, config=WHOLE),
    decode_split=Case(seq_lens=LONG, q_lens=ONE, config=SPLIT),
    decode_invariant=Case(seq_lens=LONG, q_lens=ONE, config=Config(splits=True, part_blocks=3)),
    decode_rise=Case(seq_lens=LONG, q_lens=ONE, rise=9.0, config=WHOLE),
    **{f"decode_h{heads}": Case(seq_lens=LONG, q_lens=ONE, heads=heads, padding=1) for heads in (8, 9, 32, 64)},
    decode_h96=Case(seq_lens=LONG, q_lens=ONE, heads=96, padding=3),
    decode_h128=Case(seq_lens=LONG, q_lens=ONE, heads=128, padding=3),
    decode_h128_whole=Case(seq_lens=LONG, q_lens=ONE, heads=128, config=PAIR),
    decode_h128_rise=Case(seq_lens=LONG, q_lens=ONE, heads=128, rise=3.0, config=PAIR),
    decode_h128_ahead=Case(seq_lens=LONG, q_lens=ONE, heads=128, rise=3.0, config=dataclasses.replace(PAIR, ahead=2)),
    decode_h128_invariant=Case(
        seq_lens=LONG, q_lens=ONE, heads=128, config=dataclasses.replace(PAIR, splits=True, part_blocks=3, ahead=2)
    ),
    chain_rise_h128=Case(seq_lens=(900, 70), q_lens=(3, 2), heads=96, rise=4.0, dtype="float16", page=16),
    **{
        f"decode_p{page}_h{heads}": Case(seq_lens=LONG, q_lens=ONE, page=page, heads=heads)
        for page in (1, 2, 4, 8, 16, 32, 128, 256)
        for heads in (16, 128)
    },
    decode_f16=Case(seq_lens=LONG, q_lens=ONE, dtype="float16"),
    decode_f16_h128=Case(seq_lens=LONG, q_lens=ONE, dtype="float16", heads=128, rise=2.0),
    smollm=Case(seq_lens=LONG, q_lens=ONE, **NARROW, padding=1),
    smollm_p1=Case(seq_lens=LONG, q_lens=ONE, **NARROW, page=1),
    smollm_chain=Case(**CHAIN, **NARROW, page=16),
    smollm_tree=Case(**TREES, **NARROW, page=16),
    **{f"latent_{a}_{b}": Case(**CHAIN, latent=a, rope=b) for a, b in ((256, 64), (128, 64), (64, 32), (32, 16))},
    chain=Case(**CHAIN, padding=3),
    chain_h8=Case(**CHAIN, heads=8, page=16),
    chain_h32=Case(**CHAIN, heads=32),
    chain_h128=Case(**CHAIN, heads=128),
    chain_early=Case(seq_lens=(3, 500), q_lens=(6, 2)),
    chain_long=Case(seq_lens=(1000, 150, 700, 0), q_lens=(64, 40, 33, 0), padding=5),
    full=Case(seq_lens=(100, 31), q_lens=(10, 4), mask="full"),
    tree=Case(seq_lens=(1000, 50, 700), q_lens=(16, 16, 9), mask="tree", padding=2),
    tree_split=Case(seq_lens=(1000, 50, 700), q_lens=(16, 16, 9), mask="tree", config=Config(splits=True, parts=24)),
    tree_h128=Case(seq_lens=(1000, 50, 700), q_lens=(16, 16, 9), mask="tree", heads=128),
    tree_p1=Case(seq_lens=(1000, 50, 700), q_lens=(16, 16, 9), mask="tree", page=1),
    tree_wide=Case(**TREES),
    tree_wide_h128=Case(**TREES, heads=128, page=16),
    tree_wide_rise=Case(**TREES, rise=5.0, page=32, dtype="float16"),
    tree_words=Case(seq_lens=(1000, 700), q_lens=(130, 100), mask="tree", heads=8),
    **{f"packed_p{page}": Case(seq_lens=LONG, q_lens=ONE, page=page, packed=True) for page in (1, 8, 16, 64, 128)},
    packed_whole=Case(seq_lens=LONG, q_lens=ONE, packed=True, padding=2, config=WHOLE),
    packed_h128=Case(seq_lens=LONG, q_lens=ONE, heads=128, packed=True),
    packed_key32=Case(seq_lens=LONG, q_lens=ONE, rope=32, packed=True),
    packed_tree=Case(**TREES, packed=True),
    padded=Case(seq_lens=(100, 50, 60), q_lens=(1, 1, 1), padding=300, heads=128),
)  # fmt: skip
_SMALL = dict(latent=64, rope=32, page=64)
INTERPRETED = dict(
    tree=Case(seq_lens=(140,), q_lens=(5,), heads=4, mask="tree", rise=9.0, padding=1, config=WHOLE, **_SMALL),
)  # fmt: skip
INTERPRETED_LONG = dict(
    decode=Case(seq_lens=(200, 0, 70), q_lens=(1, 0, 1), heads=4, padding=1, config=WHOLE, **_SMALL),
    tree_split=Case(
        seq_lens=(330,), q_lens=(5,), heads=13, mask="tree", rise=9.0, config=Config(splits=True, parts=3), **_SMALL
    ),
    widest=Case(seq_lens=(200,), q_lens=(1,), config=WHOLE),
    smollm=Case(seq_lens=(150, 20), q_lens=(5, 3), **NARROW, config=WHOLE),
    heads_128=Case(seq_lens=(200, 66), q_lens=(1, 1), heads=128, latent=64, rope=64, page=16, config=PAIR),
    small_pages=Case(seq_lens=(130,), q_lens=(1,), heads=4, latent=32, rope=16, page=2, config=WHOLE),
    large_pages=Case(seq_lens=(300, 129), q_lens=(3, 1), heads=8, latent=64, rope=64, page=128, config=WHOLE),
    chain=Case(seq_lens=(460, 3, 40), q_lens=(9, 6, 2), heads=16, dtype="float16", config=SPLIT, **_SMALL),
    four_stages=Case(seq_lens=(700,), q_lens=(1,), heads=4, rise=9.0, config=Config(stages=4), **_SMALL),
    invariant=Case(
        seq_lens=(460, 129), q_lens=(1, 1), heads=4, config=Config(splits=True, part_blocks=2), **_SMALL
    ),
    trees=Case(seq_lens=(190, 100), q_lens=(40, 33), heads=4, mask="tree", config=PAIR, **_SMALL),
    packed=Case(seq_lens=(150,), q_lens=(2,), heads=4, page=16, packed=True, config=WHOLE),
    full=Case(seq_lens=(100, 31), q_lens=(10, 4), heads=4, mask="full", config=WHOLE, **_SMALL),
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
@pytest.mark.parametrize("heads", [16, 128])
def test_bits_do_not_depend_on_the_batch_with_parts_of_a_fixed_length(heads):
    config = Config(splits=True, part_blocks=4, sharers=2 if heads > 64 else 1)
    whole = Case(seq_lens=(1000, 333, 2000, 64), q_lens=(1, 1, 1, 1), heads=heads, config=config)
    q, pages, args, *_ = draw(whole)
    out, lse = attend(compiled(sm90.attend_latent, whole, config=config), whole, q, pages, args)
    for b, length in enumerate(whole.seq_lens):
        one = dataclasses.replace(whole, seq_lens=(length,), q_lens=(1,))
        alone = dict(
            page_table=args["page_table"][b : b + 1],
            page_offset=args["page_offset"],
            seq_lens=args["seq_lens"][b : b + 1],
            cu_q_lens=jnp.arange(2, dtype=jnp.int32),
        )
        run = compiled(sm90.attend_latent, one, config=config)
        got, got_lse = attend(run, one, q[b : b + 1], pages, alone)
        assert (got[0] == out[b]).all() and (got_lse[0] == lse[b]).all()


@pytest.mark.device
def test_many_lengths_and_repeats_find_no_race_on_a_gpu():
    for seed in range(6):
        lens = tuple(np.random.default_rng(seed).integers(1, 1500, 40).tolist())
        for heads in (16, 128):
            check(Case(seq_lens=lens, q_lens=(1,) * len(lens), heads=heads, page=16 * 4 ** (seed % 2), seed=seed))


def _refusal(**changes) -> str:
    q, pages = jnp.zeros((1, 16, 576), jnp.bfloat16), jnp.zeros((2, 64, 576), jnp.bfloat16)
    one = jnp.ones(1, jnp.int32)
    args = dict(
        q=q, pages=pages, latent_dim=512, page_table=one[None], seq_lens=one, cu_q_lens=jnp.arange(2), max_q_len=1
    )
    with pytest.raises(ValueError) as error:
        sm90.attend_latent(**args | dict(sm_scale=1.0) | changes)
    return str(error.value)


def test_what_the_kernel_was_not_built_for_is_refused_with_the_way_out():
    one = jnp.zeros((1, 16, 576), jnp.float32)
    assert "float32" in _refusal(q=one) and "prefer=('xla',)" in _refusal(q=one)
    bits = jnp.zeros((2, 64, 656), jnp.uint8)
    assert "float16 over rows of uint8" in _refusal(q=one.astype(jnp.float16), pages=bits)
    assert "rows as wide" in _refusal(pages=bits[..., 1:])
    narrow = jnp.zeros((1, 16, 192), jnp.bfloat16)
    assert "want 512" in _refusal(q=narrow, latent_dim=128, pages=jnp.zeros((2, 64, 128 + 4 + 128), jnp.uint8))
    assert "129 query heads" in _refusal(q=jnp.zeros((1, 129, 576), jnp.bfloat16))
    assert "page_size=3" in _refusal(pages=jnp.zeros((2, 3, 576), jnp.bfloat16))
    assert "rows as wide" in _refusal(pages=jnp.zeros((2, 64, 640), jnp.bfloat16))
    assert "a latent of 520" in _refusal(latent_dim=520)
    assert "want sharers=2" in _refusal(q=jnp.zeros((1, 128, 576), jnp.bfloat16), config=WHOLE)
    assert "stages=3" in _refusal(config=Config(stages=3))
    assert "positive" in _refusal(sm_scale=-1.0)
    with pytest.raises(ValueError, match="want parts or part_blocks"):
        Config(splits=True)


def test_sizes_fill_the_multiprocessors_and_shared_memory():
    facts = dict(max_q_len=1, num_seqs=1, k_dim=576, kv_room=4096)
    assert [stages_of(dim) for dim in (576, 384, 96)] == [2, 3, 4]
    assert heuristic(num_heads=16, **facts) == Config(splits=True, parts=132)
    assert heuristic(num_heads=128, **facts) == Config(splits=True, parts=66, sharers=2, ahead=2)
    assert heuristic(num_heads=16, **facts | dict(num_seqs=128)) == Config()
    assert heuristic(num_heads=128, **facts | dict(num_seqs=64)) == dataclasses.replace(PAIR, ahead=2)
    assert heuristic(num_heads=16, **facts | dict(num_seqs=128, kv_room=16384)).splits


def _parts(lengths, heads: int) -> np.ndarray:
    """Parts of each request of one query token, by what the kernel takes by itself for rows of 576."""
    room = -(-max(lengths) // 64)
    config = heuristic(max_q_len=1, num_heads=heads, num_seqs=len(lengths), k_dim=576, kv_room=64 * room)
    static = dict(num_tokens=len(lengths), max_q_len=1, group=heads, page_size=64)
    make = jax.jit(functools.partial(schedules.make, config, Rules(sm_scale=1.0, mask="causal"), None, **static))
    made = make(
        seq_lens=jnp.asarray(lengths, jnp.int32),
        cu_q_lens=jnp.arange(len(lengths) + 1, dtype=jnp.int32),
        page_table=jnp.zeros((len(lengths), room), jnp.int32),
    )
    items = np.asarray(made.items)
    items = items[items[:, schedules.TOKENS] > 0]
    return np.bincount(items[:, schedules.SEQ], minlength=len(lengths))


def test_keys_are_cut_where_that_saves_more_than_parts_cost():
    assert _parts([16384] * 64, 128).tolist() == [1] * 64  # as many programs as find a multiprocessor
    assert _parts([16384] * 128, 16).tolist() == [1] * 128
    assert _parts([16384] * 64, 16).tolist() == [2] * 64  # half of the multiprocessors would be idle
    assert _parts([4096] * 16, 128).tolist() == [4] * 16
    assert _parts([4096], 16) == [32]
    assert _parts([65536, *[64] * 127], 16)[0] > 8  # nobody waits for one that is longer by far


def test_rows_of_no_token_are_packed():
    row = latent_rows.pack(jnp.zeros((0, 512)), jnp.zeros((0, 64)), jnp.uint8)
    assert row.shape == (0, 656) and row.dtype == jnp.uint8
