"""A layer a draft step through the engine: the same tokens as without drafts, chains of as many drafts as layers."""

import collections
import json

import pytest
from draft_heads import layer_head
from engines import BRANCHING, BRANCHING_OPTIONS, plain_ids, quick_programs, serve, tiny_engine
from next_layers import HF, write_deepseek, write_mimo
from tiny_model import tiny

import jattn
from jattn.combinators.draft_shapes import NO_DRAFTS, chain
from jattn.sampling import SamplerConfig
from jattn.serving.compilations import counting
from jattn.serving.loaded import Options

LONG = pytest.mark.long


@pytest.fixture(scope="module")
def plain():
    return plain_ids()


@LONG
@pytest.mark.parametrize(("layers", "chained", "page_size"), [(3, True, 4), (2, False, 16), (5, True, 1)])
def test_tokens_are_those_of_plain_decoding(plain, layers, chained, page_size):
    # few tokens are drafted, the most frequent ones, so that random layers are right at times; pages do not last
    counts = collections.Counter(token for ids in plain[0.0] for token in ids)
    model = tiny()
    head = layer_head(model, layers, chained=chained, token_ids=[token for token, _ in counts.most_common(3)])
    engine = tiny_engine(
        model=model, drafter=head, num_steps=layers, page_size=page_size, num_pages=-(-160 // page_size)
    )
    serve(engine, [[1, 2]], max_new_tokens=2)  # warms up
    kept = rounds = 0
    with counting() as count:
        for temperature, want in plain.items():
            for prompts in (BRANCHING, BRANCHING[:1], BRANCHING[1:3]):
                sequences = serve(engine, prompts, temperature=temperature, **BRANCHING_OPTIONS)
                assert [s.new_ids for s in sequences] == [want[BRANCHING.index(prompt)] for prompt in prompts]
                kept += sum(sequence.num_round_tokens for sequence in sequences)
                rounds += sum(sequence.num_rounds for sequence in sequences)
    assert count.value == 0
    assert kept > 1.05 * rounds  # some drafts were right
    assert engine.scheduler.pages.num_free == engine.scheduler.num_pages


@LONG
@pytest.mark.parametrize(
    ("name", "write", "steps"),
    [("deepseek-v3", write_deepseek, None), ("deepseek-v3", write_deepseek, 2), ("qwen2", write_mimo, None)],
)
@pytest.mark.parametrize("max_batch", [1, 2])
def test_a_checkpoint_with_several_layers_drafts_with_each(tmp_path, name, write, steps, max_batch):
    write(tmp_path / "model", 3)
    want = json.loads((HF / name / "expected.json").read_text())  # by transformers
    with quick_programs():
        done = jattn.generate(
            want["prompts"],
            model=str(tmp_path / "model"),
            dtype="float32",
            draft="nextn",
            num_steps=steps,
            enable_multi_layer_eagle=True,
            max_new_tokens=len(want["greedy"][0]),
            max_batch=max_batch,
            ignore_eos=True,
        )
    assert [completion.ids for completion in done] == want["greedy"]


@LONG
@pytest.mark.parametrize("chained", [True, False])
def test_drawn_chains_serve(chained):
    model = tiny()
    engine = tiny_engine(
        model=model,
        drafter=layer_head(model, 3, chained=chained),
        num_steps=3,
        sampler=SamplerConfig(rejection=True),
    )
    sequences = serve(engine, BRANCHING, temperature=1.0, **BRANCHING_OPTIONS)
    assert [len(sequence.new_ids) for sequence in sequences] == [BRANCHING_OPTIONS["max_new_tokens"]] * len(BRANCHING)


@pytest.mark.parametrize("shapes", [(chain(3),), (NO_DRAFTS, chain(2))])
def test_an_engine_refuses_what_the_layers_cannot_draft(shapes):
    model = tiny()
    with pytest.raises(ValueError, match="with a head of 2 layers, one a step: it drafts a chain of 2"):
        tiny_engine(model=model, drafter=layer_head(model, 2), num_steps=0, draft_shapes=shapes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(draft="eagle"), "enable_multi_layer_eagle with draft 'eagle': it belongs to --draft nextn"),
        (
            dict(draft="nextn", topk=2, num_draft_tokens=4),
            "enable_multi_layer_eagle with topk=2: a layer drafts",
        ),
    ],
)
def test_options_say_what_belongs_together(options, message):
    with pytest.raises(ValueError, match=message):
        Options(enable_multi_layer_eagle=True, **options)


def test_more_steps_than_layers_are_refused(tmp_path):
    write_mimo(tmp_path / "model", 2)
    options = dict(model=str(tmp_path / "model"), draft="nextn", enable_multi_layer_eagle=True)
    with pytest.raises(ValueError, match="num_steps=3 with enable_multi_layer_eagle: .* has 2 layers that predict"):
        jattn.generate(["a"], num_steps=3, **options)
    with pytest.raises(ValueError, match="num_draft_tokens=4 with topk=1: a chain of num_steps=2 has 3"):
        jattn.generate(["a"], num_draft_tokens=4, **options)
