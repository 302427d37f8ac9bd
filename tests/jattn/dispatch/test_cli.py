"""`jattn explain` on dispatch: every row of the expanded mode table prints what that table says."""

import argparse
from pathlib import Path

import pytest

import jattn.dispatch
from jattn.cli import main
from jattn.dispatch import cli
from jattn.modes import ForwardMode

# name, options -> method with no prefix, below the threshold, from the threshold; and outside non-speculative extends
EXPANDED = {
    ("flashinfer", ""): ("MHA_ONE_SHOT", "MLA", "MHA_ONE_SHOT", "MLA"),
    ("fa3", ""): ("MHA_ONE_SHOT", "MLA", "MHA_ONE_SHOT", "MLA"),
    ("flashmla", ""): ("MHA_ONE_SHOT", "MLA", "MHA_ONE_SHOT", "MLA"),
    ("flashinfer", "--seq-lens-sum 131073"): ("MHA_CHUNKED_KV", "MLA", "MHA_CHUNKED_KV", "MLA"),
    ("fa3", "--seq-lens-sum 131073"): ("MHA_CHUNKED_KV", "MLA", "MHA_CHUNKED_KV", "MLA"),
    ("flashmla", "--seq-lens-sum 131073"): ("MHA_CHUNKED_KV", "MLA", "MHA_CHUNKED_KV", "MLA"),
    ("cutlass_mla", ""): ("MHA_CHUNKED_KV", "MLA", "MHA_CHUNKED_KV", "MLA"),
    ("intel_xpu", ""): ("MHA_CHUNKED_KV", "MLA", "MHA_CHUNKED_KV", "MLA"),
    ("fa4", ""): ("MHA_CHUNKED_KV", "MHA_CHUNKED_KV", "MHA_CHUNKED_KV", "MHA_CHUNKED_KV"),
    ("trtllm_mla", ""): ("MHA_CHUNKED_KV", "MHA_CHUNKED_KV", "MHA_CHUNKED_KV", "MLA"),
    ("tokenspeed_mla", ""): ("MHA_CHUNKED_KV", "MHA_CHUNKED_KV", "MHA_CHUNKED_KV", "MLA"),
    ("aiter", ""): ("MHA", "MHA", "MHA", "MLA"),
    ("dsa", ""): ("MLA", "MLA", "MLA", "MLA"),
    ("nsa", ""): ("MLA", "MLA", "MLA", "MLA"),
    ("dsa", "--dsa-use-mha"): ("MHA_ONE_SHOT", "MHA_ONE_SHOT", "MHA_ONE_SHOT", "MHA_ONE_SHOT"),
    ("nsa", "--dsa-use-mha"): ("MHA_ONE_SHOT", "MHA_ONE_SHOT", "MHA_ONE_SHOT", "MHA_ONE_SHOT"),
    ("triton", ""): ("MHA", "MLA", "MLA", "MLA"),
    ("cutedsl_mla", ""): ("MHA", "MLA", "MLA", "MLA"),
    ("trtllm_mha", ""): ("MHA", "MLA", "MLA", "MLA"),
    ("intel_amx", ""): ("MHA", "MLA", "MLA", "MLA"),
    ("hybrid_linear_attn", ""): ("MHA", "MLA", "MLA", "MLA"),
    ("dsv4", ""): ("MHA", "MLA", "MLA", "MLA"),
    ("qsa", ""): ("MHA", "MLA", "MLA", "MLA"),
    ("ascend", ""): ("MHA_NPU", "MHA_NPU", "MHA_NPU", "MLA_NPU"),
    ("ascend", "--dsa-model"): ("DSA_NPU", "DSA_NPU", "DSA_NPU", "DSA_NPU"),
}
EXTENDS = ("extend", "mixed", "split_prefill", "dllm_extend")


