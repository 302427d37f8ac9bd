"""Model names: found without importing the package that carries the file."""

import hashlib
import sys

import pytest

from jattn.loaders.errors import ModelFileError
from jattn.loaders.models import MODELS, locate


def test_a_name_of_the_table_is_found_without_importing_its_package():
    row = MODELS["smollm2-135m-instruct"]
    path = locate(row.name)
    assert path.name == row.file and path.is_file()
    assert row.package not in sys.modules


def test_the_installed_file_is_the_one_that_the_table_names():
    for row in MODELS.values():
        with locate(row.name).open("rb") as file:
            assert hashlib.file_digest(file, "sha256").hexdigest() == row.sha256


def test_a_path_is_taken_as_it_is(tmp_path, monkeypatch):
    assert locate(tmp_path / "a.gguf") == tmp_path / "a.gguf"
    assert str(locate("a.gguf")) == "a.gguf"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").write_bytes(b"")
    assert str(locate("weights")) == "weights"


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ModelFileError, match="unknown model 'smollm3': .* one of smollm2-135m-instruct"):
        locate("smollm3")


def test_a_model_that_is_not_installed_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelFileError, match="uv run --extra demo"):
        locate("smollm2-135m-instruct")
