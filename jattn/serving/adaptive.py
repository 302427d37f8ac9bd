"""How far a draft model drafts, from what its drafts turned out to be worth: a program a shape, chosen round by round.

Accepted drafts are averaged exponentially. The shape whose expected tokens over cost are best runs next, with some
reluctance to change, and no drafts where none is worth its cost: from there a probe is made now and then.
"""

import functools

from jattn.combinators.draft_shapes import NO_DRAFTS, DraftShape, RoundCosts, expected, odds_of

# Of the two averages, by the drafts of one request; those of n say as much as sqrt(n), and 0.4 at most.
_RATE, _RATE_LONG = 0.15, 0.04
_LONG = 16  # rounds after which the second says something
_RELUCTANCE = 1.03  # what a change from one shape to another must promise to give
_TO_PLAIN, _TO_PLAIN_LONG = 1.1, 1.02  # the same, to no drafts: by the average of some rounds, and by that of many
_STAY = 2  # rounds between two changes
_TRIAL = 8  # rounds after which a probe has shown that drafts are worth it again
_WAIT, _LONGEST_WAIT = 48, 1536  # rounds without drafts before a probe; each that fails doubles the wait
_CELLS = 16  # of an accepted draft, in tables
_EASIEST = 9.0  # odds of texts that a probe may find


class AdaptiveShape:
    """Chooses among shapes, round by round: plain Python on the host, a look-up a round.

    Args:
      shapes: what there are programs for. costs: of rounds, over plain ones of the same slots. num_slots: of those.
      plain_costs: (requests, cost) of plain rounds that hold so many, rising, in any unit; () where one holds all.
    """

    def __init__(
        self,
        shapes: tuple[DraftShape, ...],
        costs: RoundCosts,
        *,
        num_slots: int,
        plain_costs: tuple[tuple[int, float], ...] = (),
    ):
        self.shapes, self._num_slots = shapes, num_slots
        self._over_plain = [costs.cost(shape, num_slots) for shape in shapes]
        self._plain_costs = plain_costs or ((num_slots, 1.0),)
        self._best_of = functools.cache(self._best_at)
        self._next_of = functools.cache(self._next_at)
        self._usual = 1.0  # how easy the texts of new requests are expected to be
        self._odds = 1.0  # how easy these are, as last seen
        self._wait, self._probing = _WAIT, False
        self._enter(self._best(num_slots))

    @property
    def shape(self) -> DraftShape:
        """What runs now."""
        return self.shapes[self.current]

    def choose(self, num_active: int) -> int:
        """Index of the shape of the next round, of so many requests."""
        self._rounds += 1
        if len(self.shapes) == 1 or self._rounds <= _STAY or not num_active:
            return self.current
        if self.shape == NO_DRAFTS:
            self._try(num_active)
            return self.current
        tier = self._tier(num_active)
        best = self._next_of(self.current, round(self.accepted * _CELLS), tier, _TO_PLAIN)
        if self._rounds > _LONG:
            later = self._next_of(self.current, round(self._accepted_long * _CELLS), tier, _TO_PLAIN_LONG)
            best = later if self.shapes[later] == NO_DRAFTS else best
        if best != self.current:
            self._odds = odds_of(self.shape, 1 + min(self.accepted, self._accepted_long))
            if self._probing and self.shapes[best] == NO_DRAFTS:
                self._wait = min(2 * self._wait, _LONGEST_WAIT)
            self._enter(best)
        elif self._probing and self._rounds > _TRIAL:
            self._probing, self._wait = False, _WAIT
        return self.current

    def record(self, index: int, counts: list[int]) -> None:
        """Note a round of shape `index`: the tokens of each request. One from before the last change is left out."""
        if index == self.current and self.shape != NO_DRAFTS and counts:
            mean, weight = sum(counts) / len(counts) - 1, len(counts) ** 0.5
            self.accepted += min(_RATE * weight, 0.4) * (mean - self.accepted)
            self._accepted_long += min(_RATE_LONG * weight, 0.4) * (mean - self._accepted_long)

    def admitted(self, num_active: int) -> None:
        """A request has come, one of so many: the fewer they are, the less is known of them."""
        if len(self.shapes) == 1:
            return
        if num_active <= 1:
            self._odds, self._wait, self._probing = self._usual, _WAIT, False
            self._enter(self._best(num_active))
        elif self.shape != NO_DRAFTS:
            self.accepted += (expected(self.shape, self._usual) - 1 - self.accepted) / num_active

    def finished(self) -> None:
        """A request has ended: new ones are expected to be a little like it."""
        if len(self.shapes) > 1:
            odds = self._odds if self.shape == NO_DRAFTS else odds_of(self.shape, 1 + self.accepted)
            self._usual = self._usual**0.8 * min(max(odds, 0.1), _EASIEST) ** 0.2

    def _enter(self, index: int, accepted: float | None = None) -> None:
        self.current, self._rounds = index, 0
        self.accepted = expected(self.shape, self._odds) - 1 if accepted is None else accepted
        self._accepted_long = self.accepted

    def _try(self, num_active: int) -> None:
        # drafts, where the batch is now one for which they pay; or a probe, if it may show that they do
        if (best := self._best(num_active)) != self.current:
            self._enter(best)
        elif self._rounds > self._wait and self._best_of(_EASIEST, self._tier(num_active)) != self.current:
            cheapest = min(
                (i for i, shape in enumerate(self.shapes) if shape != NO_DRAFTS), key=self._over_plain.__getitem__
            )
            self._enter(cheapest, accepted=self._over_plain[cheapest] / self._plain(self._tier(num_active)) - 1)
            self._probing = True

    def _best(self, num_active: int) -> int:
        return self._best_of(round(self._odds, 2), self._tier(num_active))

    def _tier(self, num_active: int) -> int:
        # which of the plain programs would hold them
        return next((i for i, (most, _) in enumerate(self._plain_costs) if most >= num_active), -1)

    def _plain(self, tier: int) -> float:
        return self._plain_costs[tier][1] / self._plain_costs[-1][1]

    def _gains(self, odds: float, tier: int) -> list[float]:
        # tokens of each shape over its cost
        costs = [self._plain(tier) if s == NO_DRAFTS else c for s, c in zip(self.shapes, self._over_plain, strict=True)]
        return [expected(shape, odds) / cost for shape, cost in zip(self.shapes, costs, strict=True)]

    def _best_at(self, odds: float, tier: int) -> int:
        gains = self._gains(odds, tier)
        return gains.index(max(gains))

    def _next_at(self, current: int, cell: int, tier: int, to_plain: float) -> int:
        gains = self._gains(odds_of(self.shapes[current], 1 + cell / _CELLS), tier)
        best = gains.index(max(gains))
        reluctance = to_plain if self.shapes[best] == NO_DRAFTS else _RELUCTANCE
        return best if gains[best] > reluctance * gains[current] else current
