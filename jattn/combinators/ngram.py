"""Drafts from the request's own text: find the newest earlier place that ends like the text does, and copy on.

Runs on the device, inside the round, over the request's token buffer. Source: prompt lookup decoding (2023), here with
the longest match up to MAX_MATCH tokens and with wrap-around, so that a text that repeats is continued past its end.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jattn.combinators.draft import draft
from jattn.combinators.tree import ROOT, DraftTree

MAX_MATCH = 4  # longer matches count as this long
NUM_CLASSES = MAX_MATCH + 1  # match lengths 0 .. MAX_MATCH


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """Where the next draft token is read from."""

    tokens: jax.Array  # i32[seqs, max_context]
    start: jax.Array  # i32[seqs], first token after the match
    end: jax.Array  # i32[seqs], number of known tokens
    at: jax.Array  # i32[seqs], next token to copy


def find(tokens: jax.Array, num_known: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Longest match of each request's last tokens at an earlier place; of equals, the newest.

    Args: tokens: i32[seqs, max_context]. num_known: i32[seqs], tokens in use.
    Returns: start i32[seqs], index after the match; length i32[seqs], matched tokens, 0 to MAX_MATCH.

    >>> start, length = find(jnp.array([[5, 6, 7, 9, 5, 6, 0, 0]]), jnp.array([6]))
    >>> start.tolist(), length.tolist()
    ([2], [2])
    """
    matched, score = _scores(tokens, num_known)
    best = jnp.argmax(score, axis=1).astype(jnp.int32)
    length = jnp.take_along_axis(matched, best[:, None], axis=1)[:, 0]
    return best + 1, length


def _scores(tokens, num_known):
    # matched i32[seqs, width], and a score that ranks places: longer first, then newer; -1 where nothing matches
    width = tokens.shape[1]
    ends = jnp.arange(width, dtype=jnp.int32)[None, :]  # candidate: the match ends at this index
    matched = jnp.zeros(tokens.shape, jnp.int32)
    alive = ends < num_known[:, None] - 1
    for back in range(MAX_MATCH):
        last = jnp.take_along_axis(tokens, num_known[:, None] - 1 - back, axis=1, mode="clip")
        shifted = jnp.pad(tokens, ((0, 0), (back, 0)), constant_values=-1)[:, :width]
        alive &= shifted == last  # what lies before the text is -1, which no token is
        matched += alive.astype(jnp.int32)
    return matched, jnp.where(matched > 0, matched * width + ends, -1)


def ngram_draft(tokens: jax.Array, num_known: jax.Array, *, num_steps: int) -> tuple[jax.Array, jax.Array]:
    """Draft tokens i32[seqs, num_steps] and match length i32[seqs]; with length 0 the drafts mean nothing."""
    start, length = find(tokens, num_known)
    return _copy_on(tokens, start, num_known, num_steps), length


