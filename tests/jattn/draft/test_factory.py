"""The draft-backend factory against a literal table, typed from the description of the original. No rule is imported.

A line: name, where it holds (`any`, or platforms), MLA (`1`, `0` or `*`), container, its stamp, draft-extend backend,
its stamp, children beyond num_steps - 1, and what it refuses: `chain` (topk > 1: ValueError), `assert` (topk > 1, as
the original's assertion), `mla` (a model that is not MLA).
"""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from jattn.backends import POLICIES
from jattn.dispatch import HybridPair, explain, facts_from
from jattn.draft import DraftConfig, check_draft_limits, create_decode_backend, create_draft_extend_backend
from jattn.modes import ForwardMode
from jattn.platforms import PLATFORMS

TABLE = """
    flashinfer         any        0 flashinfer     flashinfer     flashinfer     flashinfer     0 -
    flashinfer         any        1 flashinfer_mla flashinfer     flashinfer_mla flashinfer     0 chain
    triton             any        * triton         triton         triton         triton         0 -
    intel_amx          any        * intel_amx      intel_amx      intel_amx      intel_amx      0 -
    intel_xpu          any        * intel_xpu      intel_xpu      intel_xpu      intel_xpu      0 -
    aiter              any        * aiter          aiter          aiter          aiter          0 -
    fa3                musa       * fa3_musa       fa3            fa3_musa       fa3            0 -
    fa3                any        * fa3            fa3            fa3            fa3            0 -
    fa4                musa       * fa4_musa       fa4            fa4_musa       fa4            0 -
    fa4                any        * fa4            fa4            fa4            fa4            0 -
    hybrid_linear_attn cpu-amx    * intel_amx      intel_amx      intel_amx      intel_amx      0 -
    hybrid_linear_attn cuda-sm100,cuda-sm120 * triton triton      triton         triton         0 -
    hybrid_linear_attn musa       * fa3_musa       fa3            fa3_musa       fa3            0 -
    hybrid_linear_attn any        * fa3            fa3            fa3            fa3            0 -
    flashmla           any        * flashmla       flashmla       flashmla       flashmla       0 chain
    trtllm_mha         any        * trtllm_mha     trtllm_mha     trtllm_mha     trtllm_mha     0 -
    trtllm_mla         any        * trtllm_mla     trtllm_mla     trtllm_mla     trtllm_mla     0 mla,chain
    cutedsl_mla        any        * cutedsl_mla    cutedsl_mla    trtllm_mla     trtllm_mla     0 mla,chain
    tokenspeed_mla     any        * tokenspeed_mla tokenspeed_mla tokenspeed_mla tokenspeed_mla 0 mla,chain
    dsa                any        * dsa            dsa            dsa            dsa            0 -
    nsa                any        * dsa            dsa            dsa            dsa            0 -
    ascend             any        * ascend         ascend         ascend         ascend         1 -
    dsv4               npu        * dsv4_npu       dsv4           dsv4_npu       dsv4           1 -
    dsv4               rocm-gfx942,rocm-gfx950 * dsv4_hip dsv4    dsv4_hip       dsv4           1 -
    dsv4               any        * dsv4           dsv4           dsv4           dsv4           1 assert
    native             any        * native         native         native         native         0 -
"""
LINES = [tuple(map(str, line.split())) for line in TABLE.strip().splitlines()]
NAMES = list(dict.fromkeys(line[0] for line in LINES))
UNKNOWN = ("cutlass_mla", "torch_native", "flex_attention", "wave", "qsa", "hpc_ops", "dual_chunk_flash_attn", None)


def line_of(name: str | None, platform: str, use_mla: bool) -> tuple[str, ...] | None:
    for line in LINES:
        if line[0] == name and platform in (*line[1].split(","), platform if line[1] == "any" else ""):
            if line[2] in ("*", str(int(use_mla))):
                return line
    return None


def config_of(**fields: Any) -> DraftConfig:
    base = dict(platform="cuda-sm90", use_mla=True, topk=1, num_steps=3, prefill_backend="fa3", decode_backend="fa3")
    merged = {**base, **fields}
    return DraftConfig(**{**merged, "platform": PLATFORMS[merged["platform"]]})


def outcome(create, config: DraftConfig):
    """What a call gives, in plain values: None, (variant, stamps, children, wrapper), or the error's type and text."""
    try:
        made = create(config)
    except (ValueError, NotImplementedError) as error:
        kind = "assert" if isinstance(error, AssertionError) else type(error).__name__
        return kind, str(error)
    if made is None:
        return None
    stamps = {(b.variant, b.prefill_stamp, b.decode_stamp) for b in (made, *made.steps)}
    assert len(stamps) == 1, "children are what the container is, stamped alike"
    assert [child.step for child in made.steps] == list(range(len(made.steps)))
    return *stamps.pop(), len(made.steps), made.wrapper


