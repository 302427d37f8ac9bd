"""Draft trees: growth by cumulative probability, links and ancestor bits, and the walk of a verified tree.

Nodes are kept parents first, node 0 is the request's newest token. Sources: arXiv:2305.09781 (tree attention),
arXiv:2406.16858 (growth and re-ranking by cumulative probability).
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

MAX_NODES = 64
ROOT = -1  # the parent of a candidate that follows the newest token


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftTree:
    """One tree a request, rectangular: nodes past `num_nodes` mean nothing."""

    tokens: jax.Array  # i32[seqs, nodes]; node 0 is the newest known token
    parents: jax.Array  # i32[seqs, nodes], parents[i] < i; -1 for node 0 and for nodes that are not used
    num_nodes: jax.Array  # i32[seqs], the newest token included


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """What follows from a tree's parents."""

    depth: jax.Array  # i32[seqs, nodes], 0 for node 0
    bits: jax.Array  # u32[seqs, nodes, ceil(nodes / 32)], bit j of row i: node j is i or an ancestor of i
    first_child: jax.Array  # i32[seqs, nodes], lowest-index child, or -1
    next_sibling: jax.Array  # i32[seqs, nodes], next child of the same parent, or -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Every token that growth looked at, level after level: topk, then topk * topk a level."""

    scores: jax.Array  # f32[seqs, candidates], probability of the path; never above the parent's
    tokens: jax.Array  # i32[seqs, candidates]
    parents: jax.Array  # i32[seqs, candidates], candidate, or ROOT


def num_candidates(topk: int, num_steps: int) -> int:
    """Candidates of `num_steps` levels.

    >>> num_candidates(4, 3)
    36
    """
    return topk + (num_steps - 1) * topk * topk


def check_size(*, topk: int, num_steps: int, num_nodes: int) -> None:
    """Raise ValueError unless a tree of `num_nodes` nodes, the newest token included, can be grown.

    >>> check_size(topk=2, num_steps=1, num_nodes=4)
    Traceback (most recent call last):
    ValueError: num_nodes=4: a tree of topk=2 and num_steps=1 has at most 3 nodes, the newest token included
    """
    if topk < 1 or num_steps < 1:
        raise ValueError(f"topk={topk}, num_steps={num_steps}: want at least 1 of each")
    if not 2 <= num_nodes <= MAX_NODES:
        raise ValueError(f"num_nodes={num_nodes}: want 2 to {MAX_NODES}, the newest token included")
    most = 1 + num_candidates(topk, num_steps)
    if num_nodes > most:
        raise ValueError(
            f"num_nodes={num_nodes}: a tree of topk={topk} and num_steps={num_steps} has at most {most} nodes, the "
            "newest token included"
        )


def grow[Carry](
    step: Callable[[Carry, jax.Array, jax.Array, jax.Array], tuple[Carry, jax.Array, jax.Array]],
    carry: Carry,
    probs: jax.Array,
    ids: jax.Array,
    *,
    num_steps: int,
    unroll: bool = False,
) -> tuple[Carry, Candidates]:
    """Grow a tree: each level's `topk` best paths are extended by `topk` tokens each, as a scan over levels.

    Args:
      step: (carry, level i32[], tokens i32[seqs, topk], beams i32[seqs, topk]) -> carry, probs f32[seqs, topk, topk],
        ids i32[seqs, topk, topk]: the best continuations of each token. `beams` are the rows of the level before that
        the tokens continue (0 .. topk - 1; at level 0 a token's own place). It is called num_steps - 1 times.
      probs, ids: [seqs, topk], the best tokens behind the newest one.
      unroll: lay the levels out one after another instead of in a loop.

    >>> probs = jnp.array([[[.5, .4], [.9, .05]], [[.7, .2], [.8, .1]]])
    >>> ids = jnp.array([[[21, 22], [23, 24]], [[31, 32], [33, 34]]])
    >>> step = lambda level, _, tokens, beams: (level + 1, probs[level][None], ids[level][None])
    >>> _, seen = grow(step, 0, jnp.array([[.6, .3]]), jnp.array([[11, 12]]), num_steps=3)
    >>> seen.parents.tolist()
    [[-1, -1, 0, 0, 1, 1, 2, 2, 4, 4]]
    >>> prune(seen, jnp.array([9]), num_nodes=5).tokens.tolist()
    [[9, 11, 12, 21, 23]]
    """
    seqs, topk = ids.shape
    first = jnp.broadcast_to(jnp.arange(topk, dtype=jnp.int32)[None], (seqs, topk))

    def level(state, number):
        carry, scores, tokens, beams, nodes = state
        carry, probs, ids = step(carry, number, tokens, beams)
        # a probability that rounds to more than 1 would lift a child above its parent, and prune could drop the parent
        found = jnp.minimum(scores[..., None] * probs, scores[..., None]).reshape(seqs, topk * topk)
        ids = ids.reshape(seqs, topk * topk)
        parents = jnp.repeat(nodes, topk, axis=1)
        scores, best = lax.top_k(found, topk)  # of equals, the smaller index
        base = topk + topk * topk * number
        state = (carry, scores, _take(ids, best), lax.div(best, jnp.full_like(best, topk)), base + best)
        return state, (found, ids, parents)

    start = (carry, probs, ids, first, first)
    (carry, *_), levels = lax.scan(level, start, jnp.arange(num_steps - 1, dtype=jnp.int32), unroll=unroll or 1)
    scores, tokens, parents = (jnp.moveaxis(x, 0, 1).reshape(seqs, -1) for x in levels)
    roots = jnp.full_like(first, ROOT)
    return carry, Candidates(
        scores=jnp.concatenate([probs, scores], axis=1),
        tokens=jnp.concatenate([ids, tokens], axis=1),
        parents=jnp.concatenate([roots, parents], axis=1),
    )


