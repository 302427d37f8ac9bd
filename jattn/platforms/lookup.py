"""Looking a name up in a table, with one kind of error for every table."""

import difflib
from collections.abc import Mapping


def named[Row](table: Mapping[str, Row], name: str | None, *, what: str) -> Row:
    """The row called `name`.

    Raises: ValueError with the name and every legal name, the most similar first.

    >>> named({"fa3": 3, "triton": 1}, "tritn", what="policy")
    Traceback (most recent call last):
    ValueError: unknown policy 'tritn': want one of triton, fa3
    """
    try:
        return table[name]  # pyright: ignore[reportArgumentType]
    except (KeyError, TypeError):
        close = difflib.get_close_matches(str(name), table, n=3, cutoff=0.5)
        names = ", ".join(dict.fromkeys((*close, *table)))
        raise ValueError(f"unknown {what} {name!r}: want one of {names}") from None
