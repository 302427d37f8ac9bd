"""Which form an MLA layer takes in each forward pass, decided by rows: absorbed, or expanded in one or more pieces."""

from jattn.dispatch.backend_facts import dsa_prefill_uses_mha, facts_from
from jattn.dispatch.defaults import default_policy
from jattn.dispatch.facts import DispatchFacts
from jattn.dispatch.form_costs import FormCosts, form_costs
from jattn.dispatch.knobs import check_deterministic, chunked_prefix_disabled
from jattn.dispatch.methods import METHODS, AttnForwardMethod
from jattn.dispatch.names import HybridPair
from jattn.dispatch.select import Explanation, explain, select_method, select_method_traced

__all__ = [
    "METHODS",
    "AttnForwardMethod",
    "DispatchFacts",
    "Explanation",
    "FormCosts",
    "HybridPair",
    "check_deterministic",
    "chunked_prefix_disabled",
    "default_policy",
    "dsa_prefill_uses_mha",
    "explain",
    "facts_from",
    "form_costs",
    "select_method",
    "select_method_traced",
]
