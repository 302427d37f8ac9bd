"""Drafts accepted or replaced: the failure cases, every coin on a grid, and whole rounds over models made of tables."""

import dataclasses
import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import AttnSpec, PagedKV
from jattn.combinators.costs import Variant
from jattn.combinators.drafter import LanguageModel
from jattn.combinators.ngram import NUM_CLASSES
from jattn.combinators.round import decode_round, model_round
from jattn.combinators.state import DecodeState, Status
from jattn.combinators.tree import DraftTree, walk
from jattn.sampling import SamplerConfig
from jattn.sampling.accept import accept_by_rejection, accept_by_thresholds

GRID = 2000  # coins at midpoints, exact for probabilities with three digits
SEQS, BATCHES = 256, 40
START = 3  # the token before the first of case C17
by_thresholds = jax.jit(accept_by_thresholds)
by_rejection = jax.jit(accept_by_rejection)


def grid(n=GRID):
    return ((np.arange(n) + 0.5) / n).astype(np.float32)


def coin_pairs():
    """Every pair of a coin for the drafts and one for what comes in their place."""
    return np.repeat(grid(200), 150), np.tile(grid(150), 200)


def repeat(row, n=GRID):
    return jnp.asarray(np.broadcast_to(np.asarray(row, np.float32), (n, len(row))))


def behind(probs, offered, coins, final, *, single=1.0, acc=1.0):
    """Tokens that come for each coin, behind one row repeated."""
    n = len(coins)
    return np.asarray(
        by_thresholds(
            repeat(probs, n),
            jnp.asarray(np.broadcast_to(np.asarray(offered, np.int32), (n, len(offered)))),
            coins=jnp.asarray(coins, jnp.float32),
            final_coins=jnp.asarray(final, jnp.float32),
            threshold_single=jnp.full(n, single, jnp.float32),
            threshold_acc=jnp.full(n, acc, jnp.float32),
        )
    )


def first_token(tree):
    """Distribution of the token behind node 0 over all pairs of coins, which are independent: a product grid."""
    probs = tree["target"][0]
    offered = [t for t, parent in zip(tree["tokens"], tree["parents"], strict=True) if parent == 0]
    coins, final = coin_pairs()
    return np.bincount(behind(probs, offered, coins, final), minlength=4) / len(coins)


def test_siblings_repeated_siblings_and_drafts_without_mass():
    case = cases.build("C18")
    a, b = case.inputs["tree_a"], case.inputs["tree_b"]
    got = {"first_token_a": first_token(a), "first_token_b": first_token(b)}
    nodes = [0, 1, 2]
    targets = [
        behind(a["target"][i], [a["tokens"][c] for c in nodes if a["parents"][c] == i] or [-1], [0.0], [0.0])[0]
        for i in nodes
    ]
    tree = DraftTree(
        tokens=jnp.asarray([a["tokens"][:3]]), parents=jnp.asarray([a["parents"][:3]]), num_nodes=jnp.asarray([3])
    )
    _, tokens, accepted = walk(tree, jnp.asarray([targets]), max_depth=2)
    got["coin0"] = np.asarray(tokens)[0, : int(accepted[0]) + 1]
    zero = case.inputs["coin0_zero_prob"]
    got["coin0_zero_prob"] = behind(zero["target"][0], [zero["tokens"][1]], [0.0], [0.0])
    assert case.check(got) == []


@pytest.mark.parametrize(
    ("single", "acc", "want"),
    [
        (1.0, 1.0, [0.5, 0.2, 0.3]),  # the target's own
        (0.3, 1.0, [0.5 * 0.7 / 0.7 * 0.0, 0.2, 0.8]),  # token 2 is likely enough: taken whenever token 1 is not
        (1.0, 0.5, [0.0, 0.4, 0.6]),  # the drafts' mass is doubled, up to all of it
        (1.0, 0.0, [0.0, 1.0, 0.0]),  # the first draft with mass
        (0.6, 0.8, [0.375, 0.25, 0.375]),
    ],
)
def test_thresholds_move_mass_to_the_drafts(single, acc, want):
    coins, final = coin_pairs()
    got = np.bincount(behind([0.5, 0.2, 0.3, 0.0], [3, 1, 2], coins, final, single=single, acc=acc), minlength=4)
    np.testing.assert_allclose(got / len(coins), [*want, 0.0], atol=6e-3)


