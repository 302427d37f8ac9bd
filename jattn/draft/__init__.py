"""Draft backends: which container drafts, under which names, and the plan of each of its steps."""

from jattn.draft.config import DraftConfig
from jattn.draft.factory import DraftBackend, create_decode_backend, create_draft_extend_backend
from jattn.draft.limits import check_draft_limits

__all__ = [
    "DraftBackend",
    "DraftConfig",
    "check_draft_limits",
    "create_decode_backend",
    "create_draft_extend_backend",
]
