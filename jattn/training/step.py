"""One step of training: the target reads a batch, the head learns from what it computed."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from optax.contrib import muon

from jattn.models.decoder import Decoder
from jattn.models.draft_head import DraftHead
from jattn.models.layers import project
from jattn.training.dense import check_dense, read
from jattn.training.texts import Packed
from jattn.training.unroll import Batch, Losses, unrolled, unrolled_loss


class Progress(NamedTuple):
    """What training carries from step to step."""

    params: Any  # of the head's body, float32
    scale: jax.Array  # f32[width of the streams], what they are multiplied with before `fc` while training
    optimiser: Any
    step: jax.Array  # i32[]


class Trainer:
    """Trains the body of a head, in float32, over a target that stays as it is and computes in its own dtype.

    Matrices learn by Muon (https://kellerjordan.github.io/posts/muon/, with the scale of arXiv:2502.16982), norms by
    Adam. Streams differ a thousandfold from channel to channel, so `fc` is trained on channels of equal size
    (`begin` measures them) and `head` folds the sizes into its weights.

    Args: num_steps: draft steps that are unrolled. decay: weight of each next one. fused: cuDNN's attention in the
      target, for half precision on a GPU.
    """

    def __init__(
        self,
        target: Decoder,
        head: DraftHead,
        *,
        num_steps: int,
        decay: float = 0.9,
        weight_decay: float = 0.01,
        fused: bool = False,
    ):
        check_dense(target)
        self.graphdef, params, self.rest = nnx.split(head, nnx.PathContains("body"), ...)
        self.dtype, self.num_steps = target.embed.dtype, num_steps
        self.optimiser = optax.chain(
            optax.clip_by_global_norm(1.0), muon(1.0, weight_decay=weight_decay, consistent_rms=0.2, adam_b2=0.95)
        )
        # copies: a step donates them, and the target may hold one of these arrays, too
        params = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), params)
        width = head.feature_dim
        self.start = Progress(params, jnp.ones(width, jnp.float32), self._empty(params), jnp.int32(0))
        target_def, self._target = nnx.split(target)

        def look(state, rest, params, scale, tokens, segments, learn):
            model, head = nnx.merge(target_def, state), self._raw(params, rest)
            hidden, streams = read(model, tokens, segments, taps=head.taps, fused=fused)
            rows = model.embed[...] if model.config.tied_embeddings else model.lm_head.weight[...]
            ids = head.token_ids()
            rows = rows if ids is None else rows[ids]
            flat = hidden.reshape(-1, hidden.shape[-1])
            logits = project(flat, rows, weight_first=model.weight_first, out_dtype=jnp.float32)
            wide = jnp.concatenate(streams, axis=-1) if head.taps else hidden
            wide = (wide.astype(jnp.float32) * scale[None, None]).astype(wide.dtype)
            logits = logits.reshape(*tokens.shape, -1)
            if (cap := model.config.final_soft_cap) is not None:
                logits = cap * jnp.tanh(logits / cap)
            return Batch(tokens=tokens, segments=segments, learn=learn, hidden=wide, logits=logits)

        loss_of = lambda params, rest, batch: unrolled_loss(  # noqa: E731
            self._raw(params, rest), batch, num_steps=num_steps, decay=decay
        )

        def train(progress: Progress, state, rest, rows, rate):
            batch = look(state, rest, progress.params, progress.scale, *rows)
            (_, found), gradient = jax.value_and_grad(loss_of, has_aux=True)(progress.params, rest, batch)
            with jax.numpy_dtype_promotion("standard"):  # optax mixes its step count with floats
                updates, optimiser = self.optimiser.update(gradient, progress.optimiser, progress.params)
                updates = jax.tree.map(lambda x: rate * x, updates)
                params = optax.apply_updates(progress.params, updates)
            return Progress(params, progress.scale, optimiser, progress.step + 1), found

        def judge(progress: Progress, state, rest, rows):
            return loss_of(progress.params, rest, look(state, rest, progress.params, progress.scale, *rows))[1]

        def right(progress: Progress, state, rest, rows):
            batch = look(state, rest, progress.params, progress.scale, *rows)
            steps = unrolled(self._raw(progress.params, rest), batch, num_steps=num_steps)
            return jnp.stack([step.right & step.learn for step in steps], axis=-1)

        def sizes(params, state, rest, rows):
            batch = look(state, rest, params, jnp.ones(width, jnp.float32), *rows)
            square = jnp.where(batch.learn[..., None], jnp.square(batch.hidden.astype(jnp.float32)), 0.0)
            return jnp.sqrt(jnp.sum(square, axis=(0, 1)) / jnp.maximum(jnp.sum(batch.learn), 1).astype(jnp.float32))

        self._train = jax.jit(train, donate_argnums=0)
        self._judge, self._right, self._sizes = jax.jit(judge), jax.jit(right), jax.jit(sizes)

    def begin(self, rows: Packed) -> Progress:
        """The start, with the scale of the channels measured on a batch."""
        sizes = self._sizes(self.start.params, self._target, self.rest, tuple(rows))
        start = jax.tree.map(jnp.copy, self.start)  # the first step donates it
        return start._replace(scale=1.0 / jnp.maximum(sizes, 1e-3 * jnp.mean(sizes)))

    def head(self, progress: Progress) -> DraftHead:
        """The head as far as it is trained, in the target's dtype, for streams as they come."""
        params = progress.params
        flat = dict(nnx.to_flat_state(params))
        path = ("body", "fc", "weight")
        flat[path] = flat[path].replace(flat[path][...] * progress.scale[None])
        return self._raw(nnx.from_flat_state(flat), self.rest)

    def train(self, progress: Progress, rows: Packed, rate: float) -> tuple[Progress, Losses]:
        """One step at learning rate `rate`; `progress` is consumed."""
        return self._train(progress, self._target, self.rest, tuple(rows), np.float32(rate))

    def judge(self, progress: Progress, rows: Packed) -> Losses:
        """The losses on a batch, without learning from it."""
        return self._judge(progress, self._target, self.rest, tuple(rows))

    def right(self, progress: Progress, rows: Packed) -> jax.Array:
        """bool[size, length, num_steps]: whether the k-th draft of a chain behind token i + 1 would be right."""
        return self._right(progress, self._target, self.rest, tuple(rows))

    def _empty(self, params):
        with jax.numpy_dtype_promotion("standard"):
            return self.optimiser.init(params)

    def _raw(self, params, rest) -> DraftHead:
        # in the target's dtype, for scaled streams
        return nnx.merge(self.graphdef, jax.tree.map(lambda x: x.astype(self.dtype), params), rest)
