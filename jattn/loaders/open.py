"""One way in to a model on disk, whatever its format."""

import os
from pathlib import Path

from jattn.loaders.gguf_file import read_metadata
from jattn.loaders.hf_folder import read_folder
from jattn.loaders.weights import ModelFile


def open_model(path: str | os.PathLike[str]) -> ModelFile:
    """A GGUF file, or a Hugging Face folder with safetensors; read with `load_arrays` and its own `tokenizer`.

    Raises: ModelFileError, one sentence, if it is neither, or one that decoders here cannot run.
    """
    return read_folder(path) if Path(path).is_dir() else read_metadata(path)
