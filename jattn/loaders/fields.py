"""Checked access to a file's hyperparameters: each is read, known to change nothing, or refused by name."""

from collections.abc import Collection, Mapping
from typing import Any

from jattn.loaders.errors import ModelFileError


class Fields:
    """Values by key, with the error messages of the loaders; remembers which were asked for.

    >>> Fields({"heads": 0}, label="metadata llama.").count("heads")
    Traceback (most recent call last):
    jattn.loaders.errors.ModelFileError: metadata llama.heads is 0: want a whole number above 0, the same in all layers
    """

    def __init__(self, values: Mapping[str, Any], label: str = ""):
        """label: what comes before a key in messages."""
        self.values, self.label = values, label
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it is; `default` where the key is missing or null."""
        self.asked.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def count(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of at least `least`."""
        value = self.get(key, default)
        if type(value) is not int or value < least:
            raise self.error(key, value, f"want a whole number above {least - 1}, the same in all layers")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.error(key, value, "want a number above 0")
        return float(value)

    def optional(self, key: str, default: float | None = None) -> float | None:
        """A finite number above 0; `default` where the key is missing, null or 0."""
        return self.real(key) if self.get(key, 0) != 0 else default

    def flag(self, key: str, default: bool) -> bool:
        """True or False."""
        value = self.get(key, default)
        if type(value) is not bool:
            raise self.error(key, value, "want true or false")
        return value

    def expect(self, key: str, want: Any, why: str) -> None:
        """Refuse any value but `want`, which is also what a missing key means."""
        value = self.get(key, want)
        if value != want:
            raise self.error(key, value, f"only {want} is supported ({why})")

    def refuse_rest(self, silent: Collection[str], model: str) -> None:
        """Refuse a key that nobody asked for and that is set, unless it is `silent`: it may change numbers."""
        for key, value in self.values.items():
            if value and key not in self.asked and key not in silent:
                raise self.error(key, value, f"this variant of {model!r} is not supported")

    def error(self, key: str, value: Any, rule: str) -> ModelFileError:
        """The exception for a value and the rule that it breaks."""
        shown = "missing" if value is None else repr(value)[:60]
        return ModelFileError(f"{self.label}{key} is {shown}: {rule}")
