"""Two prompts through a model, step by step, over one paged cache; logits come back a prompt each."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jattn.combinators.latent_chunks import make_chunks
from jattn.models.latent import Form
from jattn.plan import make_plan

TOLERANCE = 2e-4  # of logits, in float32
PAGE = 4
TABLE = np.random.default_rng(0).permutation(24).reshape(2, 12).astype(np.int32)


@functools.partial(jax.jit, donate_argnums=1, compiler_options={"xla_backend_optimization_level": 0})
def step(model, cache, ids, plan, form):
    hidden, cache = model(ids, cache, plan, form)
    return model.logits(hidden), cache


class Run:
    """A model with a cache for the two prompts. method, capacity: of the forms of an MLA model's EXTEND steps."""

    def __init__(self, model, prompts, *, method=None, capacity=131072):
        self.model, self.prompts = model, prompts
        self.cache = model.new_cache(num_pages=24, page_size=PAGE, dtype=jnp.float32)
        self.lens = np.zeros(2, np.int32)
        self.method, self.capacity = method, capacity

    def take(self, mode, counts, *, rows, longest):
        """Logits of the next `counts` tokens of each prompt, in steps of `rows` packed rows, padded."""
        counts = np.asarray(counts, np.int32)
        ids = [p[n : n + c] for p, n, c in zip(self.prompts, self.lens, counts, strict=True)]
        self.lens = self.lens + counts
        lens = np.where(counts > 0, self.lens, 0)
        plan = make_plan(mode, lens, counts, TABLE, page_size=PAGE, num_tokens=rows, max_q_len=longest)
        form = None
        if self.method is not None and mode.is_extend() and not mode.is_target_verify():
            chunks = make_chunks(self.method, lens, counts, TABLE, page_size=PAGE, capacity=self.capacity)
            form = Form(method=self.method, chunks=chunks)
        return self.run(ids, plan, form)

    def run(self, ids, plan, form=None):
        packed = np.zeros(plan.num_tokens, np.int32)
        packed[: sum(map(len, ids))] = np.concatenate(ids)
        logits, self.cache = step(self.model, self.cache, jnp.asarray(packed), plan, form)
        edges = np.cumsum([len(part) for part in ids])
        return np.split(np.asarray(logits)[: edges[-1]], edges[:-1])


def within(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)
