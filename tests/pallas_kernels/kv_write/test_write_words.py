"""Words put into a TPU pool and moved in it by copies, interpreted with race detection, as a scatter would do it."""

import jax.numpy as jnp
import numpy as np
from watched import CHECKED, assert_no_race

from pallas_kernels.kv_write import move, tpu_words


def test_words_lie_where_their_rows_say_and_nowhere_else():
    rng = np.random.default_rng(0)
    pool, words = (rng.integers(-9, 9, (*shape, 2, 1, 128), dtype=np.int32) for shape in ((5, 3), (4,)))
    rows, held = np.array([7, 0, 14, 2], np.int32), np.array([True, True, True, False])
    got = tpu_words.copy_words(*map(jnp.asarray, (pool, words, rows, held)), interpret=CHECKED)
    want = pool.reshape(15, 2, 1, 128).copy()
    want[rows[held]] = words[held]
    np.testing.assert_array_equal(got, want.reshape(pool.shape))
    assert_no_race()


def test_more_tokens_than_scalar_memory_holds_go_in_turns(monkeypatch):
    monkeypatch.setattr(tpu_words, "_TOKENS", 2)
    pool, words = jnp.zeros((2, 3, 1, 1, 128), jnp.int32), jnp.ones((3, 1, 1, 128), jnp.int32)
    got = tpu_words.copy_words(pool, words, jnp.array([0, 2, 4]), jnp.ones(3, bool), interpret=CHECKED)
    assert got[:, :, 0, 0, 0].tolist() == [[1, 0, 1], [0, 1, 0]]
    assert_no_race()


def test_words_move_in_every_layer_and_may_take_a_place_that_was_read_before():
    pool = np.random.default_rng(0).integers(-9, 9, (2 * 3, 5, 1, 1, 128), dtype=np.int32)  # two layers of three pages
    sources, targets = np.array([7, 11, 3, 14], np.int32), np.array([2, 7, 9, 14], np.int32)
    held = np.array([True, True, False, True])
    given = (jnp.asarray(x) for x in (pool, sources, targets, held))
    got = tpu_words.move_words(*given, num_layers=2, interpret=CHECKED)
    want = pool.reshape(2, 15, 128).copy()
    want[:, targets[held]] = pool.reshape(2, 15, 128)[:, sources[held]]
    np.testing.assert_array_equal(got, want.reshape(pool.shape))
    assert_no_race()
    there = jnp.asarray(np.where(held, targets, -1))
    (plain,) = move.move_rows((jnp.asarray(pool),), jnp.asarray(sources), there, num_pages=3)
    np.testing.assert_array_equal(got, plain)
