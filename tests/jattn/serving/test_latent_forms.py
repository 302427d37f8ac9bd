"""MLA models through the engine: the form of each prefill step, no compilation while serving, and the tokens."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import engines
import pytest
from engines import serve

import jattn
from jattn.dispatch import AttnForwardMethod as M
from jattn.serving.compilations import counting
from jattn.serving.engine import Engine
from jattn.serving.forms import FormOptions, PrefillForms
from jattn.serving.loaded import Options, load
from jattn.serving.session import Session
from jattn.spec import MLASpec

HF = Path(__file__).parents[2] / "data" / "hf"
DEEPSEEK = MLASpec(num_q_heads=16, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)


def expected(name):
    return json.loads((HF / name / "expected.json").read_text())


def engine_of(name, *, num_steps, policy=None, **kwargs):
    loaded = load(Options(model=str(HF / name), dtype="float32", page_size=4, policy=policy))
    return Engine(
        loaded.model,
        num_layers=2,
        num_slots=2,
        num_pages=32,
        page_size=4,
        max_context=64,
        num_steps=num_steps,
        kind="cuda",  # draft rows count as cheap, so drafts are tried
        kv_dtype="float32",
        prefill_rows=(16,),
        **kwargs,
    )


@pytest.fixture
def ran(monkeypatch):
    """The forms that engines run."""
    run, choose = [], PrefillForms.choose

    def watched(self, *args):
        run.append(choose(self, *args))
        return run[-1]

    monkeypatch.setattr(PrefillForms, "choose", watched)
    return run


def check(engine, name):
    want = expected(name)
    serve(engine, [[5, 6, 7]], max_new_tokens=2)  # the first dispatch warms up JAX's own small helpers
    with counting() as count:
        answers = serve(engine, want["prompts"], max_new_tokens=12)
        for length in (1, 9, 16, 17, 33, 39):
            serve(engine, [want["prompts"][0][:length]], max_new_tokens=2)
    assert [answer.new_ids for answer in answers] == want["greedy"]
    assert count.value == 0
    return answers


def test_one_shot_prefill_compiles_nothing_while_serving(ran):
    check(engine_of("deepseek-v2-groups", num_steps=0, forms=FormOptions(method=M.MHA_ONE_SHOT)), "deepseek-v2-groups")
    assert set(ran) == {M.MHA, M.MHA_ONE_SHOT}


CHUNKED = FormOptions(method=M.MHA_CHUNKED_KV, max_chunk_capacity=14)


@pytest.mark.long
@pytest.mark.parametrize("draft", [dict(num_steps=0), dict(num_steps=3), dict(num_steps=3, topk=2, num_nodes=6)])
@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v2-groups", "deepseek-v3"])
@pytest.mark.parametrize(
    ("options", "methods"),
    [
        (dict(), {M.MHA, M.MLA}),  # at most 16 fresh tokens: expanding a prefix never pays
        (dict(forms=FormOptions(method=M.MLA)), {M.MLA}),
        (dict(forms=CHUNKED), {M.MHA, M.MHA_CHUNKED_KV}),
        (dict(policy="triton"), {M.MHA, M.MLA}),
        (dict(policy="flashinfer", forms=FormOptions(chunked_prefix_threshold=20)), {M.MHA, M.MLA, M.MHA_ONE_SHOT}),
    ],
)
def test_greedy_ids_of_every_form_and_draft(name, draft, options, methods, ran):
    answers = check(engine_of(name, **draft, **options), name)
    assert set(ran) == methods
    assert (sum(answer.num_drafted for answer in answers) > 0) == (draft["num_steps"] > 0)


def forms(policy="native", **options):
    return PrefillForms(
        policy=policy,
        platform="cuda-sm90",
        spec=DEEPSEEK,
        num_slots=4,
        max_tokens=4 * 4096,
        prefill_rows=512,
        options=FormOptions(**options),
    )


EVERY = {M.MLA, M.MHA, M.MHA_ONE_SHOT, M.MHA_CHUNKED_KV}


@pytest.mark.parametrize(
    ("policy", "options", "methods"),
    [
        ("native", {}, EVERY - {M.MHA_CHUNKED_KV}),
        ("native", dict(max_chunk_capacity=3000), EVERY),
        ("flashinfer", dict(chunked_prefix_threshold=700), EVERY - {M.MHA_CHUNKED_KV}),
        ("flashinfer", dict(chunked_prefix_threshold=700, max_chunk_capacity=4000), EVERY),
        ("fa3", dict(max_chunk_capacity=999, chunked_prefix_threshold=1), EVERY - {M.MLA}),
        ("trtllm_mla", {}, {M.MHA, M.MHA_CHUNKED_KV}),
        ("triton", {}, {M.MLA, M.MHA}),
        ("aiter", {}, {M.MHA, M.MHA_CHUNKED_KV}),
    ],
)
def test_every_form_that_lengths_ask_for_is_compiled(policy, options, methods):
    """What a step is given is never another form because its own was not foreseen."""
    here, seen = forms(policy, **options), set()
    for cached in (0, 1, 130, 699, 700, 701, 2999, 3000, 4095):
        for rows in (1, 100, 171, 512):
            for others in (0, cached // 2, cached):
                prefixes = [cached, others, 0, 0]
                q_lens = [max(1, rows - 1), 1 if others else 0, 0, 0]
                asked = here._asked(sum(prefixes), sum(q_lens), sum(n > 0 for n in q_lens))
                assert here.choose(prefixes, q_lens) == asked
                seen.add(asked)
    assert seen == methods


def test_what_passes_the_announced_tokens_is_absorbed():
    here = forms()
    short = dataclasses.replace(here, max_tokens=500)
    assert short.methods == (M.MLA, M.MHA)  # every prompt is one step
    assert short.choose([400, 0, 0, 0], [200, 0, 0, 0]) == M.MLA
    assert short.choose([0, 0, 0, 0], [200, 100, 0, 0]) == M.MHA
    assert here.choose([400, 0, 0, 0], [200, 0, 0, 0]) == M.MHA_ONE_SHOT


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(mla_method="MHA_TWO_SHOT"), "mla_method 'MHA_TWO_SHOT' is unknown: want one of MHA, MLA"),
        (dict(mla_method="DSA_NPU"), "method DSA_NPU cannot run here: want one of MHA, MLA"),
        (dict(max_chunk_capacity=0), "max_chunk_capacity=0: want at least 1 token"),
        (dict(chunked_prefix_threshold=-1), "chunked_prefix_threshold=-1: want at least 1 token"),
    ],
)
def test_options_of_forms_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Options(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(mla_method="MLA"), "method=MLA chooses how latent attention is computed, and this model has none"),
        (dict(max_chunk_capacity=64), "max_chunk_capacity=64 chooses"),
        (dict(chunked_prefix_threshold=64), "chunked_prefix_threshold=64 chooses"),
        (dict(disable_chunked_prefix=True), "chunked_prefix_disabled=True chooses"),
        (dict(policy="flashmla"), "policy 'flashmla' serves MLA models only, and this layer is MHA/GQA"),
    ],
)
def test_mla_options_on_another_model_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        load(Options(model=str(HF / "qwen3"), **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(as_mla=True), "as_mla of a model with latent attention: it is one already"),
        (dict(kv_dtype="int8"), "int8"),
        (dict(policy="trtllm_mha"), "does not serve MLA models"),
    ],
)
def test_options_of_other_models_on_an_mla_model_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        load(Options(model=str(HF / "deepseek-v2"), **options))


def test_a_capacity_below_the_batch_is_refused():
    loaded = load(Options(model=str(HF / "deepseek-v2")))
    with pytest.raises(ValueError, match="max_chunk_capacity=1 leaves no token for each of 2 requests: raise it"):
        Session(loaded, [[5], [6]], Options(max_chunk_capacity=1))


@pytest.fixture(scope="module")
def real():
    return load(Options(as_mla=True))


DRAFTS = (dict(num_steps=0), dict(num_steps=15), dict(num_steps=5, topk=4, num_nodes=16))


@pytest.mark.long
@pytest.mark.parametrize("draft", DRAFTS, ids=["none", "chain", "tree"])
@pytest.mark.parametrize(
    ("options", "methods"),
    [
        (dict(method=M.MLA), {M.MLA}),
        (dict(method=M.MHA), {M.MHA, M.MHA_CHUNKED_KV}),
        (dict(method=M.MHA_ONE_SHOT), {M.MHA, M.MHA_ONE_SHOT}),
        (dict(method=M.MHA_CHUNKED_KV, max_chunk_capacity=60), {M.MHA, M.MHA_CHUNKED_KV}),
    ],
)
def test_the_real_model_as_mla_gives_the_reference_ids(options, methods, draft, real, reference, ran):
    engine = engines.engine_of(real, prefill_rows=(16,), forms=FormOptions(**options), **draft)
    answers = serve(engine, [ids for ids, _ in reference.values()], max_new_tokens=32)
    assert [answer.new_ids for answer in answers] == [want for _, want in reference.values()]
    assert set(ran) == methods
    assert (sum(answer.num_drafted for answer in answers) > 0) == (draft["num_steps"] > 0)


@pytest.mark.long
@pytest.mark.parametrize("draft", [dict(draft="none"), dict(draft="ngram")])
def test_the_real_model_as_mla_through_generate_by_the_rules_of_native(draft, reference):
    answers = jattn.generate(
        [ids for ids, _ in reference.values()], as_mla=True, max_new_tokens=32, ignore_eos=True, **draft
    )
    assert [answer.ids for answer in answers] == [want for _, want in reference.values()]
    assert all(answer.compilations_while_serving == 0 for answer in answers)


@pytest.mark.long
def test_random_weights_of_a_shape_from_the_command_line(tmp_path):
    """From nothing but a config.json: prompts are ids, and so is what is printed."""
    (tmp_path / "config.json").write_bytes((HF / "deepseek-v3" / "config.json").read_bytes())
    command = [sys.executable, "-m", "jattn.cli", "generate", "5 6 7", "--random-weights", str(tmp_path)]
    run = subprocess.run(
        [*command, "--max-new-tokens", "4", "--ignore-eos"], capture_output=True, text=True, check=True
    )
    first, summary = run.stdout.splitlines()[0], run.stdout.splitlines()[-1]
    assert len(first.split()) == 4 and all(0 <= int(word) < 128 for word in first.split())
    assert "4 new tokens" in summary
