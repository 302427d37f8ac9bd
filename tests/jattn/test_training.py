"""The unrolled loss against the head as it drafts: each step's logits are those of a draft of that depth."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draft_heads import draft_head
from flax import nnx
from tiny_model import tiny

from jattn.models.draft_head import WithStreams
from jattn.modes import ForwardMode
from jattn.plan import make_plan
from jattn.training import Batch, unrolled_loss

N, STEPS = 12, 3
TOKENS = np.random.default_rng(5).integers(0, 128, (2, N)).astype(np.int32)
quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
TABLE = jnp.arange(8, dtype=jnp.int32)[None]


def rows(start, count, width):
    """Plan of `count` rows from `start` on, padded to `width`."""
    lens = jnp.asarray(start + count)[None], jnp.asarray(count)[None]
    return make_plan(ForwardMode.EXTEND, *lens, TABLE, page_size=4, num_tokens=width, max_q_len=width)


@pytest.fixture(scope="module")
def held():
    model = tiny()
    head = draft_head(model, "eagle3", num_ids=50)
    target = WithStreams(model, head.taps)
    hidden, logits = [], []
    for text in TOKENS:
        cache = model.new_cache(num_pages=8, page_size=4, dtype=jnp.float32)
        out, _ = quick(lambda ids, cache: target(ids, cache, rows(0, N, N)))(jnp.asarray(text), cache)
        hidden.append(out)
        logits.append(target.logits(out)[:, head.token_ids()])
    learn = np.ones((2, N), bool)
    learn[1, :7] = False  # a prompt
    batch = Batch(
        tokens=jnp.asarray(TOKENS), learn=jnp.asarray(learn), hidden=jnp.stack(hidden), logits=jnp.stack(logits)
    )
    return head, batch


def drafts_of(head, tokens, hidden, row):
    """Logits [steps, drafted] of a chain of true tokens below row `row`, over the head's paged cache."""
    cache = head.new_cache(num_pages=8, page_size=4, dtype=jnp.float32)
    out, cache = head(jnp.roll(tokens, -1), head.features(hidden), cache, rows(0, row + 1, N))
    out = out[row][None]
    found = [head.logits(out)[0]]
    for level in range(1, STEPS):
        at = jnp.minimum(row + level + 1, N - 1)  # past the text nobody looks
        out, cache = head(tokens[at][None], out, cache, rows(row + level, 1, 1))
        found.append(head.logits(out)[0])
    return jnp.stack(found)


def test_each_step_is_a_draft_of_that_depth(held):
    head, batch = held
    ids = np.asarray(head.token_ids())
    loss, found = quick(lambda batch: unrolled_loss(head, batch, num_steps=STEPS))(batch)
    entropy, right, count = (np.zeros(STEPS) for _ in range(3))
    chain = quick(functools.partial(drafts_of, head))
    for seq in range(2):
        for row in range(N - 2):
            for step, logits in enumerate(chain(batch.tokens[seq], batch.hidden[seq], jnp.int32(row))):
                if row + step + 2 >= N or not batch.learn[seq, row + step + 2]:
                    continue
                q = np.asarray(jax.nn.log_softmax(logits), np.float64)
                p = np.asarray(jax.nn.softmax(batch.logits[seq, row + step + 1]), np.float64)
                entropy[step] -= (p * q).sum()
                right[step] += ids[int(np.argmax(q))] == TOKENS[seq, row + step + 2]
                count[step] += 1
    np.testing.assert_allclose(found.cross_entropy, entropy / count, rtol=2e-5)
    np.testing.assert_allclose(found.right, right / count, rtol=1e-6)
    weights = 0.9 ** np.arange(STEPS)
    assert float(loss) == pytest.approx(float((weights * entropy / count).sum() / weights.sum()), rel=2e-5)


def test_a_head_learns_and_the_target_does_not(held):
    head, batch = held
    loss = lambda head: unrolled_loss(head, batch, num_steps=2)[0]  # noqa: E731
    trained = nnx.All(nnx.Param, nnx.PathContains("body"))
    gradient = nnx.grad(loss, argnums=nnx.DiffState(0, trained))(head)
    sizes = {path: float(jnp.abs(leaf[...]).max()) for path, leaf in nnx.to_flat_state(gradient)}
    assert all(path[0] == "body" for path in sizes) and len(sizes) >= 8
    assert all(size > 0 for size in sizes.values())


def test_only_a_head_that_reads_several_layers_is_trained(held):
    _, batch = held
    with pytest.raises(TypeError, match="a head with a Eagle body: want Eagle3"):
        unrolled_loss(draft_head(tiny(), "eagle"), batch, num_steps=1)
