"""What a forward pass is doing. Predicates are sets of members, so a new mode is a new row in the sets it belongs to.

Behaviour: ForwardMode and CaptureHiddenMode of SGLang 0.5.16 to 0.5.21.
"""

import enum


class ForwardMode(enum.IntEnum):
    """The kind of one forward pass over a batch.

    Two traps: TARGET_VERIFY is an extend, and DRAFT_EXTEND_V2 is not unless asked for.

    >>> ForwardMode.TARGET_VERIFY.is_extend(), ForwardMode.TARGET_VERIFY.is_extend_without_speculative()
    (True, False)
    >>> ForwardMode.DRAFT_EXTEND_V2.is_extend(), ForwardMode.DRAFT_EXTEND_V2.is_extend(include_draft_extend_v2=True)
    (False, True)
    """

    EXTEND = enum.auto()  # prefill; a cached prefix may exist
    DECODE = enum.auto()  # one query token a sequence; the steps of a draft run under it too
    MIXED = enum.auto()  # chunked prefill with decode requests folded in as one-token extends
    IDLE = enum.auto()  # a data-parallel rank without work: zero tokens
    TARGET_VERIFY = enum.auto()  # the target scores the draft's tree nodes
    DRAFT_EXTEND_V2 = enum.auto()  # the draft model consumes a block of fixed width after verification
    PREBUILT = enum.auto()  # the cache was transferred from elsewhere: no forward
    SPLIT_PREFILL = enum.auto()  # a prefill run slice by slice of layers
    DLLM_EXTEND = enum.auto()  # an extend of a block-diffusion model

    def is_extend(self, include_draft_extend_v2: bool = False) -> bool:
        """More than one query token a sequence is allowed; verification counts, draft-extend only if included."""
        return self in _EXTEND or (include_draft_extend_v2 and self is ForwardMode.DRAFT_EXTEND_V2)

    def is_prefill(self, include_draft_extend_v2: bool = False) -> bool:
        """The same as `is_extend`."""
        return self.is_extend(include_draft_extend_v2)

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE

    def is_mixed(self) -> bool:
        return self is ForwardMode.MIXED

    def is_idle(self) -> bool:
        return self is ForwardMode.IDLE

    def is_decode_or_idle(self) -> bool:
        return self in _DECODE_OR_IDLE

    def is_target_verify(self) -> bool:
        return self is ForwardMode.TARGET_VERIFY

    def is_draft_extend_v2(self) -> bool:
        return self is ForwardMode.DRAFT_EXTEND_V2

    def is_extend_without_speculative(self) -> bool:
        """An extend whose tokens are all certain: `is_extend()` less TARGET_VERIFY."""
        return self in _EXTEND_WITHOUT_SPECULATIVE

    def is_context_parallel_extend(self, include_draft_extend_v2: bool = False) -> bool:
        """An extend that may be split over ranks along its tokens."""
        return self in _CONTEXT_PARALLEL or (include_draft_extend_v2 and self is ForwardMode.DRAFT_EXTEND_V2)

    def is_extend_or_draft_extend_or_mixed(self, include_draft_extend_v2: bool = False) -> bool:
        return self in _EXTEND_OR_MIXED or (include_draft_extend_v2 and self is ForwardMode.DRAFT_EXTEND_V2)

    def is_cuda_graph(self) -> bool:
        """The original captures these as one program of fixed shape."""
        return self in _CUDA_GRAPH

    def is_cpu_graph(self) -> bool:
        return self is ForwardMode.DECODE

    def is_split_prefill(self) -> bool:
        return self is ForwardMode.SPLIT_PREFILL

    def is_prebuilt(self) -> bool:
        return self is ForwardMode.PREBUILT

    def is_dllm_extend(self) -> bool:
        return self is ForwardMode.DLLM_EXTEND


def _modes(names: str) -> frozenset[ForwardMode]:
    return frozenset(ForwardMode[name] for name in names.split())


_EXTEND = _modes("EXTEND MIXED TARGET_VERIFY SPLIT_PREFILL DLLM_EXTEND")
_EXTEND_WITHOUT_SPECULATIVE = _modes("EXTEND MIXED SPLIT_PREFILL DLLM_EXTEND")
_EXTEND_OR_MIXED = _modes("EXTEND MIXED SPLIT_PREFILL")
_CONTEXT_PARALLEL = _modes("EXTEND MIXED")
_DECODE_OR_IDLE = _modes("DECODE IDLE")
_CUDA_GRAPH = _modes("DECODE IDLE TARGET_VERIFY DLLM_EXTEND")


class CaptureHiddenMode(enum.IntEnum):
    """Which hidden states a forward pass returns. Ordered: where several consumers ask, the largest wins.

    >>> max(CaptureHiddenMode.LAST, CaptureHiddenMode.FULL)
    <CaptureHiddenMode.FULL: 2>
    """

    NULL = 0  # none
    LAST = 1  # one row a sequence: its final token
    FULL = 2  # a row for every token

    def need_capture(self) -> bool:
        return self is not CaptureHiddenMode.NULL

    def is_last(self) -> bool:
        return self is CaptureHiddenMode.LAST

    def is_full(self) -> bool:
        return self is CaptureHiddenMode.FULL
