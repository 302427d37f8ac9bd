"""What the draft-backend factory looks at, as one record."""

import dataclasses

from jattn.dispatch.names import HybridPair
from jattn.platforms import Platform

_FAMILIES = (None, "inkling", "dots")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """A draft model's place: device, shape of its drafts, and the names configured for it and its target.

    Raises: ValueError for a negative count, an attention mode or a model family that is not known.
    """

    platform: Platform
    use_mla: bool  # the draft model caches latents
    topk: int  # branches of the draft tree; 1 is a chain
    num_steps: int  # tokens drafted in depth
    draft_backend: str | None = None  # the draft's own backend; empty or None: the target's
    prefill_backend: str | None
    decode_backend: str | None
    attention_mode: str = "prefill"  # which half of the pair verifies and draft-extends
    seed_dsa_topk: bool = False  # draft steps reuse the token selection that draft-extend made
    qsa_profile: object | None = None  # a Qwen sparse-attention draft; any value takes its own path
    model_family: str | None = None  # "inkling" and "dots" have rules of their own

    def __post_init__(self):
        if not isinstance(self.platform, Platform):
            raise ValueError(f"DraftConfig.platform={self.platform!r}: want a row, as PLATFORMS['cuda-sm90']")
        for name in ("topk", "num_steps"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ValueError(f"DraftConfig.{name}={value!r}: want an integer of at least 0")
        if self.model_family not in _FAMILIES:
            raise ValueError(f"DraftConfig.model_family={self.model_family!r}: want 'inkling', 'dots' or None")
        HybridPair(prefill=None, decode=None, attention_mode=self.attention_mode)

    @property
    def decode_name(self) -> str | None:
        """The name that the multi-step container goes by."""
        return self.draft_backend or self.decode_backend

    @property
    def extend_name(self) -> str | None:
        """The name that the draft-extend backend goes by."""
        return self.draft_backend or (self.decode_backend if self.attention_mode == "decode" else self.prefill_backend)
