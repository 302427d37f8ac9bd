"""Which experts a token uses, against the published definitions written out a token at a time."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jattn.models.config import ExpertsConfig
from jattn.models.routing import route

EXPERTS, ROWS = 12, 40


def expected(logits, bias, options):
    """One token, in float64. Source: arXiv:2412.19437, section 2.1.2; arXiv:2405.04434, section 2.2.2."""
    logits = logits.astype(np.float64)
    if options.scoring == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    else:
        scores = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    ranked = scores + bias
    groups = np.split(np.arange(EXPERTS), options.num_groups)
    best = {"max": lambda g: ranked[g].max(), "top2": lambda g: np.sort(ranked[g])[-2:].sum()}[options.group_score]
    kept = np.concatenate(sorted(groups, key=best)[-options.top_groups :])
    chosen = sorted(kept, key=lambda expert: ranked[expert])[::-1][: options.top_k]
    shares = scores[chosen]
    return chosen, shares / (shares.sum() if options.norm_topk else 1.0) * options.routed_scale


CASES = itertools.product(
    ("softmax", "sigmoid"), ("max", "top2"), ((1, 1), (4, 2), (3, 3)), (False, True), (False, True)
)


@pytest.mark.parametrize(("scoring", "group_score", "groups", "norm_topk", "with_bias"), list(CASES))
def test_experts_and_shares_are_those_of_the_definition(scoring, group_score, groups, norm_topk, with_bias):
    options = ExpertsConfig(
        num_experts=EXPERTS,
        top_k=4,
        scoring=scoring,
        group_score=group_score,
        num_groups=groups[0],
        top_groups=groups[1],
        norm_topk=norm_topk,
        routed_scale=1.7,
    )
    draw = np.random.default_rng(len(scoring) + 10 * groups[0])
    logits = draw.standard_normal((ROWS, EXPERTS)).astype(np.float32)
    bias = draw.standard_normal(EXPERTS).astype(np.float32) * with_bias  # large: scores alone would choose otherwise
    chosen, shares = route(jnp.asarray(logits), jnp.asarray(bias) if with_bias else None, options)
    for row in range(ROWS):
        want, want_shares = expected(logits[row], bias, options)
        assert chosen[row].tolist() == [int(expert) for expert in want]
        np.testing.assert_allclose(shares[row], want_shares, rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(top_k=13), "top_k=13 of num_experts=12"),
        (dict(scoring="tanh"), "scoring='tanh' is unknown: want one of softmax, sigmoid"),
        (dict(group_score="mean"), "group_score='mean' is unknown: want one of max, top2"),
        (dict(num_groups=5), "num_groups=5 over num_experts=12: want 1 to num_groups, and groups of one size"),
        (dict(num_groups=4, top_groups=5), "top_groups=5 of num_groups=4"),
        (dict(num_groups=4, top_groups=1), "top_k=4, but top_groups=1 of num_groups=4 hold 3 experts"),
    ],
)
def test_routing_that_cannot_be_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ExpertsConfig(**{**dict(num_experts=12, top_k=4), **fields})
