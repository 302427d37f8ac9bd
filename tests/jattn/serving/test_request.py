"""What a user asks for is checked, with the value and the rule, before anything is queued."""

from typing import Any

import numpy as np
import pytest

from jattn.sampling import SamplerConfig
from jattn.serving.request import Request, check_ids, check_offered

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
        (dict(repetition_penalty=0.0), r"repetition_penalty=0.0: want more than 0 and at most 2 \(1 is off\)"),
        (dict(repetition_penalty=NAN), "repetition_penalty=nan: want more than 0"),
        (dict(presence_penalty=2.5), r"presence_penalty=2.5: want -2 to 2 \(0 is off\)"),
        (dict(frequency_penalty=-INF), "frequency_penalty=-inf: want -2 to 2"),
        (dict(logit_bias={7: 101.0}), "logit_bias of token 7 is 101.0: want -100 to 100"),
        (dict(logit_bias={7: NAN}), "logit_bias of token 7 is nan"),
        (dict(accept_threshold_single=-0.1), "accept_threshold_single=-0.1: want 0 to 1"),
        (dict(accept_threshold_acc=1.5), "accept_threshold_acc=1.5: want 0 to 1"),
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
        dict(repetition_penalty=2.0),
        dict(presence_penalty=-2.0),
        dict(frequency_penalty=2.0),
        dict(logit_bias={0: -100.0, 5: 100.0}),
        dict(accept_threshold_single=0.0),
        dict(accept_threshold_acc=1.0),
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


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (dict(temperature=0.5), r"temperature=0.5: this engine was built with SamplerConfig\(random=False\)"),
        (dict(repetition_penalty=1.1), r"a penalty is set: .*penalties=False"),
        (dict(presence_penalty=0.1), r"a penalty is set: .*penalties=False"),
        (dict(logit_bias={3: 1.0}), "1 logit biases: .*num_biases=0"),
        (dict(temperature=1.0, accept_threshold_acc=0.5), "accept_threshold_acc=0.5: .*thresholds=False"),
    ],
    ids=str,
)
def test_what_the_programs_lack_is_refused(fields, says):
    sampler = SamplerConfig(random="accept_threshold_acc" in fields)
    with pytest.raises(ValueError, match=says):
        check_offered(Request(prompt_ids=[1], **fields), sampler, 100)
    check_offered(
        Request(prompt_ids=[1], accept_threshold_acc=0.5), sampler, 100
    )  # a greedy request heeds no threshold
    check_offered(Request(prompt_ids=[1], **fields), SamplerConfig(thresholds=True, penalties=True, num_biases=1), 100)


@pytest.mark.parametrize("token", [-1, 100])
def test_a_bias_of_an_unknown_token_is_refused(token):
    with pytest.raises(ValueError, match=f"logit_bias of token {token}: this model's ids are 0 to 99"):
        check_offered(Request(prompt_ids=[1], logit_bias={token: 1.0}), SamplerConfig(num_biases=1), 100)
