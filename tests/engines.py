"""Engines over a loaded or a tiny model, for the serving tests."""

import contextlib
import functools
from unittest import mock

import jax
from tiny_model import CONFIG, tiny

import jattn.serving.programs
from jattn.sampling import SamplerConfig
from jattn.serving.engine import Engine
from jattn.serving.loaded import LoadedModel
from jattn.serving.request import Request

# Texts for the tiny model whose last tokens occurred before with different continuations, so that trees branch.
BRANCHING = [[3, 4, 5, 3, 4, 6, 3, 4, 7, 3, 4], [9, 9, 9, 8, 9, 9, 7, 9, 9], [1], [(5 * i) % 11 for i in range(40)]]
BRANCHING_OPTIONS = dict(max_new_tokens=24, seed=3, top_p=0.95)


@contextlib.contextmanager
def quick_programs():
    """Engines built inside compile at the lowest level of code generation: the same programs, a third less time."""
    quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    with mock.patch.object(jattn.serving.programs.jax, "jit", quick):
        yield


def plain_ids() -> dict[float, list[list[int]]]:
    """temperature -> tokens of each of BRANCHING, served alone and without drafts."""
    engine = tiny_engine(num_steps=0)
    return {
        t: [serve(engine, [prompt], temperature=t, **BRANCHING_OPTIONS)[0].new_ids for prompt in BRANCHING]
        for t in (0.0, 0.05)
    }


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
        **{"kind": "cpu", "sampler": SamplerConfig(random=False), **kwargs},
    )


def tiny_engine(*, num_steps: int, page_size: int = 4, num_pages: int | None = None, **kwargs) -> Engine:
    """An engine of the tiny model with three slots of 128 tokens; draft rows count as cheap, so trees are tried."""
    build = quick_programs()(Engine)
    return build(
        kwargs.pop("model", None) or tiny(),
        num_layers=CONFIG.num_layers,
        num_slots=3,
        num_pages=num_pages or -(-400 // page_size),
        page_size=page_size,
        max_context=128,
        num_steps=num_steps,
        kind="cuda",
        prefill_rows=(32,),
        **kwargs,
    )


def serve(engine: Engine, prompts, **options):
    """Run prompts together; returns their sequences."""
    sequences = [engine.submit(Request(prompt_ids=ids, **options)) for ids in prompts]
    for _ in engine.run():
        pass
    return sequences
