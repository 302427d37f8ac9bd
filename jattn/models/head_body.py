"""What the networks of draft heads have in common."""

from typing import Any

import jax
from flax import nnx

from jattn.cache import Cache
from jattn.models.config import ModelConfig
from jattn.models.decoder import Spec, new_cache
from jattn.plan import Plan


class HeadBody(nnx.Module):
    """The network of a head, between the embedding and the vocabulary; it reads the target's states as they come.

    Attributes:
      ahead: 1, or as many layers as tokens are drafted, each for a step of its own. chained: whether a layer of those
        reads the hidden states of the layer before, not the target's. num_cached: layers with keys.
    """

    config: ModelConfig
    spec: Spec
    kv_layout: str | None
    ahead: int = 1
    chained: bool = True
    num_cached: int = 1

    def __call__(
        self, embedded: jax.Array, features: jax.Array, cache: Cache, plan: Plan, /, *, layer: int = 0
    ) -> tuple[jax.Array, Cache]:
        """[rows, d] each -> hidden states [rows, d], the features of the next level. layer: 0 to `ahead` - 1."""
        raise NotImplementedError

    def features(self, hidden: jax.Array, /) -> jax.Array:
        """What the target's states [..., width] become."""
        return hidden

    def readout(self, hidden: jax.Array, /) -> jax.Array:
        """Hidden states -> what the rows of the vocabulary are multiplied with, [rows, d]."""
        return hidden

    def new_cache(self, *, num_pages: int, page_size: int, dtype=None) -> Cache:
        """An empty cache of the head's layers; dtype: where the spec names none."""
        sizes: dict[str, Any] = dict(num_pages=num_pages, page_size=page_size, dtype=dtype)
        return new_cache(self.spec, num_layers=self.num_cached, layout=self.kv_layout, **sizes)
