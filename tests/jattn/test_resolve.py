"""Resolution: needed features within those provided, first row wins, every refusal names what and why."""

import dataclasses
from typing import Any

import jax
import pytest

import jattn
from jattn import AttnSpec, MLASpec, NoBackendError, resolve
from jattn.backends import POLICIES
from jattn.kernel_sets import KERNELS, MLA_OPS, OPS
from jattn.platforms import PLATFORMS, detect
from jattn.resolve import _choose, check_policy

HEADS: dict[str, Any] = dict(num_q_heads=12, num_kv_heads=12, head_dim=8)
SPEC = AttnSpec(**HEADS)
LATENT = MLASpec(num_q_heads=4, kv_lora_rank=32, qk_nope_head_dim=12, qk_rope_head_dim=4, v_head_dim=8)
SPARSE = ("hybrid_linear_attn", "dsa", "nsa", "dsv4", "qsa")


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        (dict(alibi=True), "alibi"),
        (dict(cross_attention=True), "cross_attention"),
        (dict(chunked_local=8192), "chunked_local"),
        (dict(bidirectional_spans=True), "bidirectional_spans"),
        (dict(xai_temperature_len=1024), "xai_temperature"),
    ],
)
@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("platform", PLATFORMS)
def test_what_no_kernel_offers_is_refused_by_name_on_every_platform(platform, declared, fields, name):
    with pytest.raises(NoBackendError) as error:
        resolve(AttnSpec(**HEADS, **fields), "native", platform, include_declared=declared)
    assert f"no kernel of {platform} serves attend with {name}: " in str(error.value)
    for kernel_set in PLATFORMS[platform].kernel_sets:
        assert f"{kernel_set}/attend lacks {name}" in str(error.value)


def test_every_missing_feature_is_named_at_once():
    with pytest.raises(NoBackendError, match="xla/attend lacks alibi, cross_attention"):
        resolve(AttnSpec(**HEADS, alibi=True, cross_attention=True, sinks=True), "native", "cpu")


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_latent_layer_has_kernels_of_its_own_and_for_its_expanded_keys(platform):
    choice = resolve(LATENT, "native", platform)
    assert tuple(kernel.op for kernel in choice.rows) == MLA_OPS
    assert all(kernel.function is not None for kernel in choice.rows)
    first = next(name for name in ("tpu", "hopper", "xla") if name in PLATFORMS[platform].kernel_sets)
    assert choice.row("attend_latent").name == f"{first}/attend_latent" and choice.needs == {jattn.Feature.MLA}
    assert choice.row("attend").ragged is not None


def test_a_kernel_that_has_not_run_on_its_device_is_chosen_only_when_asked_for():
    choice = resolve(LATENT, "native", "cuda-sm90")
    assert choice.row("attend_latent").name == "hopper/attend_latent"
    assert choice.row("write_latent").name == "xla/write_latent" and choice.kv_layout is None
    packed = dataclasses.replace(LATENT, kv_dtype="fp8_e4m3")
    choice = resolve(packed, "native", "cuda-sm90")
    assert choice.row("attend_latent").name == "xla/attend_latent"
    assert any("hopper/attend_latent/packed has not run on a device yet" in reason for reason in choice.skipped)
    choice = resolve(packed, "native", "cuda-sm90", prefer=("hopper",))
    assert choice.row("attend_latent").name == "hopper/attend_latent/packed"


def test_a_choice_of_another_kind_of_layer_says_what_it_serves():
    with pytest.raises(NoBackendError, match="attend, write_kv, merge_states, not attend_latent: resolve the spec"):
        resolve(SPEC, "native", "cpu").row("attend_latent")
    with pytest.raises(NoBackendError, match="not write_kv"):
        resolve(LATENT, "native", "cpu").row("write_kv")


def test_a_latent_dtype_without_a_kernel_is_refused_by_name():
    with pytest.raises(NoBackendError, match="serves attend_latent with int8_kv, mla: xla/attend_latent lacks int8_kv"):
        resolve(dataclasses.replace(LATENT, kv_dtype="int8"), "native", "cpu")


