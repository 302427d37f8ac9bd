"""What a user asks for is checked, with the value and the rule, before anything is queued."""

from typing import Any

import numpy as np
import pytest

from jattn.serving.request import Request, check_ids

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(prompt_ids=[]), "the prompt is empty: give at least one token"),
        (dict(prompt_ids=np.zeros(0, int)), "the prompt is empty"),
        (dict(max_new_tokens=0), "max_new_tokens=0: want at least 1"),
        (dict(max_new_tokens=-5), "max_new_tokens=-5: want at least 1"),
        (dict(temperature=-0.1), r"temperature=-0.1: want a finite number >= 0 \(0 is greedy\)"),
        (dict(temperature=NAN), "temperature=nan: want a finite number"),
        (dict(temperature=INF), "temperature=inf: want a finite number"),
        (dict(top_k=-1), "top_k=-1: want at least 1, or 0 for off"),
        (dict(top_p=0.0), r"top_p=0.0: want more than 0 and at most 1 \(1 is off\)"),
        (dict(top_p=1.1), "top_p=1.1: want more than 0"),
        (dict(top_p=NAN), "top_p=nan: want more than 0"),
        (dict(min_p=-0.1), r"min_p=-0.1: want at least 0 \(off\) and less than 1"),
        (dict(min_p=1.0), "min_p=1.0: want at least 0"),
        (dict(min_p=NAN), "min_p=nan: want at least 0"),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_the_rule(fields, message):
    with pytest.raises(ValueError, match=message):
        Request(**{"prompt_ids": [1], **fields})


@pytest.mark.parametrize(
    "fields",
    [
        dict(prompt_ids=np.array([1, 2])),
        dict(max_new_tokens=1),
        dict(temperature=0.0),
        dict(temperature=1e6),
        dict(top_k=0),
        dict(top_k=10**9),
        dict(top_p=1.0),
        dict(top_p=1e-9),
        dict(min_p=0.0),
        dict(min_p=0.999),
        dict(seed=-1),
        dict(seed=2**40),
        dict(stop_ids=(0, 2)),
    ],
    ids=str,
)
def test_the_edges_of_each_range_are_allowed(fields):
    request: Any = Request(**{"prompt_ids": [1], **fields})
    assert all(getattr(request, name) is value for name, value in fields.items())


def test_a_request_is_greedy_and_unfiltered_unless_asked_otherwise():
    request = Request(prompt_ids=[3])
    assert (request.temperature, request.top_k, request.top_p, request.min_p) == (0.0, 0, 1.0, 0.0)
    assert request.stop_ids == ()


@pytest.mark.parametrize(("ids", "first"), [([0, 5, 100, -1], "100 at index 2"), ([99, -1, 200], "-1 at index 1")])
def test_the_first_id_without_an_embedding_is_named(ids, first):
    with pytest.raises(ValueError, match=f"prompt id {first}: this model's ids are 0 to 99"):
        check_ids(ids, 100)


def test_ids_with_an_embedding_pass():
    check_ids([0, 99, 50], 100)
