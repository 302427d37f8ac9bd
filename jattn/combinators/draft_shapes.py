"""What a round may draft, what it then costs and gives, and which shapes are worth a program.

Costs are tables, a file a platform kind (`round_costs/`), which `scripts/bench_draft_shapes.py` measures on the device.
"""

import dataclasses
import functools
import json
from pathlib import Path

from jattn.combinators.tree import check_size

_TABLES = Path(__file__).parent / "round_costs"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, order=True)
class DraftShape:
    """A chain (topk 1) or a tree that a draft model proposes for each request of a round."""

    num_steps: int  # levels; 0: no drafts
    topk: int = 1
    num_nodes: int = 1  # verified for a request, the newest token included

    def __post_init__(self):
        if self.num_steps == 0 and (self.topk, self.num_nodes) != (1, 1):
            raise ValueError(f"{self}: without steps there is one node, the newest token")
        if self.num_steps:
            check_size(topk=self.topk, num_steps=self.num_steps, num_nodes=self.num_nodes)

    def __str__(self) -> str:
        if self.topk > 1:
            return f"topk {self.topk}, {self.num_steps} steps, {self.num_nodes} nodes"
        return f"chain of {self.num_steps}" if self.num_steps else "no drafts"


NO_DRAFTS = DraftShape(num_steps=0)


def chain(num_steps: int) -> DraftShape:
    """A chain of `num_steps` drafts.

    >>> print(chain(3), chain(3).num_nodes)
    chain of 3 4
    """
    return DraftShape(num_steps=num_steps, num_nodes=num_steps + 1)


def _tree(num_steps: int, num_nodes: int, *, topk: int = 4) -> DraftShape:
    return DraftShape(num_steps=num_steps, topk=topk, num_nodes=num_nodes)


# Tokens a round and request, bonus included, where all nodes are verified: SmolLM2-135M's head, greedy, every third
# prompt of MT-Bench's first turns and of HumanEval, first 128 tokens (scripts/bench_speculation.py accepted). Belief
# before a request's own record.
ACCEPTED: dict[DraftShape, float] = {
    chain(1): 1.76,
    chain(2): 2.32,
    chain(3): 2.72,
    chain(4): 3.02,
    chain(5): 3.24,
    chain(7): 3.53,
    _tree(4, 8): 3.39,
    _tree(5, 8): 3.61,
    _tree(5, 16): 3.97,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoundCosts:
    """Time of a round over that of one without drafts, by shape and batch."""

    kind: str  # of platform
    evidence: str  # "measured", or "estimated"
    batches: tuple[int, ...]  # rising
    over_plain: dict[DraftShape, tuple[float, ...]]  # at each of those

    def cost(self, shape: DraftShape, batch: int) -> float:
        """Relative time of a round of `batch` requests; a line between those known, and the last one's past them."""
        if shape == NO_DRAFTS:
            return 1.0
        row, known = self.over_plain[nearest(shape, self.over_plain)], self.batches
        at = next((i for i, n in enumerate(known) if n >= batch), len(known) - 1)
        if at == 0 or known[at] <= batch:
            return row[at]
        part = (batch - known[at - 1]) / (known[at] - known[at - 1])
        return row[at - 1] + (row[at] - row[at - 1]) * part


def nearest(shape: DraftShape, known) -> DraftShape:
    """The shape of a table that is most like this one.

    >>> print(nearest(chain(6), ACCEPTED))
    chain of 5
    """

    def apart(other: DraftShape) -> float:
        steps, nodes = abs(other.num_steps - shape.num_steps), abs(other.num_nodes - shape.num_nodes)
        return steps + nodes + 4 * ((other.topk > 1) != (shape.topk > 1))

    return min(sorted(known), key=apart)


@functools.cache
def round_costs(kind: str) -> RoundCosts:
    """The table of a platform kind; accelerators without one share an estimate.

    >>> round_costs("cpu").evidence, round_costs("cpu").cost(NO_DRAFTS, 8)
    ('measured', 1.0)
    """
    file = _TABLES / f"{kind}.json"
    table = json.loads((file if file.exists() else _TABLES / "accelerator.json").read_text(encoding="utf-8"))
    return RoundCosts(
        kind=kind,
        evidence=table["evidence"],
        batches=tuple(table["batches"]),
        over_plain={
            DraftShape(**{name: row[name] for name in ("num_steps", "topk", "num_nodes")}): tuple(row["over_plain"])
            for row in table["rows"]
        },
    )


def chance(shape: DraftShape, tokens: float) -> float:
    """What each of a chain's drafts would be kept with, if a round gave so many tokens: they solve sum(p^i) = tokens.

    >>> round(chance(chain(2), 1.75), 3)
    0.5
    """
    low, high = 0.0, 1.0
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if _tokens(shape, middle) < tokens else (low, middle)
    return min(max(low, 1e-3), 1 - 1e-3)


def expected(shape: DraftShape, odds: float) -> float:
    """Tokens a round of a text that is `odds` times as easy as those of `ACCEPTED`: so many times the odds of a draft.

    >>> round(expected(chain(3), 1.0), 2), expected(NO_DRAFTS, 9.0)
    (2.72, 1.0)
    """
    if shape == NO_DRAFTS:
        return 1.0
    own = nearest(shape, ACCEPTED)
    return _tokens(shape, _scaled(_chance_of(own), odds))


def odds_of(shape: DraftShape, tokens: float) -> float:
    """The inverse of `expected`: how easy a text is whose rounds give so many tokens.

    >>> round(odds_of(chain(3), expected(chain(3), 0.25)), 2)
    0.25
    """
    mine, usual = chance(shape, tokens), _chance_of(nearest(shape, ACCEPTED))
    return mine / (1 - mine) * (1 - usual) / usual


@functools.cache
def _chance_of(known: DraftShape) -> float:
    return chance(known, ACCEPTED[known])


def _scaled(p: float, odds: float) -> float:
    return p * odds / (1 - p + p * odds)


def _tokens(shape: DraftShape, p: float) -> float:
    return sum(p**depth for depth in range(shape.num_steps + 1))


# How easy texts may be, the usual first: a program for what is best for each, as many as are worth compiling.
_ODDS = (1.0, 0.3, 3.0)


def worth_compiling(costs: RoundCosts, *, num_seqs: int, topk: int | None = None, most: int) -> tuple[DraftShape, ...]:
    """Shapes worth a program beside plain decoding, at most so many; () where drafts are not worth their cost.

    Args: topk: of the shapes; None is any.

    >>> costs = RoundCosts(kind="cpu", evidence="estimated", batches=(1, 16),
    ...                    over_plain={chain(1): (1.2, 1.9), chain(3): (1.5, 3.0)})
    >>> [str(shape) for shape in worth_compiling(costs, num_seqs=1, most=1)]
    ['chain of 3']
    >>> worth_compiling(costs, num_seqs=16, most=1)
    ()
    """
    offered = [shape for shape in sorted(costs.over_plain) if topk in (None, shape.topk)]
    chosen: list[DraftShape] = []
    for odds in _ODDS:
        gains = {shape: expected(shape, odds) / costs.cost(shape, num_seqs) for shape in offered}
        best = max(gains, key=lambda shape: gains[shape], default=None)
        if best is not None and gains[best] > 1.0 and best not in chosen:
            chosen.append(best)
        elif not chosen:  # not worth it on a usual text
            return ()
    return tuple(chosen[:most])
