"""What single flags change on non-speculative extends, typed from the description of the original; `-` is no change."""

from typing import Any

import pytest

from jattn.dispatch import DispatchFacts, select_method
from jattn.modes import ForwardMode

NAMES = (
    "flashinfer flashmla fa3 cutlass_mla intel_xpu trtllm_mla tokenspeed_mla triton other aiter fa4 ascend dsa".split()
)
# flags -> prefix sums tried, and a method a name (one subtype here: MLA_FUSED_ROPE_CPU, so that SUB shows)
EFFECTS = {
    "piecewise_graph": ((0, 9000), "MLA MLA MLA MLA MLA MLA MLA MLA MLA MHA - - -"),
    "piecewise_graph deterministic": ((0, 9000), "MLA MLA SUB MLA MLA MLA MLA MLA MLA MHA - - -"),
    "breakable_graph": ((0, 100, 9000), "- - - - - - - - - MHA - - -"),
    "prefill_context_parallel": ((0, 100, 9000), "SUB SUB SUB SUB SUB - - - - - - - -"),
    "ragged_disabled": ((0, 9000), "SUB SUB - - - - - - - - - - -"),
    "chunked_prefix_disabled at 0": ((0,), "- - - - - - - - - - - - -"),
    "chunked_prefix_disabled": ((8192, 9000), "SUB SUB SUB SUB SUB SUB SUB - - - - - -"),
    "chunked_prefix_disabled below": ((1, 8191), "- - - - - SUB SUB - - - - - -"),
    "deterministic": ((0, 9000), "- - SUB - - - - SUB SUB - - - -"),
}


@pytest.mark.parametrize("flags", EFFECTS)
def test_effect_of_flags_on_extends(flags):
    prefixes, methods = EFFECTS[flags]
    given: Any = {flag: True for flag in flags.split() if flag not in ("at", "0", "below")}
    for name, want in zip(NAMES, methods.split(), strict=True):
        for prefix in prefixes:
            for mode in ("EXTEND", "MIXED", "SPLIT_PREFILL", "DLLM_EXTEND"):
                base: Any = dict(mode=ForwardMode[mode], sum_prefix_lens=prefix, sum_seq_lens=9999)
                base |= dict(fused_qkv_a=True, amx=True)
                plain = select_method(name, DispatchFacts(**base)).name
                wanted = {"-": plain, "SUB": "MLA_FUSED_ROPE_CPU"}.get(want, want)
                assert select_method(name, DispatchFacts(**base, **given)).name == wanted, (name, prefix, mode)
