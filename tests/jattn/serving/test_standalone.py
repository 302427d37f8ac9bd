"""Drafts from a draft model, on tiny random models: the same tokens as without drafts, whatever it proposes."""

import dataclasses

import pytest
from engines import BRANCHING, BRANCHING_OPTIONS, plain_ids, serve, tiny_engine
from flax import nnx
from tiny_model import CONFIG

from jattn.models.decoder import Decoder
from jattn.resolve import resolve
from jattn.serving.compilations import counting


def drafter(seed: int = 0, **changes):
    config = dataclasses.replace(CONFIG, **changes)
    spec = config.attn_spec(None)
    return Decoder(config, spec, resolve(spec, "native", "cpu"), rngs=nnx.Rngs(seed), weight_first=True)


@pytest.fixture(scope="module")
def plain():
    return plain_ids()


@pytest.mark.parametrize(
    ("draft", "topk", "num_steps", "num_nodes", "page_size"),
    [
        ("itself", 1, 3, 4, 16),
        ("first layer", 4, 4, 16, 4),
        pytest.param("itself", 2, 3, 7, 1, marks=pytest.mark.long),
        pytest.param("another", 3, 1, 4, 64, marks=pytest.mark.long),
    ],
)
def test_any_draft_model_gives_the_tokens_of_plain_decoding(plain, draft, topk, num_steps, num_nodes, page_size):
    # 160 tokens of pages: the three requests cannot all stay, so some are taken back
    model = {"itself": {}, "first layer": dict(num_layers=1), "another": dict(seed=5, num_layers=2)}[draft]
    engine = tiny_engine(
        num_steps=num_steps,
        topk=topk,
        num_nodes=num_nodes,
        page_size=page_size,
        num_pages=-(-160 // page_size),
        drafter=drafter(**model),
    )
    serve(engine, [[1, 2]], max_new_tokens=2)  # warms up
    with counting() as count:
        for temperature, want in plain.items():
            sequences = serve(engine, BRANCHING, temperature=temperature, **BRANCHING_OPTIONS)
            assert [sequence.new_ids for sequence in sequences] == want
            assert all(sequence.num_drafted for sequence in sequences)
            if draft == "itself" and topk == 1 and temperature == 0:  # the target always agrees with itself
                rounds = -(-(BRANCHING_OPTIONS["max_new_tokens"] - 1) // (num_steps + 1))
                assert [sequence.num_rounds for sequence in sequences] == [rounds] * len(BRANCHING)
    assert count.value == 0
    assert engine.scheduler.pages.num_free == engine.scheduler.num_pages


@pytest.mark.long
def test_lineage_by_slot_changes_no_token(plain):
    engine = tiny_engine(num_steps=4, topk=4, num_nodes=16, drafter=drafter(), lineage="slot")
    sequences = serve(engine, BRANCHING, temperature=0.0, **BRANCHING_OPTIONS)
    assert [sequence.new_ids for sequence in sequences] == plain[0.0]


def test_a_draft_model_of_another_vocabulary_is_refused():
    with pytest.raises(ValueError, match="the draft model has 64 tokens and the target 128"):
        tiny_engine(num_steps=3, drafter=drafter(vocab_size=64))