def prune(candidates: Candidates, newest: jax.Array, *, num_nodes: int) -> DraftTree:
    """The tree of the `num_nodes - 1` best candidates, in their order, behind `newest` i32[seqs].

    Of equal scores the smaller index is kept, which is the parent: no node is orphaned.
    """
    return _tree_of(candidates, newest, jnp.sort(_best(candidates, num_nodes)[1], axis=1))


def prune_ranked(candidates: Candidates, newest: jax.Array, *, num_nodes: int) -> tuple[DraftTree, jax.Array]:
    """The same tree likeliest node first, so that each leading part is a tree; and the scores f32[seqs, num_nodes - 1].

    >>> seen = Candidates(scores=jnp.array([[.3, .6, .1, .5]]), tokens=jnp.array([[7, 8, 5, 6]]),
    ...                   parents=jnp.array([[-1, -1, 0, 1]]))
    >>> tree, scores = prune_ranked(seen, jnp.array([9]), num_nodes=4)
    >>> tree.tokens.tolist(), tree.parents.tolist()
    ([[9, 8, 6, 7]], [[-1, 0, 1, 0]])
    """
    scores, best = _best(candidates, num_nodes)
    return _tree_of(candidates, newest, best), scores


def _best(candidates: Candidates, num_nodes: int):
    total = candidates.scores.shape[1]
    if num_nodes - 1 > total:
        raise ValueError(f"num_nodes={num_nodes}: these {total} candidates make at most {total + 1} nodes")
    return lax.top_k(candidates.scores, num_nodes - 1)  # of equals, the smaller index


def _tree_of(candidates: Candidates, newest, chosen) -> DraftTree:
    seqs, drafts = chosen.shape
    above = _take(candidates.parents, chosen)
    place = jnp.argmax(chosen[:, None, :] == above[:, :, None], axis=-1).astype(jnp.int32)  # the parent is chosen too
    return DraftTree(
        tokens=jnp.concatenate([newest[:, None], _take(candidates.tokens, chosen)], axis=1),
        parents=jnp.concatenate([jnp.full((seqs, 1), ROOT), jnp.where(above == ROOT, 0, place + 1)], axis=1),
        num_nodes=jnp.full((seqs,), drafts + 1, jnp.int32),
    )


