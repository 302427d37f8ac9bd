"""The engine that the scripts on drafts measure: greedy, with pages for all the context of each request."""

from collections.abc import Iterable

from jattn.sampling import SamplerConfig
from jattn.serving.engine import Engine
from jattn.serving.loaded import LoadedModel
from jattn.serving.scheduler import Sequence

GREEDY = SamplerConfig(random=False)


def tokens_a_round(sequences: Iterable[Sequence]) -> float:
    """Of the rounds that decoded them, bonus included; 0 where none did."""
    every = list(sequences)
    return sum(s.num_round_tokens for s in every) / max(sum(s.num_rounds for s in every), 1)


def engine_of(
    loaded: LoadedModel, *, num_slots: int = 1, max_context: int = 1024, page_size: int | None = None, **more
) -> Engine:
    """An engine of a loaded model; page_size: None is the model's. more: as `Engine` takes it."""
    page_size = page_size or loaded.page_size
    return Engine(
        loaded.model,
        num_layers=loaded.config.num_layers,
        num_slots=num_slots,
        num_pages=num_slots * max_context // page_size,
        page_size=page_size,
        max_context=max_context,
        sampler=GREEDY,
        **more,
    )