def _copy_on(tokens, start, num_known, num_steps: int):
    def step(pointer: Pointer) -> tuple[Pointer, jax.Array]:
        token = jnp.take_along_axis(pointer.tokens, pointer.at[:, None], axis=1, mode="clip")[:, 0]
        at = jnp.where(pointer.at + 1 < pointer.end, pointer.at + 1, pointer.start)
        return dataclasses.replace(pointer, at=at), token

    pointer = Pointer(tokens=tokens, start=start, end=num_known, at=start)
    return draft(step, pointer, num_steps=num_steps)[1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Continuations:
    """The `topk` best earlier places, each with what followed; different ones, best first."""

    tokens: jax.Array  # i32[seqs, topk, num_steps]
    match_len: jax.Array  # i32[seqs, topk], 0 where there is none


def find_many(tokens: jax.Array, num_known: jax.Array, *, topk: int, num_steps: int) -> Continuations:
    """Longest matches first, of equal lengths the newest. Arguments as in `find`.

    A place whose continuation agrees with an earlier one's as far as the text goes is passed over.

    >>> text = jnp.array([[5, 6, 7, 5, 6, 8, 5, 6, 0]])
    >>> found = find_many(text, jnp.array([8]), topk=3, num_steps=2)
    >>> found.tokens[0, :2].tolist(), found.match_len.tolist()
    ([[8, 5], [7, 5]], [[2, 2, 0]])
    """
    seqs, width = tokens.shape
    matched, score = _scores(tokens, num_known)
    ends = jnp.arange(width, dtype=jnp.int32)[None, :]

    def pick(score, _):
        best = jnp.argmax(score, axis=1).astype(jnp.int32)[:, None]
        length = jnp.where(jnp.take_along_axis(score, best, axis=1) > 0, jnp.take_along_axis(matched, best, axis=1), 0)
        ahead = _copy_on(tokens, best[:, 0] + 1, num_known, num_steps)
        agrees = jnp.ones(tokens.shape, bool)
        for i in range(num_steps):
            after = jnp.pad(tokens, ((0, 0), (0, i + 1)))[:, i + 1 :]
            agrees &= (after == ahead[:, i : i + 1]) | (ends + (i + 1) >= num_known[:, None])
        return jnp.where(agrees, -1, score), (ahead, length[:, 0])

    _, (ahead, length) = jax.lax.scan(pick, score, None, length=topk)
    return Continuations(tokens=jnp.moveaxis(ahead, 0, 1), match_len=length.T)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NgramTree:
    """A tree with what the budget needs: its nodes come likeliest first."""

    tree: DraftTree
    reach: jax.Array  # f32[seqs, nodes - 1], chance that each draft node is kept; 0 where there is none
    first_branch: jax.Array  # bool[seqs, nodes], on the best continuation; node 0 is not


def check_trie(*, topk: int, num_steps: int, num_nodes: int) -> None:
    """Raise ValueError if `topk` continuations of `num_steps` tokens can never fill `num_nodes` nodes."""
    if num_nodes > 1 + topk * num_steps:
        raise ValueError(
            f"num_draft_tokens={num_nodes}: {topk} continuations of {num_steps} tokens make at most "
            f"{1 + topk * num_steps} nodes, the newest token included"
        )


def ngram_tree(found: Continuations, newest: jax.Array, chance: jax.Array, *, num_nodes: int) -> NgramTree:
    """Merge continuations into one trie and keep its `num_nodes - 1` likeliest nodes.

    Args: newest: i32[seqs]. chance: f32[seqs, topk], that one more token of each continuation is right.

    >>> found = Continuations(tokens=jnp.array([[[8, 5], [8, 7]]]), match_len=jnp.array([[2, 2]]))
    >>> grown = ngram_tree(found, jnp.array([6]), jnp.array([[0.5, 0.5]]), num_nodes=4)
    >>> grown.tree.tokens.tolist(), grown.tree.parents.tolist()
    ([[6, 8, 5, 7]], [[-1, 0, 1, 1]])
    """
    seqs, topk, steps = found.tokens.shape
    same = jnp.cumprod((found.tokens[:, :, None] == found.tokens[:, None]).astype(jnp.int32), axis=-1) > 0
    owner = jnp.argmax(same, axis=2)  # [seqs, branch, step]: the first branch with the same tokens up to here
    branch = jnp.arange(topk, dtype=jnp.int32)[None, :, None]
    real = (owner == branch) & (found.match_len > 0)[:, :, None]
    # A branch that leaves another one is right only where that one is wrong.
    shared = jnp.sum(owner != branch, axis=-1, keepdims=True)  # tokens it shares with an earlier one
    step = jnp.arange(steps, dtype=jnp.int32)[None, None]
    leaves = jnp.where((step == shared) & (branch > 0), 1 - chance[:, :1, None], 1.0)
    own = jnp.cumprod(jnp.where(step >= shared, chance[:, :, None] * leaves, 1.0), axis=-1)
    origin = jnp.take_along_axis(owner, jnp.maximum(shared - 1, 0), axis=2)[..., 0]  # the branch it leaves
    reach = [own[:, 0]]
    for b in range(1, topk):
        behind = jnp.take_along_axis(jnp.stack(reach, axis=1), origin[:, b, None, None], axis=1, mode="clip")[:, 0]
        at = jnp.take_along_axis(behind, jnp.maximum(shared[:, b] - 1, 0), axis=1)
        reach.append(own[:, b] * jnp.where(shared[:, b] > 0, at, 1.0))
    # by depth, then branch: of equal chances the parent comes first
    flat = jnp.where(real, jnp.stack(reach, axis=1), 0.0).swapaxes(1, 2).reshape(seqs, steps * topk)
    worth, chosen = jax.lax.top_k(flat, num_nodes - 1)
    at_step, at_branch = chosen // topk, chosen % topk
    picked = jnp.take_along_axis(found.tokens.swapaxes(1, 2).reshape(seqs, -1), chosen, axis=1)
    above = jnp.take_along_axis(owner.swapaxes(1, 2).reshape(seqs, -1), jnp.maximum(chosen - topk, 0), axis=1)
    above = jnp.where(at_step > 0, (at_step - 1) * topk + above, ROOT)  # the parent, as an index into `flat`
    place = jnp.argmax(chosen[:, None, :] == above[:, :, None], axis=-1).astype(jnp.int32)
    parents = jnp.where(worth > 0, jnp.where(above == ROOT, 0, place + 1), ROOT)
    return NgramTree(
        tree=DraftTree(
            tokens=jnp.concatenate([newest[:, None], picked], axis=1),
            parents=jnp.concatenate([jnp.full((seqs, 1), ROOT), parents], axis=1),
            num_nodes=1 + jnp.sum(worth > 0, axis=1, dtype=jnp.int32),
        ),
        reach=worth,
        first_branch=jnp.concatenate([jnp.zeros((seqs, 1), bool), (at_branch == 0) & (worth > 0)], axis=1),
    )
