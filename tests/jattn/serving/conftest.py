"""The real model, loaded once a process, and engines over it."""

import json
from pathlib import Path

import pytest

from jattn.serving.loaded import LoadedModel, Options, load

REFERENCE = Path(__file__).parents[2] / "data" / "smollm2.json"


@pytest.fixture(scope="session")
def loaded() -> LoadedModel:
    return load(Options())


@pytest.fixture(scope="session")
def reference() -> dict:
    """name -> (prompt ids, 32 greedy ids) of three independent engines, float32."""
    prompts = json.loads(REFERENCE.read_text())["prompts"]
    return {name: (row["prompt_ids"], row["numpy"]["greedy32"]) for name, row in prompts.items()}
