"""The checkpoints that transformers wrote, with its logits: see scripts/make_hf_fixtures.py."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from jattn.loaders.open import open_model
from jattn.loaders.weights import load_arrays
from jattn.models.config import ModelConfig
from jattn.models.decoder import Decoder
from jattn.models.load import build_decoder
from jattn.resolve import resolve
from jattn.serving.build import config_of

HF = Path(__file__).parents[2] / "data" / "hf"
FAMILIES = tuple(sorted(path.name for path in HF.iterdir()))


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A folder, what it holds, and what is expected of it."""

    path: Path
    config: ModelConfig
    arrays: dict[str, np.ndarray]
    prompts: list[list[int]]  # two, which share their first tokens
    logits: list[np.ndarray]  # f32[tokens, vocab] of each
    greedy: list[list[int]]  # ids after each
    text: str
    text_ids: list[int]

    def build(self, config: ModelConfig | None = None, without: tuple[str, ...] = (), **kwargs) -> Decoder:
        """The model, or what is left of it under another config and without some of a layer's tensors."""
        config = config or self.config
        specs = config.attn_specs()
        choices = tuple(resolve(spec, "native", "cpu") for spec in specs)
        kept = [(name, array) for name, array in self.arrays.items() if name.rpartition(".")[2] not in without]
        return build_decoder(config, specs, choices, kept, weight_first=True, **kwargs)


@pytest.fixture(scope="session")
def checkpoint():
    """name -> Checkpoint, read once a process."""
    held: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        if name not in held:
            held[name] = _read(HF / name)
        return held[name]

    return get


def _read(path: Path) -> Checkpoint:
    file = open_model(path)
    expected = json.loads((path / "expected.json").read_text())
    with np.load(path / "expected.npz") as logits:
        rows = [logits["logits_0"], logits["logits_1"]]
    return Checkpoint(
        path=path,
        config=config_of(file.hparams),
        arrays=dict(load_arrays(file)),
        logits=rows,
        **{name: expected[name] for name in ("prompts", "greedy", "text", "text_ids")},
    )


def pytest_generate_tests(metafunc):
    """`family` runs over the folders; those that the module's LONG names for a test are long."""
    if "family" in metafunc.fixturenames:
        long = getattr(metafunc.module, "LONG", {}).get(metafunc.function.__name__, ())
        marks = {name: pytest.mark.long if name in long else () for name in FAMILIES}
        metafunc.parametrize("family", [pytest.param(name, marks=marks[name]) for name in FAMILIES])
