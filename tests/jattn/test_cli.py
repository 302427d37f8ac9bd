"""The command as a user meets it, on a tiny model: JSON, stop texts, batches, and one sentence for bad input."""

import json
from pathlib import Path
from typing import Any

import pytest
from engines import quick_programs
from head_files import write
from tiny_gguf import Q, llama_parts

import jattn
from jattn.cli import main
from jattn.loaders.open import open_model
from jattn.platforms import PLATFORMS

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(llama_parts(kind=Q.F32).write(tmp_path_factory.mktemp("cli") / "tiny.gguf"))


@pytest.fixture(scope="module", autouse=True)
def quick():
    with quick_programs():
        yield


def run(capsys, *argv):
    status = main(list(argv))
    out, err = capsys.readouterr()
    return status, out, err


def vocab_size_of(model):
    return open_model(model).hparams.vocab_size


def rows(capsys, model, *argv):
    status, out, err = run(capsys, "generate", "--model", model, "--json", *argv)
    assert (status, err) == (0, "")
    return [json.loads(line) for line in out.splitlines()]


def test_json_is_one_object_a_prompt_in_order_and_nothing_else(capsys, model, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "12 12 12"}\n\n{"prompt_ids": [5, 6, 7, 8, 9]}\n{"prompt": "é"}\n', encoding="utf-8")
    got = rows(capsys, model, "--prompts", str(file), "--max-new-tokens", "12", "--ignore-eos", "--max-batch", "2")
    assert [row["index"] for row in got] == [0, 1, 2]
    assert got[1]["prompt_ids"] == [5, 6, 7, 8, 9]
    for row in got:
        assert row["new_tokens"] == len(row["ids"]) == 12
        assert row["finish_reason"] == "length"
        assert row["draft"] == "ngram"
        assert row["mean_accept"] >= 1
        assert row["tokens_per_s"] > 0
        assert row["compilations"] > 0
        assert row["compilations_while_serving"] == 0
        assert row["peak_rss_bytes"] > 2**20


def test_drafts_page_sizes_and_python_give_the_same_ids(capsys, model):
    want = rows(capsys, model, "12 12 12", "--draft", "none", "--max-new-tokens", "20")[0]
    for extra in (
        ["--num-steps", "3"],
        ["--topk", "3", "--num-steps", "4", "--page-size", "1"],
        ["--page-size", "64"],
    ):
        assert rows(capsys, model, "12 12 12", "--max-new-tokens", "20", *extra)[0]["ids"] == want["ids"]
    (answer,) = jattn.generate("12 12 12", model=model, max_new_tokens=20)
    assert (answer.ids, answer.text) == (want["ids"], want["text"])


@pytest.mark.parametrize("draft", ["none", "ngram"])
def test_a_stop_text_is_cut_from_the_text_and_ends_the_ids_at_its_last_token(capsys, model, draft):
    free = rows(capsys, model, "12 12", "--draft", "none", "--max-new-tokens", "30", "--ignore-eos")[0]
    for at in (3, 11):
        stop = free["text"][at : at + 2]
        cut = rows(capsys, model, "12 12", "--draft", draft, "--max-new-tokens", "30", "--ignore-eos", "--stop", stop)[
            0
        ]
        assert cut["text"] == free["text"][: free["text"].index(stop)]
        assert cut["finish_reason"] == "stop"
        assert cut["ids"] == free["ids"][: len(cut["ids"])]
        assert len(cut["ids"]) < 30


def test_a_seed_gives_the_same_text_with_and_without_drafts(capsys, model):
    sampled = ["--temperature", "0.9", "--top-k", "40", "--top-p", "0.9", "--min-p", "0.01", "--max-new-tokens", "16"]
    runs = [
        rows(capsys, model, "12 12", "--seed", seed, "--draft", draft, *sampled)[0]["ids"]
        for seed, draft in (("3", "none"), ("3", "ngram"), ("4", "none"))
    ]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize(
    "draft", [["--draft-layers", "1", "--topk", "2"], ["--temperature", "0.8", "--rejection-sampling"]], ids=" ".join
)
def test_a_draft_model_drafts(capsys, model, draft):
    common = ["12 12", "--max-new-tokens", "12", "--ignore-eos", "--logprobs", "1", "--logit-bias", "5=-100"]
    (row,) = rows(capsys, model, *common, "--draft", "standalone", *draft)
    assert row["draft"] == "standalone" and row["compilations_while_serving"] == 0
    assert len(row["logprobs"]) == len(row["ids"]) == 12 and 5 not in row["ids"]
    assert all(one["logprob"] <= one["top"][0][1] <= 0 for one in row["logprobs"])
    if "--temperature" not in draft:
        (plain,) = rows(capsys, model, *common, "--draft", "none")
        assert row["ids"] == plain["ids"]


