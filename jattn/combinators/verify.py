"""The target scores each request's newest token and its drafts in one ragged forward."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jattn.cache import Cache
from jattn.combinators.state import Decoder, DecodeState
from jattn.combinators.tree import DraftTree, unpack
from jattn.modes import ForwardMode
from jattn.plan import Plan, make_plan, offsets_of, rows_of
from jattn.sampling import TEMPERATURES, Chosen, SamplerConfig, next_tokens


def verify(
    model: Decoder,
    state: DecodeState,
    drafts: jax.Array,
    take: jax.Array,
    *,
    rows: int,
    max_q_len: int,
    sampler: SamplerConfig = TEMPERATURES,
) -> tuple[Cache, Chosen]:
    """Run the target over packed rows: for each decoding request its newest token, then `take` drafts.

    Args: drafts: i32[seqs, steps]. take: i32[seqs], at most max_q_len - 1. rows, max_q_len: static shape.
      sampler: what the program's requests may ask for.
    Returns: the cache with these rows written, and [seqs, steps + 1]: the target's token after each row.
    """
    q_lens = jnp.where(state.decoding, 1 + take, 0)
    lens = jnp.where(state.decoding, state.seq_lens + q_lens, 0)
    mode = ForwardMode.DECODE if max_q_len == 1 else ForwardMode.TARGET_VERIFY
    plan = make_plan(
        mode, lens, q_lens, state.page_table, page_size=state.cache.page_size, num_tokens=rows, max_q_len=max_q_len
    )
    seq, idx, _ = rows_of(plan.cu_q_lens, rows)
    steps = drafts.shape[1]
    known = jnp.concatenate([state.newest[:, None], drafts], axis=1)
    ids = known[seq, jnp.clip(idx, 0, steps)]
    hidden, cache = model(ids, state.cache, plan)
    column = jnp.arange(steps, dtype=jnp.int32)[None]
    tried = jnp.where(column < take[:, None], drafts, -1)[seq]
    chosen = _behind(
        model.logits(hidden),
        state,
        plan,
        seq,
        sampler,
        path=jnp.where(column < idx[:, None], tried, -1),
        offered=jnp.max(jnp.where(column == idx[:, None], tried, -1), axis=1, keepdims=True, initial=-1),
    )
    return cache, by_request(chosen, plan, steps + 1)


def verify_tree(
    model: Decoder,
    state: DecodeState,
    tree: DraftTree,
    bits: jax.Array,
    draft_probs: jax.Array | None = None,
    *,
    rows: int,
    max_q_len: int,
    sampler: SamplerConfig = TEMPERATURES,
    features_of: Callable[[jax.Array], jax.Array] | None = None,
) -> tuple[Cache, Chosen, jax.Array | None]:
    """Run the target over packed trees: node i of a request is its i-th newest row, at position start + depth.

    Args: tree: with `num_nodes` at most max_q_len. bits: u32[seqs, nodes, words], ancestors, from `tree.link`.
      draft_probs: f32[seqs, nodes - 1, vocab] of a chain drawn from a draft model: what node i + 1 was drawn from.
      rows, max_q_len, sampler: as in `verify`.
      features_of: what a draft head reads of the target's hidden states, [rows, width] -> [rows, d].
    Returns: the cache with every node written; [seqs, nodes]: the target's token behind each node; and those features,
      [seqs, nodes, d], or None.
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
    nodes = tree.tokens.shape[1]
    node = jnp.arange(nodes, dtype=jnp.int32)[None]
    used = node < tree.num_nodes[seq][:, None]
    tokens, parents = tree.tokens[seq], tree.parents[seq]
    offered = jnp.where(used & (parents == idx[:, None]), tokens, -1)
    if draft_probs is not None:  # a chain: node i offers node i + 1
        offered = jnp.max(offered, axis=1, keepdims=True)
        draft_probs = draft_probs[seq, jnp.clip(idx, 0, nodes - 2)]
    chosen = _behind(
        model.logits(hidden),
        state,
        plan,
        seq,
        sampler,
        path=jnp.where((node > 0) & unpack(bits[seq, idx], nodes), tokens, -1),
        offered=offered,
        draft_probs=draft_probs,
    )
    features = None if features_of is None else by_request(features_of(hidden), plan, nodes)
    return cache, by_request(chosen, plan, nodes), features


def _behind(logits, state: DecodeState, plan: Plan, seq, sampler: SamplerConfig, *, path, offered, draft_probs=None):
    # the token behind each row; path and offered i32[rows, n]: drafts above the row and right below it, -1 unused
    history = state.history(state.seq_lens + 1, logits.shape[1], sampler)
    return next_tokens(
        logits,
        state.sampling.at(seq),
        plan.positions + 1,
        config=sampler,
        history=None if history is None else history.at(seq, path),
        offered=offered,
        draft_probs=draft_probs,
    )


def owners_of(q_lens: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """Request, and index within it, of each packed row, i32[rows] both; padding rows get a request's first row."""
    seq, idx, valid = rows_of(offsets_of(q_lens), rows)
    return seq, jnp.where(valid, idx, 0)


def by_request[Rows](x: Rows, plan: Plan, width: int) -> Rows:
    """Packed rows, arrays [rows, ...], as [seqs, width, ...]; what lies past a request's rows means nothing."""
    columns = jnp.arange(width, dtype=jnp.int32)[None, :]
    return jax.tree.map(lambda x: x[jnp.clip(plan.cu_q_lens[:-1, None] + columns, 0, x.shape[0] - 1)], x)
