"""Sampling against a float64 oracle that sorts: kept sets are exact, draws are within the bound of a right sampler."""

import dataclasses
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import sampling
from jattn.sampling import SamplingParams, draw, greedy

N = 20_000  # samples of a distribution
sample = jax.jit(sampling.sample, static_argnums=3)
token_probs = jax.jit(sampling.token_probs, static_argnums=2)


def params(n, *, temperature: Any = 1.0, top_k: Any = 0, top_p: Any = 1.0, min_p: Any = 0.0, seed: Any = 0):
    """Parameters of n rows; scalars are repeated."""

    def column(value, dtype):
        return jnp.asarray(np.broadcast_to(np.asarray(value), (n,)), dtype)

    return dataclasses.replace(
        SamplingParams.greedy(n),
        temperature=column(temperature, jnp.float32),
        top_k=column(top_k, jnp.int32),
        top_p=column(top_p, jnp.float32),
        min_p=column(min_p, jnp.float32),
        seed=column(seed, jnp.uint32),
    )


def softmax64(logits, temperature):
    x = np.asarray(logits, np.float64) / temperature
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def leading(probs, num):
    """The `num` largest, of equals the lowest ids."""
    keep = np.zeros(len(probs), bool)
    keep[np.argsort(-probs, kind="stable")[:num]] = True
    return keep


def restrict(probs, keep):
    return np.where(keep, probs, 0.0) / probs[keep].sum()


def oracle_probs(logits, temperature, top_k, top_p, min_p):
    """The documented order: temperature, top_k, top_p on what is left, min_p times the largest."""
    probs = softmax64(logits, temperature)
    if top_k:
        probs = restrict(probs, leading(probs, top_k))
    if top_p < 1:
        before = np.cumsum(np.sort(probs)[::-1]) - np.sort(probs)[::-1]
        probs = restrict(probs, leading(probs, max(1, int(np.sum(before < top_p)))))
    return restrict(probs, probs >= min_p * probs.max())


def between(rng, values):
    """A number that lies well between two neighbours of `values`, or 1 where all are close together."""
    values = np.unique(values)
    wide = np.nonzero(np.diff(values) > 1e-4)[0]
    if not len(wide):
        return 1.0
    at = rng.choice(wide)
    return float((values[at] + values[at + 1]) / 2)


def draw_row(rng, width):
    """Logits on a coarse grid, so that many tie, and parameters none of which lies within rounding of a boundary."""
    logits = rng.integers(-6, 7, width) * 0.5
    temperature = float(rng.choice([0.5, 1.0, 2.0]))
    top_k = int(rng.choice([0, 2, 3, rng.integers(2, width + 3)]))
    top_p = min_p = None
    kept = oracle_probs(logits, temperature, top_k, 1.0, 0.0)
    top_p = between(rng, np.cumsum(np.sort(kept)[::-1])) if rng.random() < 0.7 else 1.0
    kept = oracle_probs(logits, temperature, top_k, top_p, 0.0)
    min_p = between(rng, kept / kept.max()) if rng.random() < 0.5 else 0.0
    return logits, temperature, top_k, top_p, (min_p if min_p < 1 else 0.0)


