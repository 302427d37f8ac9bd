"""Stop texts in a stream: what may be printed now, and where the text ends."""

from collections.abc import Iterable


class StopTexts:
    """Watch a stream for stop texts, which may span pushes.

    The stop text that is complete first ends the stream; of several complete at the same character, the longest. This
    is what reading one character at a time finds, however the text is cut into pushes.

    >>> stops = StopTexts(["\\n\\n", "END"])
    >>> stops.push("one E"), stops.push("NDless")
    (('one ', None), ('', 'END'))
    """

    def __init__(self, stops: Iterable[str]):
        """Raises: ValueError for an empty stop text, which would end every stream at once."""
        self.stops = tuple(dict.fromkeys(stops))
        if "" in self.stops:
            raise ValueError("a stop text is empty: want at least one character in each of stops")
        self.hit: str | None = None
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text safe to emit, the stop text that was hit or None). The stop text and what follows are never emitted."""
        if not self.stops:
            return text, None
        if self.hit is not None:
            return "", self.hit
        text = self._held + text
        found = [(start + len(stop), -len(stop), stop) for stop in self.stops if (start := text.find(stop)) >= 0]
        if found:
            end, _, self.hit = min(found)
            self._held = ""
            return text[: end - len(self.hit)], self.hit
        held = self._longest_prefix_at_end(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def flush(self) -> str:
        """What was held back as the possible beginning of a stop text, once no more text comes."""
        held, self._held = self._held, ""
        return held

    def _longest_prefix_at_end(self, text: str) -> int:
        longest = max(map(len, self.stops), default=0) - 1
        for length in range(min(longest, len(text)), 0, -1):
            tail = text[len(text) - length :]
            if any(stop.startswith(tail) for stop in self.stops):
                return length
        return 0
