"""The ways to draft that `bench_speculation.py` compares, and a round in which every node is verified."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from bench_engine import GREEDY

from jattn.combinators.costs import Variant
from jattn.combinators.model_drafts import propose
from jattn.combinators.round import advance, to_the_front
from jattn.combinators.state import DecodeState
from jattn.combinators.tree import link, prune_ranked, walk
from jattn.combinators.verify import verify_tree
from jattn.models.draft_head import DraftHead

Keep = Callable[[], object]  # writes what is measured so far


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to draft. topk 0: chains from the request's own text, num_steps at most."""

    topk: int
    num_steps: int
    num_nodes: int

    @property
    def name(self) -> str:
        """As it is printed."""
        if self.topk == 0:
            return f"n-gram, up to {self.num_steps}"
        return (
            f"chain of {self.num_steps}"
            if self.topk == 1
            else f"topk {self.topk}, {self.num_steps} steps, {self.num_nodes} nodes"
        )


def _tree(topk: int, num_steps: int) -> Arm:
    most = topk + (num_steps - 1) * topk * topk + 1
    return Arm(topk=topk, num_steps=num_steps, num_nodes=num_steps + 1 if topk == 1 else min(16, most))


ARMS = (
    _tree(1, 5),
    _tree(4, 5),
    Arm(topk=0, num_steps=15, num_nodes=16),
    *(
        _tree(topk, steps)
        for topk in (1, 2, 4, 8)
        for steps in (1, 2, 3, 5, 7)
        if (topk, steps) not in ((1, 5), (4, 5))
    ),
)


def whole_round(model, head: DraftHead, state: DecodeState, arm: Arm, shape: Variant):
    """`model_round` with every node verified -> state, new tokens i32[seqs]."""
    made, candidates, _ = propose(head, state, topk=arm.topk, num_steps=arm.num_steps, sampler=GREEDY)
    state = dataclasses.replace(state, draft=made)
    tree, _ = prune_ranked(candidates, state.newest, num_nodes=arm.num_nodes)
    most = jnp.clip(state.limits - state.seq_lens - 1, 1, tree.num_nodes)  # rows have pages up to the limit
    tree = dataclasses.replace(tree, num_nodes=most)
    cache, chosen, features = verify_tree(
        model,
        state,
        tree,
        link(tree).bits,
        rows=shape.rows,
        max_q_len=shape.max_q_len,
        sampler=GREEDY,
        features_of=head.kept,
    )
    return accepted_into(dataclasses.replace(state, cache=cache), tree, chosen.tokens, features, arm)


def accepted_into(state: DecodeState, tree, targets, features, arm: Arm):
    """What follows verification -> state, new tokens i32[seqs]."""
    path, new, kept = walk(tree, targets, max_depth=arm.num_steps)
    cache = to_the_front(state.cache, state, path, kept)
    seq = jnp.arange(path.shape[0], dtype=jnp.int32)[:, None]
    draft = state.draft
    if features is not None and draft.features is not None:
        read = jnp.where(state.decoding[:, None, None], features[seq, path], draft.features)
        draft = dataclasses.replace(draft, features=read)
    return advance(dataclasses.replace(state, cache=cache, draft=draft), new, kept)
