"""Reads tables of rules. Host and traced decisions go through the same lines: a condition is a bool or an array."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

type Truth = bool | jax.Array


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
    """The conditions, each joined by its "not" form."""

    def negated(condition: Callable[..., Truth]) -> Callable[..., Truth]:
        def negation(*subject: Any) -> Truth:
            truth = condition(*subject)
            return not truth if isinstance(truth, bool) else ~truth

        return negation

    return {**conditions, **{f"not {name}": negated(condition) for name, condition in conditions.items()}}


def matches(
    rows: tuple[Row, ...], test: Callable[[str], Truth], given: Truth = True, path: tuple[Row, ...] = ()
) -> Iterator[tuple[Truth, tuple[Row, ...]]]:
    """Rows that may decide, in order, each with the condition under which it does if no earlier one did.

    Args: test: the truth of a condition's name. A condition that is certainly false ends its row, and the conditions
      after it are not evaluated; a row that certainly holds ends the table.
    Yields: (truth, the rows from the outermost table to the one whose `then` is the result).
    """
    for row in rows:
        holds = _all(row.when, test)
        if holds is False:
            continue
        both = holds if given is True else given if holds is True else given & holds
        if isinstance(row.then, tuple):
            yield from matches(row.then, test, both, (*path, row))
        else:
            yield both, (*path, row)
        if holds is True:
            return


def first(rows: tuple[Row, ...], test: Callable[[str], Truth]) -> tuple[Row, ...]:
    """The rows that decide where every condition is a bool; the last one's `then` is the result."""
    return next(matches(rows, test))[1]


def _all(names: tuple[str, ...], test: Callable[[str], Truth]) -> Truth:
    result: Truth = True
    for name in names:
        truth = test(name)
        if isinstance(truth, bool | np.bool_):
            if not truth:
                return False
        else:
            result = truth if result is True else result & truth
    return result
