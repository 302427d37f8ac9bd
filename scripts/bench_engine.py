"""The engine that the scripts on drafts measure: greedy, with pages for all the context of each request."""

from jattn.sampling import SamplerConfig
from jattn.serving.engine import Engine
from jattn.serving.loaded import LoadedModel

GREEDY = SamplerConfig(random=False)


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