@pytest.mark.parametrize("spec", [SPEC, LATENT], ids=["mha", "mla"])
@pytest.mark.parametrize("policy", SPARSE)
def test_sparse_and_hybrid_policies_are_refused_with_the_reason(policy, spec):
    with pytest.raises(NoBackendError, match=rf"policy '{policy}' cannot run attention: .*; use 'native'"):
        resolve(spec, policy, "cpu")


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - set(SPARSE)))
def test_every_other_policy_runs_the_models_it_is_for_or_says_which(policy):
    rules = POLICIES[policy]
    if rules.supports_mha:
        assert resolve(SPEC, policy, "cpu").policy == policy
    else:
        with pytest.raises(NoBackendError, match=rf"policy '{policy}' serves MLA models only.*; use 'native'"):
            resolve(SPEC, policy, "cpu")
    if not rules.supports_mla:
        with pytest.raises(NoBackendError, match=rf"policy '{policy}' does not serve MLA models; use 'native'"):
            resolve(LATENT, policy, "cpu")


def test_both_kinds_of_model_are_refused_somewhere():
    assert {rules.supports_mha for rules in POLICIES.values()} == {True, False}
    assert not POLICIES["trtllm_mha"].supports_mla


@pytest.mark.parametrize("spec", [SPEC, LATENT], ids=["mha", "mla"])
@pytest.mark.parametrize("policy", sorted(set(POLICIES) - set(SPARSE)))
def test_exactly_the_legal_page_sizes_pass(policy, spec):
    rules, is_mla = POLICIES[policy], spec is LATENT
    if not (rules.supports_mla if is_mla else rules.supports_mha):
        return
    legal = rules.legal_page_sizes(is_mla=is_mla)
    for page_size in range(-1, 259):
        if page_size in (range(1, 257) if legal is None else legal):
            check_policy(rules, spec, page_size=page_size, topk=None)
            continue
        with pytest.raises(ValueError, match=f"page_size={page_size}") as error:
            check_policy(rules, spec, page_size=page_size, topk=None)
        want = "want 1 to 256" if legal is None else f"'{policy}': want one of {', '.join(map(str, sorted(legal)))}, or"
        assert want in str(error.value)


@pytest.mark.parametrize(
    ("spec", "policy", "sizes", "message"),
    [
        (SPEC, "trtllm_mha", dict(topk=2), "topk=2 is not legal under policy 'trtllm_mha': at most 1, or use 'native'"),
        (LATENT, "flashmla", dict(topk=3), "topk=3 is not legal under policy 'flashmla': at most 1"),
        (LATENT, "flashinfer", dict(topk=2), "topk=2 is not legal under policy 'flashinfer': at most 1"),
        (
            SPEC,
            "aiter",
            dict(topk=4, page_size=16),
            "topk=4 with page_size=16 is not legal .*'aiter': want page_size=1",
        ),
        (SPEC, "native", dict(topk=-1), "topk=-1: want at least 1, or 0 for no draft"),
    ],
)
def test_a_draft_tree_that_the_policy_forbids_is_refused(spec, policy, sizes, message):
    with pytest.raises(ValueError, match=message):
        resolve(spec, policy, "cpu", **sizes)


@pytest.mark.parametrize(
    ("policy", "sizes"),
    [
        ("native", dict(topk=64, page_size=256)),
        ("triton", dict(topk=8, page_size=16)),
        ("flashinfer", dict(topk=2, page_size=16)),  # its limit of 1 is for MLA
        ("aiter", dict(topk=4, page_size=1)),
        ("aiter", dict(topk=1, page_size=16)),
        ("trtllm_mha", dict(topk=1, page_size=16)),
        ("trtllm_mha", dict(topk=0, page_size=16)),
    ],
)
def test_a_draft_tree_that_the_policy_allows_passes(policy, sizes):
    assert resolve(SPEC, policy, "cpu", **sizes).policy == policy


def test_a_kv_dtype_that_the_policy_forbids_is_refused_with_the_legal_ones():
    with pytest.raises(ValueError, match="kv_dtype='fp8_e5m2' is not legal under policy 'fa3': want one of .*fp8_e4m3"):
        resolve(AttnSpec(**HEADS, kv_dtype="fp8_e5m2"), "fa3", "cpu")
    with pytest.raises(ValueError, match="kv_dtype='int8' is not legal under policy 'intel_amx'"):
        resolve(AttnSpec(**HEADS, kv_dtype="int8"), "intel_amx", "cpu")
    assert resolve(AttnSpec(**HEADS, kv_dtype="int8"), "native", "cpu").row("attend").name == "xla/attend"


def test_sinks_are_refused_by_policies_without_them():
    with pytest.raises(NoBackendError, match="policy 'flashinfer' does not serve attention sinks; use 'native'"):
        resolve(AttnSpec(**HEADS, sinks=True), "flashinfer", "cpu")
    assert resolve(AttnSpec(**HEADS, sinks=True), "triton", "cpu").policy == "triton"


