"""Law: a scan equals a loop, whatever is carried. A drafter's inputs are the target's, one token later."""

import dataclasses

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.combinators.draft import draft, draft_inputs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chain:
    """A made-up drafter: a linear congruence a request, and a cache that each step writes."""

    token: jax.Array  # i32[seqs]
    cache: jax.Array  # f32[seqs, steps]
    at: jax.Array  # i32[]


def step(chain: Chain):
    token = (chain.token * 13 + 5) % 101
    cache = chain.cache.at[:, chain.at].set(token.astype(jnp.float32) / 3)
    return Chain(token, cache, chain.at + 1), token


@pytest.mark.parametrize("num_steps", [0, 1, 7])
def test_a_drafting_scan_equals_a_loop(num_steps):
    start = Chain(jnp.array([3, 50, 99], jnp.int32), jnp.zeros((3, 7)), jnp.int32(0))
    state, tokens = jax.jit(lambda chain: draft(step, chain, num_steps=num_steps))(start)
    want, rows = start, []
    for _ in range(num_steps):
        want, token = step(want)
        rows.append(np.asarray(token))
    np.testing.assert_array_equal(tokens, np.array(rows, np.int32).reshape(num_steps, 3).T)
    jax.tree.map(np.testing.assert_array_equal, state, want)


def test_tokens_of_a_request_are_a_row():
    _, tokens = draft(lambda n: (n + 1, n), jnp.array([10, 20], jnp.int32), num_steps=3)
    assert tokens.tolist() == [[10, 11, 12], [20, 21, 22]]


@pytest.mark.parametrize("padding", [0, 3])
def test_a_drafter_reads_each_request_one_token_later(padding):
    case = cases.build("C24")
    ins = {name: np.asarray(x, np.int32) for name, x in case.inputs.items()}
    rows = len(ins["tokens"])
    # a request without rows at each end and inside, and rows of padding behind
    lens, new = np.insert(ins["lens"], [0, 2, 4], 0), np.insert(ins["new_tokens"], [0, 2, 4], 99)
    cu_q_lens = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    tokens = np.pad(ins["tokens"], (0, padding), constant_values=77)
    ids, last = map(np.asarray, jax.jit(draft_inputs)(tokens, cu_q_lens, new))
    assert case.check({"draft_tokens": ids[:rows], "last_row": last[lens > 0], "hidden_row": np.arange(rows)}) == []
    assert (ids[rows:] == 77).all() and (last[lens == 0] == -1).all()
