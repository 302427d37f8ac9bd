"""Drafts from a draft model, on tiny random models: the same tokens as without drafts, whatever it proposes."""

import dataclasses

import pytest
from engines import serve
from flax import nnx
from tiny_model import CONFIG, tiny

from jattn.models.llama import Llama
from jattn.resolve import resolve
from jattn.serving.engine import Engine

PROMPTS = [[3, 4, 5, 3, 4, 6, 3, 4, 7, 3, 4], [9, 9, 9, 8, 9, 9, 7, 9, 9], [1], [(5 * i) % 11 for i in range(40)]]
OPTIONS = dict(max_new_tokens=24, seed=3, top_p=0.95)


def drafter(seed: int = 0, **changes):
    config = dataclasses.replace(CONFIG, **changes)
    spec = config.attn_spec(None)
    return Llama(config, spec, resolve(spec, "native", "cpu"), rngs=nnx.Rngs(seed), weight_first=True)


def engine_of(*, num_steps, page_size=4, num_pages=None, **kwargs):
    return Engine(
        tiny(),
        num_layers=CONFIG.num_layers,
        num_slots=3,
        num_pages=num_pages or -(-400 // page_size),
        page_size=page_size,
        max_context=128,
        num_steps=num_steps,
        kind="cuda",  # its cost table makes rows cheap, so that large trees are verified
        prefill_rows=(32,),
        **kwargs,
    )


@pytest.fixture(scope="module")
def plain():
    engine = engine_of(num_steps=0)
    return {t: [serve(engine, [p], temperature=t, **OPTIONS)[0].new_ids for p in PROMPTS] for t in (0.0, 0.05)}


@pytest.mark.parametrize(
    ("draft", "topk", "num_steps", "num_nodes", "page_size"),
    [("itself", 1, 3, 4, 16), ("itself", 2, 3, 7, 1), ("first layer", 4, 4, 16, 4), ("another", 3, 1, 4, 64)],
)
def test_any_draft_model_gives_the_tokens_of_plain_decoding(plain, draft, topk, num_steps, num_nodes, page_size):
    # 160 tokens of pages: the three requests cannot all stay, so some are taken back
    model = {"itself": {}, "first layer": dict(num_layers=1), "another": dict(seed=5, num_layers=2)}[draft]
    engine = engine_of(
        num_steps=num_steps,
        topk=topk,
        num_nodes=num_nodes,
        page_size=page_size,
        num_pages=-(-160 // page_size),
        drafter=drafter(**model),
    )
    for temperature, want in plain.items():
        sequences = serve(engine, PROMPTS, temperature=temperature, **OPTIONS)
        assert [sequence.new_ids for sequence in sequences] == want
        assert all(sequence.num_drafted for sequence in sequences)
        if draft == "itself" and topk == 1 and temperature == 0:  # the target always agrees with itself
            rounds = -(-(OPTIONS["max_new_tokens"] - 1) // (num_steps + 1))
            assert [sequence.num_rounds for sequence in sequences] == [rounds] * len(PROMPTS)
    assert engine.scheduler.pages.num_free == engine.scheduler.num_pages


def test_a_draft_model_of_another_vocabulary_is_refused():
    with pytest.raises(ValueError, match="the draft model has 64 tokens and the target 128"):
        engine_of(num_steps=3, drafter=drafter(vocab_size=64))