@pytest.mark.parametrize("name", ["flash_attention_5", ""])
def test_an_unknown_policy_or_platform_lists_the_names(name):
    with pytest.raises(ValueError, match=rf"unknown policy '{name}'") as error:
        resolve(SPEC, name, "cpu")
    assert all(known in str(error.value) for known in POLICIES)
    with pytest.raises(ValueError, match=rf"unknown platform '{name}'") as error:
        resolve(SPEC, "native", name)
    assert all(known in str(error.value) for known in PLATFORMS)


def test_an_unknown_kernel_set_or_split_count_is_refused():
    with pytest.raises(ValueError, match="unknown kernel set 'hoper' in prefer: want some of hopper, gpu, tpu, xla"):
        resolve(SPEC, "native", "cpu", prefer=("hoper",))
    with pytest.raises(ValueError, match="num_splits=0: want at least 1"):
        resolve(SPEC, "native", "cpu", num_splits=0)


def test_the_default_policy_is_the_platforms_own():
    assert resolve(SPEC, platform="cpu") == resolve(SPEC, "native", PLATFORMS["cpu"])
    assert resolve(SPEC).platform == detect().name


@pytest.mark.parametrize("platform", PLATFORMS)
def test_written_rows_win_and_each_row_passed_over_has_its_reason(platform):
    row = PLATFORMS[platform]
    choice = resolve(SPEC, "native", platform)
    assert tuple(kernel.op for kernel in choice.rows) == OPS
    assert all(kernel.function is not None and kernel.set in row.kernel_sets for kernel in choice.rows)
    passed = [k for k in KERNELS if k.set in row.kernel_sets and k.function is None]
    for op in OPS:
        before = row.kernel_sets[: row.kernel_sets.index(choice.row(op).set)]
        for kernel in passed:
            if kernel.op == op and kernel.set in before:
                assert f"{kernel.name} is declared, not written yet" in choice.skipped
    assert len(choice.skipped) == sum(row.kernel_sets.index(kernel.set) for kernel in choice.rows)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_declared_rows_are_chosen_where_asked_for(platform):
    choice = resolve(SPEC, "native", platform, include_declared=True)
    assert {kernel.set for kernel in choice.rows} == {PLATFORMS[platform].kernel_sets[0]}
    assert choice.skipped == ()


def test_a_declared_row_is_still_passed_over_for_a_feature_it_lacks():
    choice = resolve(AttnSpec(**HEADS, kv_dtype="int8"), "native", "cuda-sm90", include_declared=True)
    assert choice.row("attend").name == "gpu/attend"
    assert choice.skipped == (
        "hopper/attend lacks int8_kv, per_token_scales",
        "hopper/write_kv lacks int8_kv, per_token_scales",
    )


def test_preferred_sets_come_before_the_platforms_own():
    choice = resolve(SPEC, "native", "cpu", prefer=("hopper",))
    assert choice.row("merge_states").name == "hopper/merge_states"
    assert choice.row("attend").name == "hopper/attend"
    choice = resolve(SPEC, "native", "cpu", prefer=("gpu",))
    assert choice.row("attend").name == "gpu/attend"
    assert resolve(SPEC, "native", "cuda-sm80").row("attend").name == "xla/attend"


def test_a_policys_preference_never_brings_in_a_set_of_another_platform():
    def sets(platform):
        asked = tuple((op, frozenset()) for op in OPS)
        choice = _choose("made_up", ("tpu", "xla", "hopper"), PLATFORMS[platform], asked, True, (), 1)
        return [kernel.set for kernel in choice.rows]

    assert sets("cpu") == ["xla"] * 3
    assert sets("cuda-sm90") == ["xla"] * 3  # preferred, and before hopper
    assert sets("tpu-v5e") == ["tpu"] * 3


def test_equal_questions_give_one_choice_that_can_be_static():
    spec = AttnSpec(**HEADS, sliding_window=4)
    first = resolve(spec, "native", "cuda-sm90", num_splits=2)
    second = resolve(AttnSpec(**HEADS, sliding_window=9), "native", "cuda-sm90", num_splits=2)
    assert first == second and hash(first) == hash(second)
    traces = []
    run = jax.jit(lambda x, choice: traces.append(choice) or x, static_argnums=1)
    for choice in (first, second, dataclasses.replace(first)):
        run(1.0, choice)
    assert len(traces) == 1
    run(1.0, resolve(spec, "native", "cuda-sm90"))
    assert len(traces) == 2
    assert first.needs == {jattn.Feature.WINDOW} and first.num_splits == 2
