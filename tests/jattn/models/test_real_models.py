"""Real GGUF files, where `JATTN_TEST_MODELS` names a folder with them: ids of texts and greedy ids.

`reference/greedy.json` holds what a NumPy forward pass, transformers and llama.cpp agreed on, by the file's sha256.
"""

import hashlib
import json
import os
from pathlib import Path

import pytest

import jattn
from jattn.loaders.gguf_file import read_metadata

REFERENCE = json.loads((Path(__file__).parent / "reference" / "greedy.json").read_text())


def find(sha256: str) -> Path:
    folder = os.environ.get("JATTN_TEST_MODELS")
    if folder is None:
        pytest.skip("JATTN_TEST_MODELS names no folder with GGUF files")
    for path in sorted(Path(folder).rglob("*.gguf")):
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == sha256:
                return path
    pytest.skip(f"no .gguf file under JATTN_TEST_MODELS has sha256 {sha256[:12]}...")


@pytest.mark.parametrize("name", REFERENCE)
def test_greedy_ids_are_those_of_three_engines(name):
    row = REFERENCE[name]
    path, prompts = find(row["sha256"]), list(row["prompts"].values())
    tokenizer = read_metadata(path).tokenizer()
    for prompt in prompts:
        if prompt["text"] is not None:
            assert tokenizer.encode(prompt["text"]) == prompt["prompt_ids"]
    options = dict(model=str(path), max_new_tokens=32, ignore_eos=True, dtype="float32")
    answers = jattn.generate([prompt["prompt_ids"] for prompt in prompts], **options)
    assert [answer.ids for answer in answers] == [prompt["greedy"] for prompt in prompts]
