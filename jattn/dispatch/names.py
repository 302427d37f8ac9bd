"""Which of two configured names a forward pass goes by: for the dispatch, and for the pair of backends itself."""

import dataclasses

from jattn.modes import ForwardMode

_DECODE = frozenset({ForwardMode.DECODE, ForwardMode.IDLE})
_FOLLOWS_MODE = frozenset({ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HybridPair:
    """A name for prefill, a name for decode, and the half that speculation uses.

    Args: attention_mode: "prefill" or "decode", which half verifies and draft-extends.
    Raises: ValueError for another attention mode.

    >>> pair = HybridPair(prefill="fa3", decode="flashmla")
    >>> pair.dispatch_name(ForwardMode.DECODE), pair.dispatch_name(ForwardMode.TARGET_VERIFY)
    ('flashmla', 'fa3')
    """

    prefill: str | None
    decode: str | None
    attention_mode: str = "prefill"

    def __post_init__(self):
        if self.attention_mode not in ("prefill", "decode"):
            raise ValueError(f"attention_mode={self.attention_mode!r}: want 'prefill' or 'decode'")

    @classmethod
    def of(
        cls, base: str | None, *, prefill: str | None = None, decode: str | None = None, attention_mode: str = "prefill"
    ) -> "HybridPair":
        """The pair with `base` in place of a half that is not given."""
        return cls(prefill=prefill or base, decode=decode or base, attention_mode=attention_mode)

    def dispatch_name(self, mode: ForwardMode) -> str | None:
        """The name whose rules choose the form of a pass."""
        return self.decode if self._decodes(mode, _FOLLOWS_MODE) else self.prefill

    def runs_on(self, mode: ForwardMode) -> str | None:
        """The name whose kernels run a pass of the pair.

        As in the original, this differs from `dispatch_name` in one case: DRAFT_EXTEND_V2 under attention_mode
        "decode" runs on the prefill half. A draft has stamped backends of its own, so nothing meets the difference.
        """
        return self.decode if self._decodes(mode, _FOLLOWS_MODE - {ForwardMode.DRAFT_EXTEND_V2}) else self.prefill

    def needs_host_lens(self, *, prefill: bool, decode: bool) -> bool:
        """Whether the pair needs lengths on the host, given whether each half does."""
        return decode or (self.attention_mode == "prefill" and prefill)

    def _decodes(self, mode: ForwardMode, follows_mode: frozenset[ForwardMode]) -> bool:
        return mode in _DECODE or (mode in follows_mode and self.attention_mode == "decode")
