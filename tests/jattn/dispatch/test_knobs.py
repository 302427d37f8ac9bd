"""What is settled when a model is loaded, against the description of the original."""

import pytest

from jattn.backends import POLICIES
from jattn.dispatch import check_deterministic, chunked_prefix_disabled

EXPANDS_PREFIXES = "flashinfer fa3 fa4 flashmla cutedsl_mla trtllm_mla tokenspeed_mla native".split()
DETERMINISTIC = "ascend fa3 fa4 flashinfer intel_xpu triton native".split()
DETERMINISTIC_CACHED_MLA = "ascend fa3 fa4 triton native".split()


@pytest.mark.parametrize("name", [*POLICIES, None])
def test_prefixes_are_expanded_by_some_names_for_mla_models(name):
    assert chunked_prefix_disabled(name, is_mla=True) == (name not in EXPANDS_PREFIXES)
    assert chunked_prefix_disabled(name, is_mla=False)
    assert chunked_prefix_disabled(name, is_mla=True, requested=True)


@pytest.mark.parametrize("name", POLICIES)
def test_some_names_are_deterministic(name):
    for is_mla, prefix_cache in ((False, False), (False, True), (True, False), (True, True)):
        legal = DETERMINISTIC_CACHED_MLA if is_mla and prefix_cache else DETERMINISTIC
        if name in legal:
            check_deterministic(name, is_mla=is_mla, prefix_cache=prefix_cache)
        else:
            with pytest.raises(
                ValueError, match=f"policy '{name}' is not deterministic.*: use one of ascend, fa3, fa4"
            ):
                check_deterministic(name, is_mla=is_mla, prefix_cache=prefix_cache)
