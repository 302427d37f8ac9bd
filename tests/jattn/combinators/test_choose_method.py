"""The form of a forward: costs of a layer on its platform for `native`, the rules of the other policies."""

import dataclasses

import numpy as np

from jattn import MLASpec
from jattn.combinators.mla import choose_method
from jattn.dispatch import AttnForwardMethod as M
from jattn.dispatch import DispatchFacts
from jattn.dispatch.form_costs import RATES, FormCosts, form_costs
from jattn.modes import ForwardMode as Mode

DEEPSEEK = MLASpec(num_q_heads=16, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)


def test_costs_are_flops_where_no_rates_are_known():
    assert form_costs(DEEPSEEK, kind="cuda") == form_costs(DEEPSEEK, kind="tpu") == FormCosts() and "cuda" not in RATES
    for fields in (
        dict(qk_nope_head_dim=192, v_head_dim=256),
        dict(kv_lora_rank=192, qk_nope_head_dim=0, v_head_dim=64),
    ):
        spec = dataclasses.replace(DEEPSEEK, **fields)
        saved = 4 * spec.kv_lora_rank - 2 * (spec.qk_nope_head_dim + spec.v_head_dim)
        row = 4 * spec.kv_lora_rank * (spec.qk_nope_head_dim + spec.v_head_dim)
        costs = form_costs(spec, kind="cuda")
        np.testing.assert_allclose(costs.row / costs.pair, row / saved, rtol=1e-3)


def test_a_narrow_latent_is_never_expanded():
    narrow = dataclasses.replace(DEEPSEEK, kv_lora_rank=64)
    facts = DispatchFacts(mode=Mode.EXTEND, sum_prefix_lens=9000, sum_seq_lens=19000)
    assert choose_method("native", facts, narrow, platform="cuda-sm90") is M.MLA
    assert choose_method("native", facts, DEEPSEEK, platform="cuda-sm90") is M.MHA_ONE_SHOT


def test_the_platform_and_the_policy_decide():
    def pick(policy, fresh, platform):
        facts = DispatchFacts(mode=Mode.EXTEND, sum_prefix_lens=1 << 16, sum_seq_lens=(1 << 16) + fresh)
        return choose_method(policy, facts, DEEPSEEK, platform=platform)

    assert [pick("native", n, "cuda-sm90") for n in (170, 171)] == [M.MLA, M.MHA_ONE_SHOT]
    assert [pick("native", n, "cpu") for n in (171, 1024)] == [M.MLA, M.MHA_ONE_SHOT]  # expanding is slower there
    assert pick("triton", 1024, "cpu") is M.MLA and pick("fa4", 1, "cpu") is M.MHA_CHUNKED_KV