def draw_rows(seed, rows, width):
    rng = np.random.default_rng(seed)
    logits, *columns = zip(*(draw_row(rng, width) for _ in range(rows)), strict=True)
    names = ("temperature", "top_k", "top_p", "min_p")
    return np.stack(logits).astype(np.float32), dict[str, Any](zip(names, map(np.asarray, columns), strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_ties_of_the_greedy_choice_go_to_the_lowest_id_in_every_function(dtype):
    case = cases.build("C16", dtype)
    logits, vocab = jnp.asarray(case.inputs["logits"]), case.inputs["vocab"]
    rows = logits.shape[0]
    assert case.check({"token": np.asarray(greedy(logits, vocab))}) == []
    one_hot = token_probs(logits, params(rows, temperature=0.0), vocab)
    assert case.check({"token": np.argmax(one_hot, -1).astype(np.int32)}) == []
    assert (np.sort(one_hot, -1)[:, -2:] == [0, 1]).all()
    mixed = params(rows + 1, temperature=[0.0, 1.0] * 3 + [1.0], top_k=[0, 1] * 3 + [0])  # 0 and top_k 1; one random
    batch = jnp.concatenate([logits, logits[:1]])
    got = np.asarray(sample(batch, mixed, jnp.arange(rows + 1, dtype=jnp.int32), vocab))
    assert case.check({"token": got[:rows]}) == []


def test_greedy_and_random_requests_share_a_batch():
    case = cases.build("C19")
    ins = case.inputs
    rows = len(ins["temperature"])
    knobs = params(rows, **{name: ins[name] for name in ("temperature", "top_k", "top_p")})
    logits = jnp.asarray(ins["logits"])
    assert case.check({"probs": np.asarray(token_probs(logits, knobs))}) == []
    for position in range(20):
        got = np.asarray(sample(logits, knobs, jnp.full(rows, position, jnp.int32)))
        certain = case.expected["probs"].max(-1) == 1
        assert certain.sum() >= 4
        assert (got == case.expected["probs"].argmax(-1))[certain].all()


def test_drawn_filters_keep_exactly_the_tokens_of_the_oracle():
    width = 24
    logits, knobs = draw_rows(0, 1024, width)
    got = np.asarray(token_probs(jnp.asarray(logits), params(1024, **knobs)), np.float64)
    sizes = set()
    for row in range(1024):
        want = oracle_probs(logits[row], *(knobs[name][row] for name in ("temperature", "top_k", "top_p", "min_p")))
        assert ((got[row] > 0) == (want > 0)).all(), {name: knobs[name][row] for name in knobs}
        np.testing.assert_allclose(got[row], want, rtol=2e-5)
        sizes.add(int((want > 0).sum()))
    assert sizes == set(range(1, width + 1))  # the drawing covers every number of kept tokens


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 4), (0.625, 5), (0.51, 5), (0.125, 1), (1e-9, 1), (0.99, 8)])
def test_top_p_is_reached_exactly_among_eight_equal_tokens(top_p, kept):
    got = np.asarray(token_probs(jnp.zeros((1, 8)), params(1, top_p=top_p)))[0]
    np.testing.assert_array_equal(got > 0, np.arange(8) < kept)


def test_min_p_of_one_keeps_every_largest_token():
    got = np.asarray(token_probs(jnp.array([[1.0, 2, 2, 0, 2, 1, 0, 2]]), params(1, min_p=1.0)))[0]
    np.testing.assert_array_equal(got, [0, 0.25, 0.25, 0, 0.25, 0, 0, 0.25])


def test_top_k_of_a_large_vocabulary_keeps_the_largest():
    logits = cases.draw(5, 2, 49152, amp=8)
    got = np.asarray(token_probs(jnp.asarray(logits), params(2, top_k=[40, 1000])))
    for row, top_k in enumerate((40, 1000)):
        probs = softmax64(logits[row], 1.0).astype(np.float32)  # ties of float32 probabilities rank by id
        assert (got[row] > 0).sum() == top_k
        assert probs[got[row] > 0].min() >= probs[got[row] == 0].max()


def test_zeros_of_either_sign_are_equal():
    logits = jnp.array([[-0.0, 0.0, -1.0, 0.0]])
    assert greedy(logits).tolist() == [0]
    two = np.asarray(token_probs(logits, params(1, top_k=2)))[0]
    np.testing.assert_array_equal(two > 0, [True, True, False, False])


