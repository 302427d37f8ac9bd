"""Every kind of draft, breadth, depth, page size and batch on a tiny model with windows: tokens of plain decoding."""

import dataclasses

import pytest
from engines import BRANCHING, serve
from flax import nnx
from tiny_model import CONFIG

from jattn.combinators import costs
from jattn.models.decoder import Decoder
from jattn.resolve import resolve
from jattn.sampling import SamplerConfig
from jattn.serving.engine import Engine

WINDOWED = dataclasses.replace(CONFIG, windows=(5, None, 9))
PROMPTS = [*BRANCHING, [2, 3] * 9, list(range(20)), [7], [6, 6, 6, 6]]
# (kind, topk, num_steps, num_nodes, page_size, batch): any two values of two columns meet at least once, about
SWEEP = [
    ("ngram", 1, 1, 2, 1, 8),
    ("ngram", 1, 8, 9, 256, 1),
    ("ngram", 2, 2, 5, 16, 3),
    ("ngram", 2, 8, 16, 1, 1),
    ("ngram", 3, 4, 12, 64, 8),
    ("ngram", 4, 1, 5, 256, 3),
    ("ngram", 4, 8, 32, 16, 8),
    ("ngram", 5, 3, 10, 4, 1),
    ("ngram", 8, 2, 16, 1, 3),
    ("ngram", 8, 8, 64, 64, 8),
    ("model", 1, 1, 2, 256, 8),
    ("model", 1, 8, 9, 1, 3),
    ("model", 2, 4, 7, 64, 1),
    ("model", 2, 1, 3, 16, 8),
    ("model", 3, 8, 33, 4, 3),
    ("model", 4, 2, 8, 1, 8),
    ("model", 4, 4, 16, 256, 3),
    ("model", 6, 3, 20, 16, 1),
    ("model", 8, 1, 9, 64, 3),
    ("model", 8, 4, 64, 16, 8),
    ("model", 8, 8, 64, 1, 1),
]


def decoder(num_layers=3):
    config = dataclasses.replace(WINDOWED, num_layers=num_layers, windows=WINDOWED.windows[:num_layers])
    specs = config.attn_specs()
    choices = tuple(resolve(spec, "native", "cpu") for spec in specs)
    return Decoder(config, specs, choices, rngs=nnx.Rngs(0), weight_first=True)


def engine_of(*, page_size, batch, **draft):
    return Engine(
        decoder(),
        num_layers=3,
        num_slots=batch,
        num_pages=batch * -(-160 // page_size),
        page_size=page_size,
        max_context=128,
        kind="cuda",
        prefill_rows=(32,),
        sampler=SamplerConfig(),
        **draft,
    )


@pytest.fixture(scope="module")
def plain():
    engine = engine_of(page_size=16, batch=1, num_steps=0)
    return {
        t: [serve(engine, [prompt], temperature=t, seed=5, max_new_tokens=20)[0].new_ids for prompt in PROMPTS]
        for t in (0.0, 0.3)
    }


@pytest.mark.long
@pytest.mark.parametrize(("kind", "topk", "num_steps", "num_nodes", "page_size", "batch"), SWEEP)
def test_any_draft_gives_the_tokens_of_plain_decoding(
    monkeypatch, plain, kind, topk, num_steps, num_nodes, page_size, batch
):
    monkeypatch.setitem(costs._MEASURED, "accelerator", ((1, 1.0), (512, 1.001)))  # so that every draft is tried
    draft = dict(num_steps=num_steps, topk=topk, num_nodes=num_nodes)
    if kind == "model":
        draft |= dict(drafter=decoder(num_layers=2))
    engine = engine_of(page_size=page_size, batch=batch, **draft)
    for temperature, want in plain.items():
        sequences = serve(engine, PROMPTS, temperature=temperature, seed=5, max_new_tokens=20)
        assert [sequence.new_ids for sequence in sequences] == want
        assert any(sequence.num_drafted for sequence in sequences)
    assert engine.scheduler.pages.num_free == engine.scheduler.num_pages
