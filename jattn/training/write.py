"""Many continuations at once: prompts padded to one length in front, one dense cache, one program."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn.models.decoder import Decoder
from jattn.training.dense import (
    attend_heads,
    check_dense,
    grouped,
    in_block,
    in_window,
    phases_of,
    project_heads,
    read_keys,
)


class Writer:
    """Continues `size` prompts at a time, greedily or by sampling, in the model's dtype.

    It is for texts by the ten thousand: nothing is paged, a row that has ended waits for the others.

    Args: prompt_len: longest prompt. new_tokens: most new tokens. stop_ids: tokens that end a text.
    Raises: ValueError for a model with other attention than grouped queries, windows and caps.
    """

    def __init__(self, model: Decoder, *, size: int, prompt_len: int, new_tokens: int, stop_ids: Sequence[int]):
        check_dense(model)
        self.size, self.prompt_len, self.new_tokens = size, prompt_len, new_tokens
        self.stop_ids = tuple(stop_ids)
        graphdef, self._params = nnx.split(model)

        def write(params, tokens, start, temperature, min_p, seed, most):
            return self._write(nnx.merge(graphdef, params), tokens, start, temperature, min_p, seed, most)

        self._run = jax.jit(write)

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        temperature: float = 0.0,
        min_p: float = 0.0,
        seed: int = 0,
        new_tokens: int | None = None,
    ) -> list[list[int]]:
        """New tokens of each prompt, the one that ended it included; at most `size` prompts.

        Args: temperature: 0 is greedy. min_p: least probability of a drawn token, relative to the likeliest.
          new_tokens: fewer than the writer's most.
        """
        return self.collect(
            self.start(prompts, temperature=temperature, min_p=min_p, seed=seed, new_tokens=new_tokens), len(prompts)
        )

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        temperature: float = 0.0,
        min_p: float = 0.0,
        seed: int = 0,
        new_tokens: int | None = None,
    ) -> jax.Array:
        """Begin a call; `collect` waits for it."""
        longest = max(map(len, prompts))
        if not 0 < len(prompts) <= self.size or not 0 < min(map(len, prompts)) or longest > self.prompt_len:
            raise ValueError(
                f"{len(prompts)} prompts, the longest of {longest} tokens: want 1 to {self.size} of 1 to "
                f"{self.prompt_len} each"
            )
        tokens = np.zeros((self.size, self.prompt_len), np.int32)
        start = np.full(self.size, self.prompt_len - 1, np.int32)
        for row, prompt in enumerate(prompts):
            start[row] = self.prompt_len - len(prompt)
            tokens[row, start[row] :] = prompt
        most = min(new_tokens or self.new_tokens, self.new_tokens)
        return self._run(
            self._params, tokens, start, np.float32(temperature), np.float32(min_p), np.int32(seed), np.int32(most)
        )

    def collect(self, made: jax.Array, count: int) -> list[list[int]]:
        """The texts of a call that `start` began."""
        return [row[row >= 0].tolist() for row in np.asarray(made)[:count]]

    def _write(self, model: Decoder, tokens, start, temperature, min_p, seed, most):
        # -> i32[size, new_tokens], -1 behind the end of a text
        size, width, columns = self.size, self.prompt_len, self.prompt_len + self.new_tokens
        at = jnp.arange(width, dtype=jnp.int32)
        own = at[None] >= start[:, None]
        # padding sees itself, so that no row of weights is empty
        seen = (own[:, None, :] & (at[None, :] <= at[:, None])[None]) | jnp.eye(width, dtype=bool)[None]
        hidden, _, kept = read_keys(model, tokens, jnp.maximum(at[None] - start[:, None], 0), seen)
        # heads before tokens: the products of a step run over the cache as it lies
        room = [(0, 0), (0, 0), (0, self.new_tokens), (0, 0)]
        caches = [tuple(jnp.pad(jnp.swapaxes(x, 1, 2), room) for x in pair) for pair in kept]
        key = jax.random.key(seed)
        choose = lambda hidden, step: _choose(  # noqa: E731
            model.logits(hidden), temperature, min_p, jax.random.fold_in(key, step)
        )
        first = choose(hidden[:, -1], 0)
        made = jnp.full((size, self.new_tokens), -1, jnp.int32).at[:, 0].set(first)
        ended = self._ends(first)

        def go_on(carry):
            step, _, ended, *_ = carry
            return (step < most) & ~jnp.all(ended)

        def one(carry):
            step, newest, ended, made, caches = carry
            hidden, caches = _step(model, newest, width + step - 1, start, caches, columns)
            newest = choose(hidden, step)
            made = jax.lax.dynamic_update_slice(made, jnp.where(ended, -1, newest)[:, None], (0, step))
            return step + 1, newest, ended | self._ends(newest), made, caches

        carry = (jnp.int32(1), first, ended, made, caches)
        return jax.lax.while_loop(go_on, one, carry)[3]

    def _ends(self, tokens):
        stops = jnp.asarray(self.stop_ids, jnp.int32)
        return jnp.any(tokens[:, None] == stops[None], axis=1)


def _step(model: Decoder, newest, column, start, caches, columns: int):
    # newest i32[size] at cache column `column` -> hidden states [size, d], caches
    x = model.embedded(newest)
    positions = column - start
    phases = phases_of(model, positions)
    at = jnp.arange(columns, dtype=jnp.int32)[None]
    seen, behind = (at >= start[:, None]) & (at <= column), column - at
    held = []
    for block, phase, (keys, values) in zip(model.layers, phases, caches, strict=True):
        attn = grouped(block)

        def attend(normed, attn=attn, phase=phase, keys=keys, values=values):
            q, k, v = project_heads(attn, normed, phase)
            keys = jax.lax.dynamic_update_slice(keys, k[:, :, None], (0, 0, column, 0))
            values = jax.lax.dynamic_update_slice(values, v[:, :, None], (0, 0, column, 0))
            held.append((keys, values))
            return attend_heads(q, keys, values, in_window(seen, behind, attn.spec), attn.spec)

        x = in_block(block, x, attend)
    return model.final_norm(x), held


def _choose(logits, temperature, min_p, key):
    # f32[size, vocab] -> i32[size]
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw():
        warm = logits / jnp.maximum(temperature, 1e-6)
        floor = jnp.max(warm, axis=-1, keepdims=True) + jnp.log(jnp.maximum(min_p, 1e-30))
        noise = jax.random.gumbel(key, logits.shape, jnp.float32)
        return jnp.argmax(jnp.where(warm >= floor, warm, -jnp.inf) + noise, axis=-1).astype(jnp.int32)

    return jax.lax.cond(temperature > 0, draw, lambda: best)
