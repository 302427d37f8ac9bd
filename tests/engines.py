"""Engines over a loaded model, for the serving tests."""

from jattn.serving.engine import Engine
from jattn.serving.loaded import LoadedModel
from jattn.serving.request import Request


def engine_of(loaded: LoadedModel, *, page_size: int = 16, num_steps: int = 15, num_slots: int = 3, **kwargs) -> Engine:
    """An engine with room for `num_slots` contexts of 512."""
    return Engine(
        loaded.model,
        num_layers=loaded.config.num_layers,
        num_slots=num_slots,
        num_pages=kwargs.pop("num_pages", num_slots * 512 // page_size),
        page_size=page_size,
        max_context=512,
        num_steps=num_steps,
        kind="cpu",
        **{"sampled": False, **kwargs},
    )


def serve(engine: Engine, prompts, **options):
    """Run prompts together; returns their sequences."""
    sequences = [engine.submit(Request(prompt_ids=ids, **options)) for ids in prompts]
    for _ in engine.run():
        pass
    return sequences