def expected_decode(name, platform, use_mla, topk, num_steps, qsa, family):
    if num_steps <= 1:
        return None
    if qsa:
        return "NotImplementedError" if topk != 1 else ("qsa", "qsa", "qsa", num_steps - 1, None)
    if family == "inkling":
        return "NotImplementedError"
    line = line_of(name, platform, use_mla)
    if line is None:
        return "ValueError", f"EAGLE is not supported in decode attention backend {name}"
    if "mla" in line[8].split(",") and not use_mla:
        return "ValueError", f"{name} backend requires MLA model (use_mla_backend=True)."
    if topk > 1 and line[8] != "-":
        return "assert" if line[8] == "assert" else "ValueError"
    wrapper = "dots" if family == "dots" else None
    return line[3], line[4], line[4], num_steps - 1 + int(line[7]), wrapper


def expected_extend(name, platform, use_mla, qsa, family):
    if qsa:
        return "qsa", "qsa", "qsa", 0, None
    line = line_of(name, platform, use_mla)
    if line is None:
        return "ValueError", f"EAGLE is not supported in attention backend {name}"
    if "mla" in line[8].split(",") and not use_mla:
        return "ValueError", f"{line[5]} backend requires MLA model (use_mla_backend=True)."
    return line[5], line[6], line[6], 0, family


def agrees(got, want) -> bool:
    return got[0] == want if isinstance(want, str) and got is not None else got == want


@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_cell_is_its_line_of_the_table(platform):
    grid = itertools.product(
        (*NAMES, *UNKNOWN), (False, True), (0, 1, 2), (0, 1, 2, 3), (None, object()), (None, "inkling", "dots")
    )
    for name, use_mla, topk, num_steps, qsa, family in grid:
        config = config_of(
            platform=platform,
            use_mla=use_mla,
            topk=topk,
            num_steps=num_steps,
            qsa_profile=qsa,
            model_family=family,
            prefill_backend=name,
            decode_backend=name,
        )
        want = expected_decode(name, platform, use_mla, topk, num_steps, qsa is not None, family)
        got = outcome(create_decode_backend, config)
        assert agrees(got, want), (config, got, want)
        want = expected_extend(name, platform, use_mla, qsa is not None, family)
        got = outcome(create_draft_extend_backend, config)
        assert agrees(got, want), (config, got, want)


# draft backend, attention mode -> which half names the container, which the draft-extend backend
NAMED_BY = {
    (None, "prefill"): ("decode", "prefill"),
    (None, "decode"): ("decode", "decode"),
    ("", "prefill"): ("decode", "prefill"),
    ("", "decode"): ("decode", "decode"),
    ("triton", "prefill"): ("draft", "draft"),
    ("triton", "decode"): ("draft", "draft"),
    ("no such backend", "prefill"): ("draft", "draft"),
}


@pytest.mark.parametrize(("draft", "mode"), NAMED_BY)
@pytest.mark.parametrize(("prefill", "decode"), [("fa4", "aiter"), ("aiter", "fa4"), ("nsa", "nsa"), ("?", "fa3")])
def test_which_name_counts(draft, mode, prefill, decode):
    halves = {"prefill": prefill, "decode": decode, "draft": draft}
    config = config_of(draft_backend=draft, attention_mode=mode, prefill_backend=prefill, decode_backend=decode)
    by_decode, by_extend = (halves[half] for half in NAMED_BY[draft, mode])
    got = outcome(create_decode_backend, config)
    assert agrees(got, expected_decode(by_decode, "cuda-sm90", True, 1, 3, False, None))
    got = outcome(create_draft_extend_backend, config)
    assert agrees(got, expected_extend(by_extend, "cuda-sm90", True, False, None))


# name -> the rows that choose a draft's forms, read through its stamps: of the steps, of draft-extend
DISPATCH = {
    "flashinfer": ("generic 4", "generic 4"),
    "cutedsl_mla": ("triton 4", "trtllm_mla 4"),
    "trtllm_mla": ("trtllm_mla 4", "trtllm_mla 4"),
    "nsa": ("dsa 2", "dsa 2"),
    "hybrid_linear_attn": ("generic 4", "generic 4"),
    "fa4": ("fa4 1", "fa4 1"),
    "native": ("native 4", "native 4"),
}