def test_a_row_without_drafts_draws_from_the_target():
    tokens = behind([0.5, 0.2, 0.3, 0.0], [-1, -1], np.zeros(GRID), grid())
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / GRID, [0.5, 0.2, 0.3, 0.0], atol=1e-3)


def rejection(p, q, draft, coins, final):
    n = len(coins)
    drafts = jnp.full(n, draft, jnp.int32)
    return np.asarray(
        by_rejection(
            repeat(p, n), drafts, repeat(q, n), coins=jnp.asarray(coins), final_coins=jnp.asarray(final, jnp.float32)
        )
    )


def behind_a_drawn_draft(p, q):
    """Exact distribution of the token that comes, by enumeration: drafts by q, coins on a grid."""
    coins, final = coin_pairs()
    mass = np.zeros(len(p))
    for draft, chance in enumerate(q):
        if chance:
            mass += chance * np.bincount(rejection(p, q, draft, coins, final), minlength=len(p)) / len(coins)
    return mass


@pytest.mark.parametrize("prefix", [(), (0,), (1,), (2,)], ids=str)
def test_rejection_keeps_the_target_by_enumeration(prefix):
    p, q = ([float(x) for x in f(prefix)] for f in (cases.target17, cases.draft17))
    np.testing.assert_allclose(behind_a_drawn_draft(p, q), p, atol=6e-3)
    tokens = rejection(p, q, -1, grid(), grid())  # no draft: the target alone
    np.testing.assert_allclose(np.bincount(tokens, minlength=3) / GRID, p, atol=1e-3)


def test_a_draft_that_its_own_distribution_lacks_is_refused():
    assert set(rejection([0.5, 0.5, 0.0], [0.0, 1.0, 0.0], 0, grid(), grid()).tolist()) == {0}  # by the residual
    assert 2 not in rejection([0.5, 0.5, 0.0], [0.0, 0.0, 1.0], 2, grid(), grid())


class Table:
    """A language model whose next token depends on the last one: rows of probabilities."""

    def __init__(self, table):
        self.logits_of = jnp.log(jnp.asarray(table, jnp.float32))

    def __call__(self, tokens, cache, plan):
        return jax.nn.one_hot(tokens, self.logits_of.shape[0]), cache

    def logits(self, hidden):
        return jnp.matmul(hidden, jnp.maximum(self.logits_of, -1e30), precision="highest")


def table_of(distribution):
    rows = [[float(x) for x in distribution(prefix)] for prefix in [(0,), (1,), (2,), ()]]
    return Table([[*row, 0.0] for row in rows])


TARGET, DRAFTER = table_of(cases.target17), table_of(cases.draft17)


def state_of(**sampling):
    spec = AttnSpec(num_q_heads=1, num_kv_heads=1, head_dim=1)
    cache = PagedKV.create(spec, num_layers=1, num_pages=2, page_size=16)
    state = DecodeState.create(
        cache, num_seqs=SEQS, max_context=16, max_stops=1, num_classes=NUM_CLASSES, draft_cache=cache
    )
    columns = {name: jnp.full(SEQS, value, jnp.float32) for name, value in {"temperature": 1.0, **sampling}.items()}
    return dataclasses.replace(
        state,
        tokens=state.tokens.at[:, 0].set(START),
        prompt_lens=jnp.ones(SEQS, jnp.int32),
        limits=jnp.full(SEQS, 12, jnp.int32),
        status=jnp.full(SEQS, Status.DECODE, jnp.int32),
        sampling=dataclasses.replace(state.sampling, **columns),
    )


