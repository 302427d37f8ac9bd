"""`jattn explain` on drafts: their phases go by their own stamps, and what the factory refuses is said."""

import pytest

from jattn.cli import main


def printed(capsys, options: str) -> list[list[str]]:
    """Columns of the forms that the command prints: phase, policy, method, the rest."""
    assert main(["explain", *options.split()]) == 0
    _, forms = capsys.readouterr().out.split("forms that an MLA model would take, and the rows that decided:\n")
    return [[line[:16].strip(), *line[16:].split(maxsplit=2)] for line in forms.splitlines()]


def test_a_drafts_phases_go_by_its_stamps(capsys):
    decode, *lines = printed(capsys, "--mode decode --draft-policy cutedsl_mla --platform cuda-sm100")
    assert decode[:3] == ["decode", "native", "MLA"]
    assert [line[:3] for line in lines] == [
        ["draft decode", "cutedsl_mla", "MLA"],
        ["draft extend", "trtllm_mla", "MLA"],
    ]
    assert lines[0][3].startswith("triton 4") and lines[1][3].startswith("trtllm_mla 4")


def test_one_step_has_no_draft_decode_and_an_alias_is_stamped_by_its_name(capsys):
    _, decode, extend = printed(capsys, "--mode decode --draft-policy nsa --num-steps 1 --platform cuda-sm90")
    assert decode == ["draft decode", "none", "num_steps=1:", "draft-extend gives the only level"]
    assert extend[:3] == ["draft extend", "dsa", "MLA"]


def test_without_a_draft_policy_there_is_no_draft_phase(capsys):
    assert [line[0] for line in printed(capsys, "--mode idle --platform cpu")] == ["idle"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--draft-policy fa5", "unknown policy 'fa5': want one of fa"),
        ("--draft-policy cutlass_mla", "EAGLE is not supported in decode attention backend cutlass_mla"),
        ("--draft-policy flashmla --topk 4", "topk=4: the flashmla draft container is a chain, so it needs topk=1"),
        ("--draft-policy fa3 --topk -1", "DraftConfig.topk=-1: want an integer of at least 0"),
    ],
)
def test_bad_input_is_one_sentence(capsys, options, text):
    assert main(["explain", "--platform", "cpu", *options.split()]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith(f"jattn: {text}") and err.count("\n") == 1
