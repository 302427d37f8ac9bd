"""Tiny files and the real one, for the loader tests."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_gguf import Parts, llama_parts, tiny_vocabulary

from jattn.loaders.gguf_file import GgufModel, read_metadata
from jattn.loaders.models import locate
from jattn.loaders.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def parts() -> Callable[..., Parts]:
    """Build the parts of a tiny llama file."""
    return llama_parts


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory) -> Path:
    """A whole tiny llama file."""
    return llama_parts().write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="session")
def vocabulary() -> dict[str, Any]:
    """Tokenizer metadata of the tiny file; copy it before changing it."""
    return tiny_vocabulary()


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Tokenizer:
    """The tokenizer of the tiny file."""
    return Tokenizer.from_metadata(tiny_vocabulary())


@pytest.fixture(scope="session")
def smol() -> GgufModel:
    """The real model that the test extra installs."""
    return read_metadata(locate("smollm2-135m-instruct"))


@pytest.fixture(scope="session")
def smol_tokenizer(smol) -> Tokenizer:
    """Its tokenizer."""
    return Tokenizer.from_metadata(smol.metadata)


@pytest.fixture(scope="session")
def reference() -> dict[str, Any]:
    """What independent engines made of the real model."""
    return json.loads((Path(__file__).parents[2] / "data" / "smollm2.json").read_text())
