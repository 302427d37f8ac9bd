"""Greedy ids equal those of three independent engines, whatever the draft, the page size and the batch."""

import dataclasses

import pytest
from engines import engine_of, serve
from flax import nnx

from jattn.models.decoder import Decoder
from jattn.models.load import first_layers
from jattn.resolve import resolve

CHAIN = dict(num_steps=15)
TREE = dict(num_steps=5, topk=4, num_nodes=16)


@pytest.mark.long
@pytest.mark.parametrize("tree", [dict(num_steps=3), dict(num_steps=3, topk=3, num_nodes=12)], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", ["itself", "first 20 layers", "random"])
def test_any_draft_model_gives_the_reference(loaded, reference, kind, tree):
    drafter = {"itself": lambda: loaded.model, "first 20 layers": lambda: first_layers(loaded.model, 20)}
    engine = engine_of(loaded, drafter=drafter.get(kind, lambda: random_drafter(loaded.config))(), **tree)
    sequences = serve(engine, [prompt for prompt, _ in reference.values()], max_new_tokens=32)
    for sequence, (name, (_, want)) in zip(sequences, reference.items(), strict=True):
        assert sequence.new_ids == want, name
    kept = sum(s.num_round_tokens for s in sequences) / sum(s.num_rounds for s in sequences)
    assert kept > 3 if kind == "itself" else kept >= 1
    assert engine.scheduler.pages.num_free == engine.scheduler.num_pages


def random_drafter(config):
    tiny = dataclasses.replace(config, num_layers=1, d_model=32, num_q_heads=2, num_kv_heads=1, head_dim=16, ffn_dim=32)
    spec = tiny.attn_spec()
    return Decoder(tiny, spec, resolve(spec, "native", "cpu"), rngs=nnx.Rngs(0), weight_first=True)


@pytest.mark.parametrize(
    ("page_size", "draft"),
    [
        (1, dict(num_steps=0)),
        (64, dict(num_steps=0)),
        pytest.param(1, CHAIN, marks=pytest.mark.long),
        (16, CHAIN),
        pytest.param(16, dict(num_steps=0), marks=pytest.mark.long),
        pytest.param(64, CHAIN, marks=pytest.mark.long),
        pytest.param(16, TREE, marks=pytest.mark.long),
        # every depth and breadth, and page sizes at both ends
        *(
            pytest.param(
                page_size, dict(num_steps=steps, topk=topk, num_nodes=nodes, kind="cuda"), marks=pytest.mark.long
            )
            for page_size in (1, 256)
            for topk, steps, nodes in ((2, 1, 3), (2, 8, 12), (8, 1, 9), (8, 8, 64))
        ),
    ],
)
def test_greedy_ids_equal_the_reference_alone_and_in_a_ragged_batch(loaded, reference, page_size, draft):
    engine = engine_of(loaded, page_size=page_size, **draft)
    for name, (prompt, want) in reference.items():
        (alone,) = serve(engine, [prompt], max_new_tokens=32)
        assert alone.new_ids == want, name
    together = serve(engine, [prompt for prompt, _ in reference.values()], max_new_tokens=32)
    for sequence, (name, (_, want)) in zip(together, reference.items(), strict=True):
        assert sequence.new_ids == want, name
    if draft["num_steps"]:
        assert sum(sequence.num_drafted for sequence in together) > 0  # drafts were tried, and changed nothing
    assert engine.scheduler.pages.num_free == engine.scheduler.num_pages