def output(options: str) -> list[list[str]]:
    """Columns of what `jattn explain` prints: phase, policy, method, the rest."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    cli.add_arguments(parser)
    lines = cli.run(parser.parse_args(options.split())).splitlines()
    return [[line[:16].strip(), *line[16:].split(maxsplit=2)] for line in lines]


def printed(capsys, options: str) -> list[list[str]]:
    """The same columns, as the whole command prints them."""
    assert main(["explain", "--platform", "cuda-sm90", *options.split()]) == 0
    _, forms = capsys.readouterr().out.split("forms that an MLA model would take, and the rows that decided:\n")
    return [[line[:16].strip(), *line[16:].split(maxsplit=2)] for line in forms.splitlines()]


@pytest.mark.parametrize(("name", "options"), EXPANDED)
def test_each_row_of_the_mode_table_is_printed(capsys, name, options):
    none, below, reached, other = EXPANDED[name, options]
    for prefix, want in ((0, none), (1, below), (100, below), (8191, below), (8192, reached), (9000, reached)):
        lines = printed(capsys, f"--prefill-policy {name} --decode-policy {name} --prefix {prefix} {options}")
        assert [line[0] for line in lines] == [mode.name.lower() for mode in ForwardMode]
        assert [line[1] for line in lines] == [name] * 9
        assert [line[2] for line in lines] == [want if line[0] in EXTENDS else other for line in lines]
        assert all("(" in line[3] for line in lines), "each says its row"


def test_each_phase_goes_by_its_half():
    for half, speculative in (("prefill", "fa3"), ("decode", "flashmla")):
        pair = "--prefill-policy fa3 --decode-policy flashmla"
        names = {line[0]: line[1] for line in output(f"{pair} --speculative-attention-mode {half}")}
        assert names == {
            "extend": "fa3",
            "decode": "flashmla",
            "mixed": "fa3",
            "idle": "flashmla",
            "target_verify": speculative,
            "draft_extend_v2": speculative,
            "prebuilt": "fa3",
            "split_prefill": "fa3",
            "dllm_extend": "fa3",
        }


def test_flags_platform_and_rules_reach_the_facts():
    assert output("--mode decode --decode-policy fa3 --hip --rocm-fused-decode")[0][2] == "MLA_FUSED_ROPE_ROCM"
    fused = "--mode decode --decode-policy fa3 --platform rocm-gfx942"
    assert output(f"{fused} --rocm-fused-decode")[0][2] == "MLA_FUSED_ROPE_ROCM"
    assert output(f"{fused} --rules newer")[0][2] == "MLA_ROCM"
    options = "--mode extend --prefill-policy fa3 --prefix 5 --chunked-prefix-threshold 5 --max-chunk-capacity 0"
    assert output(f"{options} --seq-lens-sum 9")[0][2] == "MHA_CHUNKED_KV"


def test_lengths_may_come_as_a_list_and_options_may_exist_already():
    parser = argparse.ArgumentParser()
    parser.add_argument("--prefix", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--mode")
    cli.add_arguments(parser, skip=("mode", "prefix"))
    args = parser.parse_args("--mode EXTEND --prefix 8000,192 --prefill-policy fa3".split())
    assert "MHA_ONE_SHOT" in cli.run(args)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--mode extent", "unknown mode 'extent': want one of extend, "),
        ("--prefill-policy fa5", "unknown policy 'fa5': want one of fa"),
        ("--platform cuda", "unknown platform 'cuda': want one of "),
        ("--speculative-attention-mode both", "attention_mode='both': want 'prefill' or 'decode'"),
        ("--rules old", "unknown rules 'old': want one of seed, newer"),
        ("--prefix -1", "sum_prefix_lens=-1 is negative"),
    ],
)
def test_bad_input_is_one_sentence(options, text):
    with pytest.raises(ValueError, match=f"^{text}"):
        output(options)


def test_dispatch_knows_nothing_of_the_drafts_above_it():
    for path in Path(jattn.dispatch.__file__).parent.glob("*.py"):
        assert "jattn.draft" not in path.read_text(), path
