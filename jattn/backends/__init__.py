"""Backend policies: what choosing a backend by name means."""

from jattn.backends.policy import BackendPolicy
from jattn.backends.table import POLICIES, policy_named

__all__ = ["POLICIES", "BackendPolicy", "policy_named"]