@pytest.mark.parametrize(
    ("kind", "draft"),
    [
        pytest.param("eagle", [], marks=pytest.mark.long),
        ("eagle3", ["--topk", "2", "--num-steps", "3", "--num-draft-tokens", "6"]),
    ],
)
def test_a_draft_head_drafts(capsys, model, tmp_path, kind, draft):
    head = write(tmp_path / "head", kind, vocab_size_of(model))
    common = ["12 12", "--max-new-tokens", "12", "--ignore-eos"]
    (row,) = rows(capsys, model, *common, "--draft", "eagle", "--draft-model", str(head), *draft)
    (plain,) = rows(capsys, model, *common, "--draft", "none")
    assert (row["draft"], row["ids"], row["compilations_while_serving"]) == ("eagle", plain["ids"], 0)


def test_a_head_of_another_model_is_refused(capsys, model, tmp_path):
    size = vocab_size_of(model)
    cases: tuple[tuple[str, int, dict[str, Any], str], ...] = (
        ("vocabulary", size + 1, {}, f"a head for {size + 1} token embeddings, and the model has {size}"),
        ("depth", size, dict(eagle_config={}), "reads 3 layers, None, of a model of 2"),
    )
    for name, vocab, changes, says in cases:
        head = write(tmp_path / name, "eagle3", vocab, **changes)
        status, _, err = run(capsys, "generate", "--model", model, "x", "--draft", "eagle", "--draft-model", str(head))
        assert status == 2 and says in err


def test_text_streams_and_ends_with_one_line(capsys, model):
    status, out, _ = run(capsys, "generate", "--model", model, "12 12", "--max-new-tokens", "5", "--chat")
    assert status == 0
    last = out.splitlines()[-1]
    for part in ("new tokens", "tokens/s", "draft ngram", "accepted tokens a target step", "compilations", "MB"):
        assert part in last


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8_e4m3", "fp8_e5m2", "int8"])
def test_narrow_caches_serve(capsys, model, kv_dtype):
    (row,) = rows(capsys, model, "12 12", "--kv-dtype", kv_dtype, "--max-new-tokens", "4", "--ignore-eos")
    assert row["new_tokens"] == 4


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "no prompt"),
        ([""], "prompt 0 is empty"),
        (["x", "--prompts", "y"], "want one of them"),
        (["--prompts", "/no/such/file"], "cannot read prompts"),
        (["x", "--draft", "medusa"], "want one of none, ngram, standalone, eagle, nextn"),
        (["x", "--draft", "eagle"], "no draft head for model"),
        (["x", "--draft", "eagle", "--draft-layers", "1"], "it belongs to --draft standalone"),
        (["x", "--draft", "nextn"], "has 0 layers that predict further ahead"),
        (["x", "--draft-layers", "1"], "draft_layers with draft 'ngram'"),
        (["x", "--draft-model", "y"], "draft_model with draft 'ngram'"),
        (["x", "--rejection-sampling"], "rejection_sampling with draft 'ngram'"),
        (["x", "--draft", "standalone", "--draft-layers", "0"], "draft_layers=0: want at least 1"),
        (["x", "--draft", "standalone", "--draft-layers", "9"], "the first 9 layers of a model of 2"),
        (["x", "--draft", "standalone", "--topk", "2", "--rejection-sampling"], "want topk 1"),
        (
            ["x", "--draft", "standalone", "--topk", "2", "--num-steps", "1", "--num-draft-tokens", "4"],
            "at most 3 nodes",
        ),
        (["x", "--draft", "standalone", "--draft-model", "/no/such"], "/no/such"),
        (["x", "--repetition-penalty", "0"], "repetition_penalty=0.0"),
        (["x", "--presence-penalty", "3"], "presence_penalty=3.0"),
        (["x", "--frequency-penalty", "nan"], "frequency_penalty=nan"),
        (["x", "--accept-threshold-single", "1.5"], "accept_threshold_single=1.5: want 0 to 1"),
        (["x", "--accept-threshold-acc", "-1"], "accept_threshold_acc=-1.0: want 0 to 1"),
        (["x", "--logit-bias", "5"], "--logit-bias '5': want a token id and a number"),
        (["x", "--logit-bias", "99999=1"], "logit_bias of token 99999"),
        (["x", "--logprobs", "21"], "logprobs=21: want 0 to 20"),
        (["x", "--num-steps", "0"], "want 1 to 63"),
        (["x", "--topk", "9"], "topk=9: want 1 (a chain) to 8"),
        (["x", "--topk", "2", "--num-steps", "3", "--num-draft-tokens", "8"], "at most 7 nodes"),
        (["x", "--topk", "8", "--num-draft-tokens", "65"], "want 2 to 64"),
        (["x", "--num-draft-tokens", "8"], "raise topk"),
        (["x", "--topk", "2", "--draft", "none"], "with draft 'none'"),
        (["x", "--topk", "2", "--policy", "aiter"], "want page_size=1 or topk=1"),
        (["x", "--temperature", "-1"], "temperature=-1.0"),
        (["x", "--temperature", "nan"], "temperature=nan"),
        (["x", "--top-p", "0"], "top_p=0.0"),
        (["x", "--min-p", "1"], "min_p=1.0"),
        (["x", "--top-k", "-3"], "top_k=-3"),
        (["x", "--max-new-tokens", "0"], "max_new_tokens=0"),
        (["x", "--page-size", "0"], "page_size=0: want 1 to 256"),
        (["x", "--page-size", "257"], "page_size=257: want 1 to 256"),
        (["x", "--policy", "nope"], "'nope': want one of native"),
        (["x", "--policy", "dsa"], "'dsa' cannot run attention"),
        (["x", "--policy", "flashmla"], "MLA models only"),
        (["x", "--policy", "trtllm_mha", "--page-size", "8"], "16, 32, 64, 128"),
        (["x", "--platform", "gpu9000"], "'gpu9000': want one of cpu"),
        (["x", "--dtype", "int4"], "'int4' is unknown"),
        (["x", "--kv-dtype", "int4"], "'int4' is unknown"),
        (["x", "--stop", ""], "a stop text is empty"),
        (["x" * 70], "the cache holds 64 a request"),
        (["x", "--max-context", "65"], "trained for 64 tokens"),
        (["x" * 40, "--num-pages", "1"], "--num-pages"),
        (["x", "--num-pages", "0"], "num_pages=0"),
    ],
)
def test_bad_input_is_one_sentence_and_a_status(capsys, model, argv, says):
    status, out, err = run(capsys, "generate", "--model", model, *argv)
    assert status == 2
    assert out == ""
    assert err.startswith("jattn: ") and err.count("\n") == 1
    assert says in err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2: want an object"),
        ('{"text": "x"}', "line 2: want an object"),
        ('{"prompt": "a", "prompt_ids": [1]}', "one of the two"),
        ('{"prompt": ""}', "not empty"),
        ('{"prompt_ids": []}', "not empty"),
        ('{"prompt_ids": [1.5]}', "[1.5]"),
        ('{"prompt_ids": "x"}', "line 2"),
        ('{"prompt_ids": [99999]}', "99999 at index 0"),
    ],
)
def test_a_bad_line_of_prompts_is_named(capsys, model, tmp_path, line, says):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "ok"}\n' + line + "\n")
    status, out, err = run(capsys, "generate", "--model", model, "--prompts", str(file))
    assert (status, out) == (2, "")
    assert says in err and err.count("\n") == 1