def link(tree: DraftTree) -> Links:
    """Depths, ancestor bits, and first children and next siblings.

    >>> tree = DraftTree(tokens=jnp.zeros((1, 5), jnp.int32), parents=jnp.array([[-1, 0, 0, 1, 2]]),
    ...                  num_nodes=jnp.array([5]))
    >>> links = link(tree)
    >>> links.depth.tolist(), links.bits[0, :, 0].tolist()
    ([[0, 1, 1, 2, 2]], [1, 3, 5, 11, 21])
    >>> links.first_child.tolist(), links.next_sibling.tolist()
    ([[1, 3, 4, -1, -1]], [[-1, 2, -1, -1, -1]])
    """
    seqs, nodes = tree.parents.shape
    ids = jnp.arange(nodes, dtype=jnp.int32)
    used = ids[None] < tree.num_nodes[:, None]
    parents = jnp.where(used, tree.parents, ROOT)
    seen = jnp.broadcast_to(jnp.eye(nodes, dtype=bool), (seqs, nodes, nodes))
    jump = parents
    for _ in range((nodes - 1).bit_length()):  # pointer doubling: after i rounds, the nearest 2^i ancestors
        up = jnp.maximum(jump, 0)
        seen |= jnp.where(jump[..., None] >= 0, _take_rows(seen, up), False)
        jump = jnp.where(jump >= 0, _take(jump, up), ROOT)
    child = parents[:, None, :] == ids[None, :, None]  # [seqs, parent, child]
    later = (parents[:, :, None] == parents[:, None, :]) & (ids[None, None, :] > ids[None, :, None])
    later &= (parents >= 0)[:, :, None]
    return Links(
        depth=jnp.sum(seen, axis=-1, dtype=jnp.int32) - 1,
        bits=_pack(seen),
        first_child=_first(child),
        next_sibling=_first(later),
    )


def walk(tree: DraftTree, targets: jax.Array, *, max_depth: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Follow the target's tokens down a verified tree.

    Args: targets: i32[seqs, nodes], the target's token behind each node. max_depth: most drafts on a path.
    Returns: path i32[seqs, max_depth + 1], accepted nodes from node 0 on, the last one repeated; tokens
      i32[seqs, max_depth + 1], the target's token behind each of them (accepted drafts, then the bonus token);
      accepted i32[seqs], drafts accepted.

    >>> tree = DraftTree(tokens=jnp.array([[9, 11, 12, 21, 23]]), parents=jnp.array([[-1, 0, 0, 1, 2]]),
    ...                  num_nodes=jnp.array([5]))
    >>> path, tokens, accepted = walk(tree, jnp.array([[12, 99, 23, 50, 77]]), max_depth=2)
    >>> path.tolist(), tokens.tolist(), accepted.tolist()
    ([[0, 2, 4]], [[12, 23, 77]], [2])
    """
    nodes = tree.tokens.shape[1]
    ids = jnp.arange(nodes, dtype=jnp.int32)[None]
    used = ids < tree.num_nodes[:, None]

    def down(at, _):
        want = _take(targets, at[:, None])
        child = jnp.min(
            jnp.where(used & (tree.parents == at[:, None]) & (tree.tokens == want), ids, nodes), axis=1
        )  # of equal siblings, the first
        return jnp.where(child < nodes, child, at), at

    start = jnp.zeros(tree.tokens.shape[0], jnp.int32)
    last, path = lax.scan(down, start, None, length=max_depth, unroll=True)  # a few small steps: a loop costs more
    path = jnp.concatenate([path, last[None]]).T
    accepted = jnp.sum(path[:, 1:] != path[:, :-1], axis=1, dtype=jnp.int32)
    return path, _take(targets, path), accepted


def unpack(bits: jax.Array, nodes: int) -> jax.Array:
    """u32[..., words] -> bool[..., nodes], bit j of word w first as element 32 w + j.

    >>> unpack(jnp.array([5], jnp.uint32), 3).tolist()
    [True, False, True]
    """
    shift = lax.broadcasted_iota(jnp.uint32, (*bits.shape, 32), bits.ndim)
    return ((bits[..., None] >> shift) & 1).astype(bool).reshape(*bits.shape[:-1], -1)[..., :nodes]


def _take(x, at):
    return jnp.take_along_axis(x, at, axis=1, mode="clip")


def _take_rows(x, at):
    return jnp.take_along_axis(x, at[..., None], axis=1, mode="clip")


def _first(mask):
    # index of the first True of the last axis, or -1
    n = mask.shape[-1]
    found = jnp.min(jnp.where(mask, lax.broadcasted_iota(jnp.int32, mask.shape, mask.ndim - 1), n), axis=-1)
    return jnp.where(found < n, found, -1)


def _pack(mask):
    # bool[..., n] -> u32[..., ceil(n / 32)], bit j of word w is element 32 w + j
    n = mask.shape[-1]
    words = -(-n // 32)
    mask = jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, 32 * words - n)])
    mask = mask.reshape(*mask.shape[:-1], words, 32).astype(jnp.uint32)
    return jnp.sum(mask << lax.broadcasted_iota(jnp.uint32, mask.shape, mask.ndim - 1), axis=-1, dtype=jnp.uint32)