def test_columns_past_the_vocabulary_have_no_mass_however_large():
    logits = cases.draw(7, 48, 24)
    logits[:, 20:] = 50.0
    knobs = params(48, temperature=[0.0, 1.0, 2.0, 1.0] * 12, top_p=[1.0, 1.0, 0.7, 0.9] * 12)
    probs = np.asarray(token_probs(jnp.asarray(logits), knobs, 20))
    assert (probs[:, 20:] == 0).all()
    np.testing.assert_allclose(probs.sum(-1), 1.0, rtol=1e-6)
    shorter = np.asarray(token_probs(jnp.asarray(logits[:, :20]), knobs))
    np.testing.assert_allclose(probs[:, :20], shorter, rtol=1e-6)
    assert np.asarray(sample(jnp.asarray(logits), knobs, jnp.arange(48, dtype=jnp.int32), 20)).max() < 20


@pytest.mark.parametrize("temperature", [1e-40, 2e-38, 1e-6, 1e4, 3e38])
def test_any_finite_temperature_gives_a_distribution(temperature):
    logits = jnp.array([[1e4, -1e4, 9e3, 1.0], [-3.0, 2.0, 2.5, 2.0]])
    probs = np.asarray(token_probs(logits, params(2, temperature=temperature)))
    np.testing.assert_allclose(probs.sum(-1), 1.0, rtol=1e-6)
    if temperature < 1:
        np.testing.assert_array_equal(probs, [[1, 0, 0, 0], [0, 0, 1, 0]])


def test_a_token_depends_on_its_own_row_seed_and_position_alone():
    logits, knobs = draw_rows(1, 48, 24)
    knobs["temperature"][::3] = 0.0
    for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):  # a third of the rows is filtered
        knobs[name][1::3] = off
    seeds, positions = np.arange(48) * 7, np.arange(48, dtype=np.int32) % 5
    want = np.asarray(sample(jnp.asarray(logits), params(48, **knobs, seed=seeds), jnp.asarray(positions)))
    order = cases.permutation(3, 48)
    permuted = {name: column[order] for name, column in knobs.items()}
    got = sample(jnp.asarray(logits[order]), params(48, **permuted, seed=seeds[order]), jnp.asarray(positions[order]))
    np.testing.assert_array_equal(np.asarray(got), want[order])
    probs = np.asarray(token_probs(jnp.asarray(logits), params(48, **knobs)))
    plain = np.asarray(token_probs(jnp.asarray(logits), params(48, temperature=knobs["temperature"])))
    np.testing.assert_array_equal(probs[1::3], plain[1::3])  # bit by bit: filtered neighbours change nothing
    for row in (0, 1, 2):  # greedy, unfiltered, filtered
        alone = {name: column[row : row + 1] for name, column in knobs.items()}
        one = jnp.asarray(logits[row : row + 1])
        assert sample(one, params(1, **alone, seed=seeds[row]), jnp.asarray(positions[row : row + 1])) == want[row]
        np.testing.assert_array_equal(np.asarray(token_probs(one, params(1, **alone)))[0], probs[row])


def test_rows_take_the_parameters_of_their_request():
    knobs = params(
        3, temperature=[0.0, 0.5, 2.0], top_k=[1, 2, 3], top_p=[1, 0.5, 0.25], min_p=[0, 0.1, 0.2], seed=[4, 5, 6]
    )
    rows = knobs.at(jnp.array([2, 0, 0, 1], jnp.int32))
    assert rows.temperature.tolist() == [2.0, 0.0, 0.0, 0.5]
    assert rows.top_k.tolist() == [3, 1, 1, 2]
    assert rows.seed.tolist() == [6, 4, 4, 5]
    np.testing.assert_allclose(rows.top_p, [0.25, 1, 1, 0.5])
    np.testing.assert_allclose(rows.min_p, [0.2, 0, 0, 0.1])


def frequencies(tokens, outcomes):
    return np.bincount(np.asarray(tokens), minlength=outcomes) / len(tokens)