def test_a_model_that_is_missing_or_cut_is_one_sentence(capsys, model, tmp_path):
    with open(model, "rb") as file:
        whole = file.read()
    for name, data, says in (
        ("cut", whole[: len(whole) // 2], "cut"),
        ("empty", b"", "empty"),
        ("no", b"NOPE" * 9, "GGUF"),
    ):
        cut = tmp_path / f"{name}.gguf"
        cut.write_bytes(data)
        status, out, err = run(capsys, "generate", "--model", str(cut), "x")
        assert (status, out) == (2, "")
        assert says in err and err.count("\n") == 1, err


def test_platforms_prints_every_row_and_evidence(capsys):
    status, out, _ = run(capsys, "platforms")
    assert status == 0
    for name in PLATFORMS:
        assert name in out
    assert "declared" in out and "measured" in out


def test_explain_says_who_serves_and_why_others_do_not(capsys):
    status, out, _ = run(capsys, "explain", "--platform", "cuda-sm90", "--sinks", "--kv-dtype", "int8")
    assert status == 0
    for part in ("xla/attend", "hopper/attend lacks int8_kv", "int8_kv, per_token_scales, sinks", "rows", "decode"):
        assert part in out
    status, out, err = run(capsys, "explain", "--alibi")
    assert (status, out) == (2, "")
    assert "xla/attend lacks alibi" in err
    status, _, err = run(capsys, "explain", "--mode", "sideways")
    assert status == 2 and "sideways" in err


def test_explain_takes_a_file_a_folder_or_heads(capsys, model, tmp_path):
    want = run(capsys, "explain")
    for source in (model, str(DATA / "hf" / "qwen2")):
        assert run(capsys, "explain", "--model", source) == want
    status, out, err = run(capsys, "explain", "--model", str(tmp_path))
    assert (status, out) == (2, "") and str(tmp_path) in err
