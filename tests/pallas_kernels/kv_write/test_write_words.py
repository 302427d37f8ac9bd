"""Words put into a TPU pool by copies, interpreted with race detection, as a scatter would put them."""

import jax.numpy as jnp
import numpy as np
from watched import CHECKED, assert_no_race

from pallas_kernels.kv_write import tpu_words


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