LOGITS = cases.draw(11, 12, amp=2)
KNOBS: list[dict[str, Any]] = [
    dict(),
    dict(temperature=0.6),
    dict(top_k=5),
    dict(top_p=0.7),
    dict(min_p=0.3, temperature=1.5, top_k=9),
]


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
@pytest.mark.parametrize("over", ["seeds", "positions"])
def test_draws_follow_the_distribution(knobs, over):
    many = np.arange(N)
    seeds, positions = (many, many * 0 + 3) if over == "seeds" else (many * 0 + 3, many)
    logits = jnp.asarray(np.broadcast_to(LOGITS, (N, 12)))
    tokens = sample(logits, params(N, **knobs, seed=seeds), jnp.asarray(positions, jnp.int32))
    full = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) | knobs
    want = oracle_probs(LOGITS, *full.values())
    got = frequencies(tokens, 12)
    assert (got[want == 0] == 0).all()
    assert cases.tv(got, want) < cases.tv_bound(12, N)


@pytest.mark.parametrize(("d_seed", "d_position"), [(0, 1), (1, 0), (1, -1)])
def test_draws_of_neighbouring_seeds_and_positions_are_independent(d_seed, d_position):
    probs = np.array([0.5, 0.25, 0.125, 0.125])
    logits = jnp.asarray(np.broadcast_to(np.append(np.log(probs), [-np.inf] * 8), (N, 12)), jnp.float32)
    seeds, positions = np.arange(N) // 100 * 3, np.arange(N) % 100 * 3 + 1  # so that no coin is used twice
    first = sample(logits, params(N, seed=seeds), jnp.asarray(positions, jnp.int32))
    second = sample(logits, params(N, seed=seeds + d_seed), jnp.asarray(positions + d_position, jnp.int32))
    pairs = np.asarray(first) * 4 + np.asarray(second)
    assert cases.tv(frequencies(pairs, 16), np.outer(probs, probs).ravel()) < cases.tv_bound(16, N)


def test_a_greedy_row_among_random_ones_stays_greedy():
    logits = jnp.asarray(np.broadcast_to(LOGITS, (N, 12)))
    cold = np.arange(N) % 2 == 0
    knobs = params(N, temperature=np.where(cold, 0.0, 1.0), seed=np.arange(N))
    tokens = np.asarray(sample(logits, knobs, jnp.zeros(N, jnp.int32)))
    assert (tokens[cold] == LOGITS.argmax()).all()
    assert cases.tv(frequencies(tokens[~cold], 12), softmax64(LOGITS, 1.0)) < cases.tv_bound(12, N // 2)


def test_no_coin_lands_on_a_token_without_mass():
    """A float32 prefix sum is not monotone: coins on and beside each of its values are the ones that go wrong."""
    width = 1000
    probs = np.where(np.arange(width) % 25 == 3, np.abs(cases.draw(13, width)) ** 4, 0.0).astype(np.float32)
    probs /= probs.sum()
    cdf = np.asarray(jnp.cumsum(jnp.asarray(probs)[None], axis=-1))[0]
    assert (np.diff(cdf)[probs[1:] == 0] != 0).any()  # what makes this worth a test
    on = cdf / cdf[-1]
    coins = np.concatenate([on, np.nextafter(on, np.float32(0)), np.nextafter(on, np.float32(2))])
    coins = np.concatenate([coins[coins < 1], [0.0, np.nextafter(np.float32(1), np.float32(0))]]).astype(np.float32)
    got = np.asarray(draw.pick(jnp.asarray(np.broadcast_to(probs, (len(coins), width))), jnp.asarray(coins)))
    assert (probs[got] > 0).all()
    exact = np.cumsum(probs.astype(np.float64))
    assert (coins < exact[got] / exact[-1] + 1e-6).all()
    assert (coins > (exact[got] - probs[got]) / exact[-1] - 1e-6).all()


def test_sampling_is_the_same_outside_jit():
    logits, knobs = draw_rows(1, 48, 24)
    args = jnp.asarray(logits), params(48, **knobs, seed=np.arange(48)), jnp.arange(48, dtype=jnp.int32)
    np.testing.assert_array_equal(np.asarray(sampling.sample(*args)), np.asarray(sample(*args)))
