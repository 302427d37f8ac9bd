"""The target scores each request's newest token and its drafts in one ragged forward."""

import jax
import jax.numpy as jnp

from jattn.cache import PagedKV
from jattn.combinators.state import Decoder, DecodeState
from jattn.combinators.tree import DraftTree
from jattn.modes import ForwardMode
from jattn.plan import Plan, make_plan, offsets_of, rows_of
from jattn.sampling import next_tokens


def verify(
    model: Decoder,
    state: DecodeState,
    drafts: jax.Array,
    take: jax.Array,
    *,
    rows: int,
    max_q_len: int,
    sampled: bool = True,
) -> tuple[PagedKV, jax.Array]:
    """Run the target over packed rows: for each decoding request its newest token, then `take` drafts.

    Args: drafts: i32[seqs, steps]. take: i32[seqs], at most max_q_len - 1. rows, max_q_len: static shape.
      sampled: False when every request is greedy.
    Returns: the cache with these rows written, and i32[seqs, steps + 1]: the target's token after each row.
    """
    q_lens = jnp.where(state.decoding, 1 + take, 0)
    lens = jnp.where(state.decoding, state.seq_lens + q_lens, 0)
    mode = ForwardMode.DECODE if max_q_len == 1 else ForwardMode.TARGET_VERIFY
    plan = make_plan(
        mode, lens, q_lens, state.page_table, page_size=state.cache.page_size, num_tokens=rows, max_q_len=max_q_len
    )
    seq, idx, _ = rows_of(plan.cu_q_lens, rows)
    known = jnp.concatenate([state.newest[:, None], drafts], axis=1)
    ids = known[seq, jnp.clip(idx, 0, drafts.shape[1])]
    hidden, cache = model(ids, state.cache, plan)
    tokens = next_tokens(model.logits(hidden), state.sampling.at(seq), plan.positions + 1, sampled=sampled)
    return cache, by_request(tokens, plan, drafts.shape[1] + 1)


def verify_tree(
    model: Decoder,
    state: DecodeState,
    tree: DraftTree,
    bits: jax.Array,
    *,
    rows: int,
    max_q_len: int,
    sampled: bool = True,
) -> tuple[PagedKV, jax.Array]:
    """Run the target over packed trees: node i of a request is its i-th newest row, at position start + depth.

    Args: tree: with `num_nodes` at most max_q_len. bits: u32[seqs, nodes, words], ancestors, from `tree.link`.
      rows, max_q_len, sampled: as in `verify`.
    Returns: the cache with every node written, and i32[seqs, nodes]: the target's token behind each node.
    """
    q_lens = jnp.where(state.decoding, tree.num_nodes, 0)
    lens = jnp.where(state.decoding, state.seq_lens + q_lens, 0)
    seq, idx = owners_of(q_lens, rows)
    plan = make_plan(
        ForwardMode.DECODE if max_q_len == 1 else ForwardMode.TARGET_VERIFY,
        lens,
        q_lens,
        state.page_table,
        page_size=state.cache.page_size,
        tree=None if max_q_len == 1 else bits[seq, idx],
        num_tokens=rows,
        max_q_len=max_q_len,
    )
    hidden, cache = model(tree.tokens[seq, idx], state.cache, plan)
    tokens = next_tokens(model.logits(hidden), state.sampling.at(seq), plan.positions + 1, sampled=sampled)
    return cache, by_request(tokens, plan, tree.tokens.shape[1])


def owners_of(q_lens: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """Request, and index within it, of each packed row, i32[rows] both; padding rows get a request's first row."""
    seq, idx, valid = rows_of(offsets_of(q_lens), rows)
    return seq, jnp.where(valid, idx, 0)


def by_request(x: jax.Array, plan: Plan, width: int) -> jax.Array:
    """Packed rows [rows, ...] -> [seqs, width, ...]; what lies past a request's rows means nothing."""
    columns = jnp.arange(width, dtype=jnp.int32)[None, :]
    return x[jnp.clip(plan.cu_q_lens[:-1, None] + columns, 0, x.shape[0] - 1)]