@functools.cache
def rounds_of(config: SamplerConfig, topk: int, num_steps: int, num_nodes: int):
    """Three rounds, jitted: state, seeds -> three tokens, and the drafts accepted first; num_steps 0 drafts none."""
    shapes = (Variant(rows=SEQS * num_nodes, max_q_len=num_nodes, cost=1.0),)  # drafts cost nothing: all are tried

    def step(state):
        if num_steps == 0:
            return decode_round(TARGET, state, num_steps=0, shapes=shapes, sampler=config)
        return model_round(
            TARGET,
            LanguageModel(DRAFTER, 3),
            state,
            shapes=shapes,
            sampler=config,
            topk=topk,
            num_steps=num_steps,
            num_nodes=num_nodes,
        )

    def counted(state, report):
        return state, report.counts

    @jax.jit
    def three(state, seeds):
        state = dataclasses.replace(state, sampling=dataclasses.replace(state.sampling, seed=seeds))
        state, counts = jax.lax.scan(lambda state, _: counted(*step(state)), state, length=3)
        return state.tokens[:, 1:4], counts[0] - 1

    return three


def three_tokens(three, **sampling):
    """The first three tokens of many seeds, [samples, 3], and the drafts that the first round accepted."""
    state = state_of(**sampling)
    seeds = np.arange(BATCHES * SEQS, dtype=np.uint32).reshape(BATCHES, SEQS)
    samples, accepted = zip(*(three(state, jnp.asarray(row)) for row in seeds), strict=True)
    return np.concatenate(samples), np.concatenate(accepted)


PLAIN = dict(topk=1, num_steps=0, num_nodes=1)
CHAIN, TREE = dict(topk=1, num_steps=2, num_nodes=3), dict(topk=2, num_steps=2, num_nodes=5)
REJECTION, THRESHOLDS = SamplerConfig(rejection=True), SamplerConfig(thresholds=True)


def check_joint(samples):
    case = cases.build("C17")
    keys = [tuple(key) for key in case.inputs["sequences"]]
    counts = {key: 0 for key in keys}
    for row in map(tuple, samples.tolist()):
        assert row in counts, f"{row} has probability 0"
        counts[row] += 1
    got = np.asarray([counts[key] for key in keys]) / len(samples)
    assert cases.tv(got, case.expected["probs"]) < cases.tv_bound(len(keys), len(samples))
    return got, case


@pytest.mark.parametrize(
    ("config", "sizes"),
    [(REJECTION, CHAIN), (SamplerConfig(), CHAIN), (SamplerConfig(), TREE), (THRESHOLDS, TREE)],
    ids=["rejection", "chain", "tree", "tree, thresholds at 1"],
)
def test_rounds_keep_the_joint_distribution_of_the_target(config, sizes):
    samples, accepted = three_tokens(rounds_of(config, **sizes))
    got, case = check_joint(samples)
    for fault in case.faults.values():  # they would be seen
        assert cases.tv(got, np.asarray(fault["probs"])) > cases.tv_bound(got.size, len(samples))
    p, q = (np.asarray([float(x) for x in f(())]) for f in (cases.target17, cases.draft17))
    likeliest = np.argsort(-q)[: sizes["topk"]]
    chance = np.minimum(p, q).sum() if config.rejection else p[likeliest].sum()
    assert abs(np.mean(accepted >= 1) - chance) < 4 * np.sqrt(0.25 / len(accepted))
    if not config.rejection:
        plain, _ = three_tokens(rounds_of(SamplerConfig(), **PLAIN))
        np.testing.assert_array_equal(samples, plain)  # and the text of each seed


@pytest.mark.parametrize("sizes", [CHAIN, TREE], ids=["chain", "tree"])
def test_thresholds_below_one_accept_more_and_leave_greedy_requests_alone(sizes):
    step = rounds_of(THRESHOLDS, **sizes)
    exact, lossy, all_of_them = (three_tokens(step, accept_threshold_acc=acc)[1].mean() for acc in (1.0, 0.5, 0.0))
    assert exact < lossy < all_of_them
    cold, _ = three_tokens(step, temperature=0.0, accept_threshold_acc=0.0, accept_threshold_single=0.0)
    plain, _ = three_tokens(rounds_of(SamplerConfig(), **PLAIN), temperature=0.0)
    np.testing.assert_array_equal(cold, plain)


@pytest.mark.parametrize("fields", [dict(thresholds=True, rejection=True), dict(rejection=True, random=False)], ids=str)
def test_two_rules_for_one_draft_are_refused(fields):
    with pytest.raises(ValueError, match=r"want one of them|need no draft probabilities"):
        SamplerConfig(**fields)