@pytest.mark.parametrize("name", DISPATCH)
def test_a_drafts_forms_are_chosen_by_its_stamps_not_by_the_targets_names(name):
    config = config_of(draft_backend=name, prefill_backend="ascend", decode_backend="ascend")
    target = HybridPair(prefill="ascend", decode="ascend")
    container, extend = create_decode_backend(config), create_draft_extend_backend(config)
    assert container is not None
    of_steps, of_extend = DISPATCH[name]
    for backend, mode, row in (
        *((step, ForwardMode.DECODE, of_steps) for step in (container, *container.steps)),
        (extend, ForwardMode.DRAFT_EXTEND_V2, of_extend),
    ):
        facts = facts_from(backend, SimpleNamespace(forward_mode=mode, seq_lens_cpu=[9]), configured=target)
        assert explain(facts.policy, facts).rows[0].label == row


def test_texts_of_the_refusals():
    with pytest.raises(NotImplementedError, match="--enable-multi-layer-eagle"):
        create_decode_backend(config_of(model_family="inkling", decode_backend="no such backend"))
    with pytest.raises(NotImplementedError, match="topk=2: .* needs topk=1"):
        create_decode_backend(config_of(qsa_profile=object(), topk=2))
    with pytest.raises(
        ValueError, match="topk=4: the flashmla draft container is a chain, so it needs topk=1; .*native"
    ):
        create_decode_backend(config_of(decode_backend="flashmla", topk=4))
    with pytest.raises(AssertionError, match="topk=2: the dsv4"):
        create_decode_backend(config_of(decode_backend="dsv4", topk=2))
    with pytest.raises(ValueError, match=r"^cutedsl_mla backend requires MLA model \(use_mla_backend=True\)\.$"):
        create_decode_backend(config_of(decode_backend="cutedsl_mla", use_mla=False))
    with pytest.raises(ValueError, match=r"^trtllm_mla backend requires MLA model \(use_mla_backend=True\)\.$"):
        create_draft_extend_backend(config_of(prefill_backend="cutedsl_mla", use_mla=False))


def test_the_selection_seed_goes_to_container_children_and_extend_of_dsa_alone():
    for name in ("dsa", "nsa", "fa3"):
        config = config_of(decode_backend=name, prefill_backend=name, seed_dsa_topk=True)
        made = create_decode_backend(config)
        assert made is not None
        seeded = [b.seed_dsa_topk for b in (made, *made.steps, create_draft_extend_backend(config))]
        assert seeded == [name != "fa3"] * 4


def test_a_config_out_of_range_is_refused():
    with pytest.raises(ValueError, match="DraftConfig.topk=-1: want an integer of at least 0"):
        config_of(topk=-1)
    with pytest.raises(ValueError, match="attention_mode='both': want 'prefill' or 'decode'"):
        config_of(attention_mode="both")
    with pytest.raises(ValueError, match="DraftConfig.model_family='Inkling': want 'inkling', 'dots' or None"):
        config_of(model_family="Inkling")
    with pytest.raises(ValueError, match="DraftConfig.platform='cpu': want a row"):
        DraftConfig(platform="cpu", use_mla=True, topk=1, num_steps=1, prefill_backend=None, decode_backend=None)  # type: ignore


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "trtllm_mha"])
def test_trees_over_pages_need_a_backend_that_pages_them(name):
    check_draft_limits(topk=4, page_size=1, base_backend=name)
    check_draft_limits(topk=1, page_size=64, base_backend=name)
    if name in ("native", "flashinfer", "triton", "fa3"):
        check_draft_limits(topk=4, page_size=64, base_backend=name)
    else:
        with pytest.raises(ValueError, match=f"topk=4 with page_size=64 under '{name}': .* need page_size=1"):
            check_draft_limits(topk=4, page_size=64, base_backend=name)


def test_limits_of_the_pair_and_of_chains():
    for half in ("prefill_backend", "decode_backend"):
        halves: Any = {half: "trtllm_mha"}
        with pytest.raises(ValueError, match="topk=2 under 'trtllm_mha'"):
            check_draft_limits(topk=2, page_size=1, base_backend="fa3", **halves)
        check_draft_limits(topk=1, page_size=1, base_backend="fa3", **halves)
    with pytest.raises(ValueError, match="num_draft_tokens=8 .* verifies num_steps . 1 = 4 tokens"):
        check_draft_limits(topk=1, page_size=1, base_backend="fa3", num_steps=3, num_draft_tokens=8)
    with pytest.raises(ValueError, match="unknown policy 'fa5': want one of fa"):
        check_draft_limits(topk=1, page_size=1, base_backend="fa5")
