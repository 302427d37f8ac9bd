"""Short lists of combinations in which every allowed pair of values stands at least once."""

import itertools
from collections.abc import Callable

Row = dict[str, object]


def pairs_of(row: Row) -> set[frozenset]:
    """The pairs (name, value), (name, value) of a combination."""
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def cover(factors: dict[str, tuple], allowed: Callable[[Row], bool]) -> list[Row]:
    """Combinations of one value of each factor, chosen one after another for the most pairs that are still missing.

    Args: allowed: whether values go together; it must accept a row that lacks some factors, if any values for those do.
      A pair that no allowed combination has is left out.
    """
    names = sorted(factors, key=lambda name: -len(factors[name]))
    missing = {
        frozenset(((a, x), (b, y)))
        for a, b in itertools.combinations(names, 2)
        for x in factors[a]
        for y in factors[b]
        if allowed({a: x, b: y})
    }
    rows = []
    while missing:
        first = min(missing, key=lambda pair: sorted(map(repr, pair)))
        row = _complete(dict(first), names, factors, allowed, missing)  # type: ignore[arg-type]
        if row is not None:
            rows.append({name: row[name] for name in factors})
            missing -= pairs_of(row)
        missing.discard(first)
    return rows


def _complete(row: Row, names, factors, allowed, missing) -> Row | None:
    # the rest of a row, a value with most missing pairs first, going back where nothing fits
    rest = [name for name in names if name not in row]
    if not rest:
        return row
    name = rest[0]

    def gain(value) -> int:
        return sum(frozenset(((name, value), item)) in missing for item in row.items())

    for value in sorted(factors[name], key=lambda value: (-gain(value), factors[name].index(value))):
        longer = row | {name: value}
        done = _complete(longer, names, factors, allowed, missing) if allowed(longer) else None
        if done is not None:
            return done
    return None
