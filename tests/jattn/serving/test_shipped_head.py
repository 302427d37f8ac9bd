"""The draft head that comes with the package: what it is, and that it drafts for the model it was trained on."""

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from engines import engine_of, serve

from jattn.backends import policy_named
from jattn.loaders.chat import render_chat
from jattn.loaders.draft_heads import read_head
from jattn.loaders.errors import ModelFileError
from jattn.loaders.models import MODELS, has_head, locate_head
from jattn.platforms import detect
from jattn.serving.build import build_head
from jattn.serving.loaded import Options

NAME = "smollm2-135m-instruct"


def test_it_is_small_and_says_where_it_comes_from():
    folder = locate_head(NAME)
    head = read_head(folder)
    assert (head.kind, head.drafted, head.taps, head.target_dim) == ("eagle3", 8192, (2, 15, 27), 576)
    ids = head.token_ids()
    assert ids is not None and len(ids) == 8192 and ids.max() < 49152
    assert (folder / "model.safetensors").stat().st_size <= 12_000_000
    arrays = dict(head.arrays())
    assert all(np.isfinite(array).all() for array in arrays.values())
    for array in arrays.values():  # nothing was rounded after bfloat16
        np.testing.assert_array_equal(array, array.astype(ml_dtypes.bfloat16).astype(np.float32))
    record = json.loads((folder / "record.json").read_text())
    assert record["settings"]["model"] == NAME and record["steps"] > 1000
    assert record["texts"]["answer tokens"] > 1e6 and {"jax", "optax", "python"} <= record["versions"].keys()
    assert all(len(file["sha256"]) == 64 for file in record["texts"]["files"])
    curve = [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]
    assert curve[-1]["held"]["kept"][0] > 2 * curve[0]["held"]["kept"][0]


def test_other_models_have_none():
    assert [name for name in MODELS if has_head(name)] == [NAME]
    with pytest.raises(ModelFileError, match="no draft head for model '/some/model.gguf' comes with the package"):
        Options(model="/some/model.gguf", draft="eagle")
    assert (Options().draft, Options(model="/some/model.gguf").draft) == ("eagle", "ngram")


@pytest.mark.long  # a minute, most of it compiling
@pytest.mark.parametrize("draft", [dict(num_steps=5), dict(num_steps=5, topk=4, num_nodes=16)], ids=["chain", "tree"])
def test_its_drafts_are_kept_and_change_nothing(loaded, reference, draft):
    place: dict[str, Any] = dict(platform=detect(), rules=policy_named("native"), page_size=loaded.page_size)
    head = build_head(read_head(locate_head(NAME)), loaded.model, **place)
    engine = engine_of(loaded, drafter=head, kind="cuda", **draft)  # rows count as nearly free there
    asked = [{"role": "user", "content": "Write a Python function that returns the n-th Fibonacci number."}]
    asked_ids = loaded.tokenizer.encode(render_chat(loaded.metadata, asked))
    *sequences, chat = serve(engine, [*(prompt for prompt, _ in reference.values()), asked_ids], max_new_tokens=32)
    for sequence, (name, (_, want)) in zip(sequences, reference.items(), strict=True):
        assert sequence.new_ids == want, name
    # it knows conversations, not bare texts, where one draft in three is right
    assert loaded.tokenizer.decode(chat.new_ids).startswith("```python\ndef fibonacci(n):\n    if n <= 0:\n")
    assert chat.num_round_tokens / chat.num_rounds > 3
