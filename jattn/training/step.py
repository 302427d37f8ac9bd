"""One step of training: the target reads a batch, the head learns from what it computed."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jattn.cache import Cache
from jattn.models.decoder import Decoder
from jattn.models.draft_head import DraftHead, WithStreams
from jattn.modes import ForwardMode
from jattn.plan import make_plan
from jattn.training.unroll import Batch, Losses, unrolled_loss

_PAGE = 16


class Progress(NamedTuple):
    """What training carries from step to step."""

    params: Any  # of the head's body, float32
    optimiser: Any
    step: jax.Array  # i32[]


class Trainer:
    """Trains the body of a head, in float32, over a target that stays as it is and computes in its own dtype.

    Args: size, length: of a batch. num_steps: draft steps that are unrolled. decay: weight of each next one.
    """

    def __init__(
        self,
        target: Decoder,
        head: DraftHead,
        schedule: optax.Schedule,
        *,
        size: int,
        length: int,
        num_steps: int,
        decay: float = 0.9,
        weight_decay: float = 0.01,
    ):
        self.graphdef, params, self.rest = nnx.split(head, nnx.PathContains("body"), ...)
        self.dtype = target.embed.dtype
        self.optimiser = optax.chain(
            optax.clip_by_global_norm(0.5), optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=weight_decay)
        )
        params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        self.start = Progress(params, self.optimiser.init(params), jnp.int32(0))
        pages = size * (-(-length // _PAGE))
        self.cache: Cache = target.new_cache(num_pages=pages, page_size=_PAGE, dtype=self.dtype)
        target_def, target_state = nnx.split(target)
        loss_of = lambda params, rest, batch: unrolled_loss(  # noqa: E731
            self.head(params, rest), batch, num_steps=num_steps, decay=decay
        )

        def read(state, rest, params, cache, tokens, learn):
            model = nnx.merge(target_def, state)
            head = self.head(params, rest)
            plan = make_plan(
                ForwardMode.EXTEND,
                jnp.full(size, length, jnp.int32),
                jnp.full(size, length, jnp.int32),
                jnp.arange(pages, dtype=jnp.int32).reshape(size, -1),
                page_size=_PAGE,
                num_tokens=size * length,
                max_q_len=length,
            )
            observed = WithStreams(model, head.taps) if head.taps else model
            hidden, cache = observed(tokens.reshape(-1), cache, plan)
            logits = model.logits(hidden[:, : model.config.d_model])
            ids = head.token_ids()
            logits = logits if ids is None else logits[:, ids]
            shaped = (x.reshape(size, length, -1) for x in (hidden, logits))
            hidden, logits = shaped
            return Batch(tokens=tokens, learn=learn, hidden=hidden, logits=logits), cache

        def train(progress: Progress, state, rest, cache, tokens, learn):
            batch, cache = read(state, rest, progress.params, cache, tokens, learn)
            (_, found), gradient = jax.value_and_grad(loss_of, has_aux=True)(progress.params, rest, batch)
            with jax.numpy_dtype_promotion("standard"):  # optax mixes its step count with floats
                updates, optimiser = self.optimiser.update(gradient, progress.optimiser, progress.params)
                params = optax.apply_updates(progress.params, updates)
            return Progress(params, optimiser, progress.step + 1), cache, found

        def judge(progress: Progress, state, rest, cache, tokens, learn):
            batch, cache = read(state, rest, progress.params, cache, tokens, learn)
            return cache, loss_of(progress.params, rest, batch)[1]

        self._target = target_state
        self._train = jax.jit(train, donate_argnums=(0, 3))
        self._judge = jax.jit(judge, donate_argnums=3)

    def head(self, params, rest=None) -> DraftHead:
        """The head with these weights, in the target's dtype."""
        cast = jax.tree.map(lambda x: x.astype(self.dtype), params)
        return nnx.merge(self.graphdef, cast, self.rest if rest is None else rest)

    def train(self, progress: Progress, tokens, learn) -> tuple[Progress, Losses]:
        """One step on (tokens, learn) of `Texts.batches`; `progress` is consumed."""
        progress, self.cache, found = self._train(progress, self._target, self.rest, self.cache, tokens, learn)
        return progress, found

    def judge(self, progress: Progress, tokens, learn) -> Losses:
        """The losses on a batch, without learning from it."""
        self.cache, found = self._judge(progress, self._target, self.rest, self.cache, tokens, learn)
        return found
