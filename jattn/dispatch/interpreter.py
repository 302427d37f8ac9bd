"""Reads tables of rules: static facts are settled first, and what is left asks about sums only.

Host and traced decisions read the same remainder: they differ in how a question is answered, and in nothing else.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

type Truth = Any  # bool, or a bool array inside jit; None from a condition that static facts leave open


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One rule: if every condition holds, `then` is the result; a `then` that is a table is read on."""

    label: str  # table and number, as "generic 5"
    when: tuple[str, ...]  # names of conditions, in the order of evaluation; "not X" negates
    then: Any

    def __str__(self) -> str:
        return f"{self.label} ({', '.join(self.when) or 'otherwise'})"


def table(name: str, *rows: tuple[tuple[str, ...], Any]) -> tuple[Row, ...]:
    """Rows numbered from 1 in the order given."""
    return tuple(Row(f"{name} {at}", when, then) for at, (when, then) in enumerate(rows, start=1))


def with_negations(conditions: Mapping[str, Callable[..., Truth]]) -> dict[str, Callable[..., Truth]]:
    """The conditions, each joined by its "not" form; an open one stays open."""

    def negated(condition: Callable[..., Truth]) -> Callable[..., Truth]:
        def negation(*subject: Any) -> Truth:
            truth = condition(*subject)
            return (not truth) if isinstance(truth, bool) else None if truth is None else ~truth

        return negation

    return {**conditions, **{f"not {name}": negated(condition) for name, condition in conditions.items()}}


def matches(
    rows: tuple[Row, ...],
    test: Callable[[str], bool | None],
    asked: tuple[str, ...] = (),
    path: tuple[Row, ...] = (),
) -> Iterator[tuple[tuple[str, ...], tuple[Row, ...]]]:
    """Rows that may decide, in order, each with the open conditions under which it does if no earlier one did.

    Args: test: the truth of a condition's name, None where it is open. A condition that is false ends its row, and the
      conditions after it are not evaluated; a row without open conditions ends the table.
    Yields: (open conditions, the rows from the outermost table to the one whose `then` is the result).

    >>> rows = table("size", (("cold", "small"), "ice"), (("hot",), "steam"), ((), "water"))
    >>> [(asked, str(path[-1])) for asked, path in matches(rows, {"cold": True, "hot": False, "small": None}.get)]
    [(('small',), 'size 1 (cold, small)'), ((), 'size 3 (otherwise)')]
    """
    for row in rows:
        left = _open(row.when, test)
        if left is None:
            continue
        if isinstance(row.then, tuple):
            yield from matches(row.then, test, asked + left, (*path, row))
        else:
            yield asked + left, (*path, row)
        if not left:
            return


def first(rows: tuple[Row, ...], test: Callable[[str], bool | None]) -> tuple[Row, ...]:
    """The rows that decide where no condition is open; the last one's `then` is the result."""
    return next(matches(rows, test))[1]


def _open(names: tuple[str, ...], test: Callable[[str], bool | None]) -> tuple[str, ...] | None:
    """The conditions left open; None where one is false."""
    left = []
    for name in names:
        truth = test(name)
        if truth is None:
            left.append(name)
        elif not truth:
            return None
    return tuple(left)
