"""The unrolled loss against the head as it drafts: each step's logits are those of a draft of that depth."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draft_heads import draft_head
from engines import serve, tiny_engine
from flax import nnx
from tiny_model import tiny

from jattn.models.draft_head import WithStreams
from jattn.modes import ForwardMode
from jattn.plan import make_plan
from jattn.serving.compilations import counting
from jattn.training import Batch, Texts, Trainer, Writer, unrolled_loss
from jattn.training.dense import read

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
        tokens=jnp.asarray(TOKENS),
        segments=jnp.ones_like(jnp.asarray(TOKENS)),
        learn=jnp.asarray(learn),
        hidden=jnp.stack(hidden),
        logits=jnp.stack(logits),
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
    divergence, right, count = (np.zeros(STEPS) for _ in range(3))
    chain = quick(functools.partial(drafts_of, head))
    for seq in range(2):
        for row in range(N - 2):
            for step, logits in enumerate(chain(batch.tokens[seq], batch.hidden[seq], jnp.int32(row))):
                if row + step + 2 >= N or not batch.learn[seq, row + step + 2]:
                    continue
                q = np.asarray(jax.nn.log_softmax(logits), np.float64)
                p = np.asarray(jax.nn.softmax(batch.logits[seq, row + step + 1]), np.float64)
                divergence[step] += (p * (np.log(p) - q)).sum()
                right[step] += ids[int(np.argmax(q))] == TOKENS[seq, row + step + 2]
                count[step] += 1
    np.testing.assert_allclose(found.divergence, divergence / count, rtol=1e-4)
    np.testing.assert_allclose(found.right, right / count, rtol=1e-6)
    weights = 0.9 ** np.arange(STEPS)
    assert float(loss) == pytest.approx(float((weights * divergence / count).sum() / weights.sum()), rel=1e-4)


@pytest.mark.long
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


@pytest.fixture(scope="module")
def texts():
    draw = np.random.default_rng(2)
    return Texts([draw.integers(0, 40, n).astype(np.int32) for n in (20, 9, 31, 14)], [4, 3, 0, 2])


def test_texts_are_kept_packed_and_counted(texts, tmp_path):
    texts.save(tmp_path / "a.npz")
    again = Texts.load([tmp_path / "a.npz", tmp_path / "a.npz"])
    assert [x.tolist() for x in again.ids] == [x.tolist() for x in texts.ids * 2]
    assert again.prompt_lens == texts.prompt_lens * 2
    rows, found = texts.packed(4, 24, seed=1), []
    for _ in range(6):
        tokens, segments, learn = next(rows)
        assert (segments >= 0).all() and not learn[segments == 0].any() and (tokens[segments == 0] == 0).all()
        for row, own, answers in zip(tokens, segments, learn, strict=True):
            assert (np.diff(np.trim_zeros(own, "b")) >= 0).all()
            for segment in range(1, own.max() + 1):
                found.append((row[own == segment].tolist(), (~answers[own == segment]).sum()))
    want = [(x[:24].tolist(), n) for x, n in zip(texts.ids, texts.prompt_lens, strict=True)]
    counts = [found.count(one) for one in want]
    assert sum(counts) == len(found) and min(counts) >= max(counts) - 3, "whole texts, each as often"
    answers = np.concatenate([x[n:] for x, n in zip(texts.ids, texts.prompt_lens, strict=True)])
    common, covered = texts.common(10, 128)
    rare = np.setdiff1d(np.arange(128), common)
    count = np.bincount(answers, minlength=128)
    assert (np.diff(count[common]) <= 0).all()
    assert count[common].min() >= count[rare].max()
    assert covered == pytest.approx(count[common].sum() / count.sum())
    learn_from, judge_by = texts.split(0.3)
    assert len(learn_from.ids) == 3 and len(judge_by.ids) == 1
    with pytest.raises(ValueError, match="holds no texts"):
        (tmp_path / "b.npz").write_bytes(b"no")
        Texts.load([tmp_path / "b.npz"])
    with pytest.raises(ValueError, match="count=0 of 128 tokens"):
        texts.common(0, 128)


def test_texts_in_a_row_do_not_see_each_other(held):
    head, batch = held
    whole = quick(lambda batch: unrolled_loss(head, batch, num_steps=STEPS))
    _, apart = whole(batch)
    # both texts in one row, and the row of the second text alone behind them
    joined = {name: getattr(batch, name).reshape(1, 2 * N, *getattr(batch, name).shape[2:])
              for name in ("tokens", "learn", "hidden", "logits")}  # fmt: skip
    segments = jnp.repeat(jnp.asarray([[1, 2]], jnp.int32), N, axis=1)
    _, together = whole(Batch(segments=segments, **joined))
    for name, want in apart._asdict().items():
        np.testing.assert_allclose(getattr(together, name), want, rtol=1e-5, err_msg=name)


def test_the_target_reads_packed_texts_as_it_reads_them_alone():
    model = tiny()
    tokens = jnp.asarray(TOKENS.reshape(1, -1))
    segments = jnp.repeat(jnp.asarray([[1, 2]], jnp.int32), N, axis=1)
    hidden, streams = quick(lambda ids, own: read(model, ids, own, taps=(0, 2)))(tokens, segments)
    assert len(streams) == 2
    for at, text in enumerate(TOKENS):
        cache = model.new_cache(num_pages=8, page_size=4, dtype=jnp.float32)
        target = WithStreams(model, (0, 2))
        want, _ = quick(lambda ids, cache: target(ids, cache, rows(0, N, N)))(jnp.asarray(text), cache)  # noqa: B023
        got = jnp.concatenate([hidden, *streams], axis=-1)[0, at * N : (at + 1) * N]
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_many_texts_are_written_as_the_engine_writes_them():
    model, draw = tiny(), np.random.default_rng(0)
    prompts = [draw.integers(0, 128, n).tolist() for n in (5, 9, 1, 12)]
    engine = tiny_engine(num_steps=0, model=model)
    sequences = [serve(engine, [p], max_new_tokens=20, stop_ids=(3, 7))[0] for p in prompts]
    writer = Writer(model, size=5, prompt_len=12, new_tokens=20, stop_ids=(3, 7))
    greedy = writer(prompts)
    assert greedy == [sequence.new_ids for sequence in sequences]
    assert len({len(one) for one in greedy}) > 1  # one has met a stop
    with counting() as count:
        assert writer(prompts, new_tokens=4) == [one[:4] for one in greedy]
        drawn = writer(prompts, temperature=1.0, seed=1)
        assert drawn != greedy and drawn == writer(prompts, temperature=1.0, seed=1)
        assert writer(prompts, temperature=1.0, seed=1, min_p=0.9999) == greedy
    assert count.value == 0
    with pytest.raises(ValueError, match="the longest of 13 tokens: want 1 to 5 of 1 to 12 each"):
        writer([[1] * 13])


@pytest.mark.long
def test_training_fits_a_few_texts_and_leaves_the_target_alone(texts):
    model = tiny()
    head = draft_head(model, "eagle3", num_ids=None)
    before = jax.tree.map(np.asarray, nnx.state(model))
    trainer = Trainer(model, head, num_steps=2)
    batches, found = texts.packed(3, 32, seed=0), []
    progress = trainer.begin(next(batches))
    with counting() as count:
        for _ in range(40):
            progress, losses = trainer.train(progress, next(batches), 1e-2)
            found.append((np.asarray(losses.divergence), count.value))
    (first, compiled), (last, in_all) = found[0], found[-1]
    assert in_all == compiled
    assert (last < 0.5 * first).all()
    assert int(progress.step) == 40
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, nnx.state(model)))
    rows = next(batches)
    judged, right = trainer.judge(progress, rows), trainer.right(progress, rows)
    np.testing.assert_allclose(judged.divergence, last, rtol=0.3)  # the same texts, in another order
    # the head for streams as they come drafts as the trained one does for scaled streams
    trained = trainer.head(progress)
    assert trained.embed.dtype == model.embed.dtype and trained.taps == head.taps
    hidden, streams = read(model, *map(jnp.asarray, rows[:2]), taps=head.taps)
    logits = model.logits(hidden.reshape(-1, 48)).reshape(*rows.tokens.shape, -1)
    batch = Batch(
        tokens=jnp.asarray(rows.tokens),
        segments=jnp.asarray(rows.segments),
        learn=jnp.asarray(rows.learn),
        hidden=jnp.concatenate(streams, axis=-1),
        logits=logits,
    )
    _, whole = quick(lambda batch: unrolled_loss(trained, batch, num_steps=2))(batch)
    np.testing.assert_allclose(whole.divergence, judged.divergence, rtol=1e-3)
    np.testing.assert_allclose(np.asarray(whole.right) * rows.learn.sum(), np.asarray(right).sum((0, 1)), rtol=0.2)
