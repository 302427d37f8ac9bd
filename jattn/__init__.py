"""Attention for LLM serving in JAX: paged kernels behind one door, dispatch as tables, speculation inside jit."""

from typing import TYPE_CHECKING

from jattn.attend import apply_sinks, attend, merge_states, rotate_write, write_attend, write_kv
from jattn.cache import MLACache, PagedKV, RaggedKV
from jattn.features import Feature
from jattn.modes import ForwardMode
from jattn.plan import Plan, Tree, make_plan
from jattn.resolve import Choice, NoBackendError, resolve
from jattn.spec import AttnSpec, MLASpec

if TYPE_CHECKING:
    from jattn.serving.generate import generate

__all__ = [
    "AttnSpec",
    "Choice",
    "Feature",
    "ForwardMode",
    "MLACache",
    "MLASpec",
    "NoBackendError",
    "PagedKV",
    "Plan",
    "RaggedKV",
    "Tree",
    "apply_sinks",
    "attend",
    "generate",
    "make_plan",
    "merge_states",
    "resolve",
    "rotate_write",
    "write_attend",
    "write_kv",
]


def __getattr__(name: str):
    # generate pulls in the model loaders, which a model author who wants attention alone does not install
    if name == "generate":
        from jattn.serving.generate import generate

        return generate
    raise AttributeError(f"module 'jattn' has no attribute {name!r}")
