"""A whole decode round as one function: draft, choose the rows, verify, accept. Jit it once, donate the state."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jattn.cache import Cache
from jattn.combinators import budget
from jattn.combinators.accept import accepted_lens, append, finish
from jattn.combinators.costs import Variant
from jattn.combinators.drafter import Drafter
from jattn.combinators.model_drafts import Lineage, keep, pass_over, propose
from jattn.combinators.ngram import find_many, ngram_draft, ngram_tree
from jattn.combinators.state import Decoder, DecodeState, RoundReport
from jattn.combinators.tree import DraftTree, link, prune_ranked, walk
from jattn.combinators.verify import verify, verify_tree
from jattn.plan import slots_of
from jattn.sampling import TEMPERATURES, Chosen, SamplerConfig


def decode_round(
    model: Decoder,
    state: DecodeState,
    *,
    num_steps: int,
    shapes: tuple[Variant, ...],
    sampler: SamplerConfig = TEMPERATURES,
    may_skip: bool = True,
) -> tuple[DecodeState, RoundReport]:
    """Advance every decoding slot by one token or more; the tokens equal plain decoding's.

    Args: num_steps: most drafts a request; 0 decodes plainly. shapes: static programs of the target step, from
      `variants`. When no draft is worth its cost the round runs a plain decode shape, and nothing when nobody decodes.
      sampler: what the program's requests may ask for. may_skip: False runs a single shape without a branch, also when
      nobody decodes: where branches make the host wait (`costs.branches_wait`).
    """
    active = state.decoding
    num_known = state.seq_lens + 1
    drafts, match_len, take, index = _propose(state, active, num_known, num_steps, shapes)
    branches = [functools.partial(verify, model, rows=v.rows, max_q_len=v.max_q_len, sampler=sampler) for v in shapes]
    idle = functools.partial(_idle, width=num_steps + 1, sampler=sampler)
    cache, targets = _step(index, branches, idle, may_skip, state, drafts, take)
    accepted = accepted_lens(drafts, take, targets.tokens)
    draft = budget.record(state.draft, match_len, take, accepted) if num_steps else state.draft
    state = dataclasses.replace(state, cache=cache, draft=draft)
    return _settle(state, targets, accepted, take, index, shapes)


def tree_round(
    model: Decoder,
    state: DecodeState,
    *,
    topk: int,
    num_steps: int,
    num_nodes: int,
    shapes: tuple[Variant, ...],
    sampler: SamplerConfig = TEMPERATURES,
    may_skip: bool = True,
) -> tuple[DecodeState, RoundReport]:
    """`decode_round` with n-gram trees: the `topk` best continuations of `num_steps` tokens, merged into one trie.

    Args: num_nodes: most nodes of a request, its newest token included. shapes: from `variants`, for num_nodes - 1
      drafts. The rest as in `decode_round`.
    """
    found = find_many(state.tokens, state.seq_lens + 1, topk=topk, num_steps=num_steps)
    chance = jax.vmap(budget.accept_chance, in_axes=(None, 1), out_axes=1)(state.draft, found.match_len)
    grown = ngram_tree(found, state.newest, chance, num_nodes=num_nodes)
    bits = link(grown.tree).bits
    state, done = _verify_tree(model, state, grown.tree, bits, grown.reach, num_steps, shapes, sampler, may_skip)
    tried, right = _on_first_branch(grown.first_branch, done)
    draft = budget.record(state.draft, found.match_len[:, 0], tried, right)
    return _settle(dataclasses.replace(state, draft=draft), done.targets, done.accepted, done.take, done.shape, shapes)


def model_round(
    model: Decoder,
    drafter: Drafter,
    state: DecodeState,
    *,
    topk: int,
    num_steps: int,
    num_nodes: int,
    shapes: tuple[Variant, ...],
    max_behind: int | None = None,
    sampler: SamplerConfig = TEMPERATURES,
    lineage: Lineage = "parent",
    may_skip: bool = True,
    unroll: bool = False,
) -> tuple[DecodeState, RoundReport]:
    """`decode_round` with a draft model, which grows a tree of `topk` branches and `num_steps` levels; topk 1: a chain.

    Args: drafter: a smaller model, or a head on the hidden states that `model` returns; its cache is
      `state.draft.cache`. num_steps: 0 drafts nothing, and the drafter does not run. num_nodes: nodes that are
      verified, the newest token included. max_behind, lineage, unroll: as in `model_drafts.propose`; rounds of other
      steps may have run before. The rest as in `tree_round`.
    """
    if num_steps == 0:
        return _undrafted_round(model, drafter, state, shapes, sampler, may_skip)
    draft, candidates, draft_probs = propose(
        drafter,
        state,
        topk=topk,
        num_steps=num_steps,
        max_behind=max_behind,
        lineage=lineage,
        sampler=sampler,
        unroll=unroll,
    )
    state = dataclasses.replace(state, draft=draft)
    tree, scores = prune_ranked(candidates, state.newest, num_nodes=num_nodes)
    links = link(tree)
    depth = links.depth[:, 1:]
    kind = jnp.full(state.seq_lens.shape, state.draft.accepted.shape[1] - 1, jnp.int32)  # one record for all its drafts
    if sampler.rejection:
        # whether a draft is tried must not depend on which token was drawn: the tried ones would follow another
        # distribution than draft_probs
        scores = jnp.ones_like(scores)
    reach = _reach(scores, depth, budget.accept_chance(state.draft, kind))
    state, done = _verify_tree(
        model,
        state,
        tree,
        links.bits,
        reach,
        num_steps,
        shapes,
        sampler,
        may_skip,
        draft_probs=draft_probs,
        features_of=drafter.kept if drafter.ahead else None,
    )
    tried = jnp.max(jnp.where(jnp.arange(num_nodes - 1)[None] < done.take[:, None], depth, 0), axis=1)
    draft = budget.record(state.draft, kind, tried, done.accepted)
    draft = dataclasses.replace(draft, features=keep(drafter, state, done.features))
    return _settle(dataclasses.replace(state, draft=draft), done.targets, done.accepted, done.take, done.shape, shapes)


def _undrafted_round(model, drafter: Drafter, state: DecodeState, shapes, sampler: SamplerConfig, may_skip: bool):
    # plain decoding: a tree of the newest token alone, whose features are kept
    seqs = state.seq_lens.shape[0]
    tree = DraftTree(
        tokens=state.newest[:, None],
        parents=jnp.full((seqs, 1), -1, jnp.int32),
        num_nodes=jnp.ones(seqs, jnp.int32),
    )
    bits, reach = jnp.ones((seqs, 1, 1), jnp.uint32), jnp.zeros((seqs, 0))
    features_of = drafter.kept if drafter.ahead else None
    state, done = _verify_tree(model, state, tree, bits, reach, 0, shapes, sampler, may_skip, features_of=features_of)
    after, report = _settle(state, done.targets, done.accepted, done.take, done.shape, shapes)
    moved = dataclasses.replace(state, seq_lens=after.seq_lens)  # who decoded, and how far they are
    return dataclasses.replace(after, draft=pass_over(drafter, moved, done.features)), report


def _reach(scores, depth, chance):
    # Chance that a node is kept, f32[seqs, drafts], in falling order. A draft model's own probabilities say which of
    # two nodes is likelier; how often the target agrees at all is learned from the request's record.
    alike = depth[:, :, None] == depth[:, None, :]
    best = jnp.max(jnp.where(alike, scores[:, None, :], 0.0), axis=-1)
    share = jnp.where(best > 0, scores / jnp.where(best > 0, best, 1.0), 1.0)
    return jax.lax.cummin(chance[:, None] ** depth.astype(jnp.float32) * share, axis=1)


class _Verified(NamedTuple):
    """A tree after the target has seen a part of it."""

    take: jax.Array  # i32[seqs], drafts verified
    shape: jax.Array  # i32[], index of the shape that ran
    path: jax.Array  # this and the next as `walk` returns them
    accepted: jax.Array
    targets: Chosen  # [seqs, drafts on a path + 1], the target's token behind each node of the path
    features: jax.Array | None  # [seqs, drafts on a path + 1, d], what a draft head reads of each of them


def _verify_tree(
    model,
    state: DecodeState,
    tree: DraftTree,
    bits,
    reach,
    num_steps: int,
    shapes,
    sampler: SamplerConfig,
    may_skip: bool,
    *,
    draft_probs=None,
    features_of=None,
):
    # Verifies as many leading nodes as are worth it; the state comes back with accepted rows in front. A leading part
    # has the bits of the whole tree: parents come first.
    most = jnp.minimum(state.limits - state.seq_lens - 2, tree.num_nodes - 1)  # rows have pages up to the limit
    take, index = budget.choose_by_reach(reach, jnp.maximum(most, 0), state.decoding, shapes=shapes)
    tree = dataclasses.replace(tree, num_nodes=1 + take)
    branches = [
        functools.partial(
            verify_tree, model, rows=v.rows, max_q_len=v.max_q_len, sampler=sampler, features_of=features_of
        )
        for v in shapes
    ]
    idle = functools.partial(_idle_tree, sampler=sampler, with_features=features_of is not None)
    cache, chosen, features = _step(index, branches, idle, may_skip, state, tree, bits, draft_probs)
    path, _, accepted = walk(tree, chosen.tokens, max_depth=num_steps)
    state = dataclasses.replace(state, cache=to_the_front(cache, state, path, accepted) if num_steps else cache)
    seq = jnp.arange(path.shape[0], dtype=jnp.int32)[:, None]
    chosen, features = jax.tree.map(lambda x: x[seq, path], (chosen, features))
    return state, _Verified(take, index, path, accepted, chosen, features)


def _step(index, branches, idle, may_skip: bool, *operands):
    # the target step of the shape that was chosen
    if len(branches) == 1 and not may_skip:
        return branches[0](*operands)
    return jax.lax.switch(index, [*branches, idle], *operands)


def to_the_front(cache: Cache, state: DecodeState, path: jax.Array, accepted: jax.Array) -> Cache:
    """The rows of accepted nodes become the newest ones of their request; node 0 is in place. Arguments from `walk`."""
    step = jnp.arange(1, path.shape[1], dtype=jnp.int32)[None, :]
    seq = jnp.arange(path.shape[0], dtype=jnp.int32)[:, None]
    moved = state.decoding[:, None] & (step <= accepted[:, None])
    start = state.seq_lens[:, None]
    slots = [
        jnp.where(moved, slots_of(state.page_table, seq, start + at, cache.page_size), -1) for at in (path[:, 1:], step)
    ]
    return cache.move(*(x.reshape(-1) for x in slots))


def _on_first_branch(first_branch, done: _Verified):
    # drafts of the best continuation that were tried, and that were kept: what its match length is judged by
    nodes = jnp.arange(first_branch.shape[1], dtype=jnp.int32)[None, :]
    tried = jnp.sum(first_branch & (nodes <= done.take[:, None]), axis=1, dtype=jnp.int32)
    kept = jnp.arange(done.path.shape[1], dtype=jnp.int32)[None, :] <= done.accepted[:, None]
    right = jnp.sum(jnp.take_along_axis(first_branch, done.path, axis=1) & kept, axis=1, dtype=jnp.int32)
    return tried, right


def _settle(state: DecodeState, targets: Chosen, accepted, take, index, shapes) -> tuple[DecodeState, RoundReport]:
    # targets [seqs, drafts on a path + 1]: what the target says behind the newest token and each accepted draft
    new = targets.tokens
    width = new.shape[1]
    state, counts = advance(state, new, accepted)
    return state, RoundReport(
        tokens=jnp.where(jnp.arange(width)[None] < counts[:, None], new, -1),
        counts=counts,
        drafted=take,
        status=state.status,
        rows=jnp.asarray([*(v.rows for v in shapes), 0], jnp.int32)[index],
        logprobs=targets.logprobs,
    )


def advance(state: DecodeState, new: jax.Array, accepted: jax.Array) -> tuple[DecodeState, jax.Array]:
    """Append the tokens of a round to the slots that decode, up to a stop token or limit.

    Args: new: i32[seqs, width], the target's token behind the newest one and each accepted draft. accepted: i32[seqs].
    Returns: the state, and how many tokens each slot got, i32[seqs].
    """
    active, num_known = state.decoding, state.seq_lens + 1
    counts, status = finish(new, jnp.where(active, accepted + 1, 0), num_known, state.limits, state.stop_ids)
    counts = jnp.where(active, counts, 0)
    return dataclasses.replace(
        state,
        tokens=append(state.tokens, num_known, new, counts),
        seq_lens=state.seq_lens + counts,
        status=jnp.where(active, status, state.status),
    ), counts


def _propose(state: DecodeState, active, num_known, num_steps: int, shapes):
    if num_steps == 0:
        drafts = jnp.zeros((active.shape[0], 0), jnp.int32)
        none = jnp.zeros(active.shape, jnp.int32)
        take, index = budget.choose(none.astype(jnp.float32), none, active, num_steps=0, shapes=shapes)
        return drafts, none, take, index
    drafts, match_len = ngram_draft(state.tokens, num_known, num_steps=num_steps)
    # the last allowed token needs no draft behind it
    room = jnp.where(match_len > 0, jnp.clip(state.limits - num_known - 1, 0, num_steps), 0)
    chance = budget.accept_chance(state.draft, match_len)
    take, index = budget.choose(chance, room, active, num_steps=num_steps, shapes=shapes)
    return drafts, match_len, take, index


def _idle_tree(state: DecodeState, tree: DraftTree, *_, sampler: SamplerConfig, with_features: bool):
    features = None
    if with_features and state.draft.features is not None:
        held = state.draft.features
        features = jnp.zeros((*tree.tokens.shape, held.shape[-1]), held.dtype)
    return *_idle(state, width=tree.tokens.shape[1], sampler=sampler), features


def _idle(state: DecodeState, *_, width: int, sampler: SamplerConfig):
    return state.cache, Chosen.none((state.seq_lens.shape[0], width), sampler)
