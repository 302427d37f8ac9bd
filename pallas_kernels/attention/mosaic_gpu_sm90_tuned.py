"""Sizes of the Hopper attention that were measured to beat the heuristic; `scripts/tune.py` writes them."""

import functools
import json
from importlib import resources

from pallas_kernels.attention.mosaic_gpu_sm90_config import Config

_FILE = "tuned/h200.json"


@functools.cache
def _rows() -> dict[frozenset, Config]:
    text = resources.files(__package__).joinpath(_FILE).read_text()
    return {frozenset(row["facts"].items()): Config(**row["config"]) for row in json.loads(text)["rows"]}


def tuned(**facts) -> Config | None:
    """Sizes for exactly these facts, as `heuristic` takes them; None where none were found to be better."""
    return _rows().get(frozenset(facts.items()))
