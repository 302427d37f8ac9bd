"""ForwardMode against its truth table, typed out: a column a mode, a row a predicate."""

import pytest

from jattn.modes import CaptureHiddenMode, ForwardMode

COLUMNS = "EXTEND DECODE MIXED IDLE TARGET_VERIFY DRAFT_EXTEND_V2 PREBUILT SPLIT_PREFILL DLLM_EXTEND".split()

# predicate, its optional argument (None: called without) -> EX DE MX ID TV D2 PB SP DL
TRUTH = {
    ("is_extend", None): "101010011",
    ("is_extend", False): "101010011",
    ("is_extend", True): "101011011",
    ("is_prefill", None): "101010011",
    ("is_prefill", True): "101011011",
    ("is_decode", None): "010000000",
    ("is_mixed", None): "001000000",
    ("is_idle", None): "000100000",
    ("is_decode_or_idle", None): "010100000",
    ("is_target_verify", None): "000010000",
    ("is_draft_extend_v2", None): "000001000",
    ("is_extend_without_speculative", None): "101000011",
    ("is_context_parallel_extend", None): "101000000",
    ("is_context_parallel_extend", True): "101001000",
    ("is_extend_or_draft_extend_or_mixed", None): "101000010",
    ("is_extend_or_draft_extend_or_mixed", True): "101001010",
    ("is_cuda_graph", None): "010110001",
    ("is_cpu_graph", None): "010000000",
    ("is_split_prefill", None): "000000010",
    ("is_prebuilt", None): "000000100",
    ("is_dllm_extend", None): "000000001",
}


def test_members_are_numbered_from_one_in_order():
    assert [(mode.name, mode.value) for mode in ForwardMode] == list(zip(COLUMNS, range(1, 10), strict=True))


@pytest.mark.parametrize(("predicate", "argument"), TRUTH)
def test_predicate_is_its_row_of_the_table(predicate, argument):
    arguments = () if argument is None else (argument,)
    got = [getattr(ForwardMode[name], predicate)(*arguments) for name in COLUMNS]
    assert got == [bit == "1" for bit in TRUTH[predicate, argument]]
    assert all(type(value) is bool for value in got)


def test_every_predicate_is_in_the_table():
    public = {name for name in vars(ForwardMode) if name.startswith("is_")}
    assert public == {predicate for predicate, _ in TRUTH}


def test_capture_modes_are_ordered_and_the_largest_wins():
    assert [(mode.name, mode.value) for mode in CaptureHiddenMode] == [("NULL", 0), ("LAST", 1), ("FULL", 2)]
    assert max(CaptureHiddenMode) is CaptureHiddenMode.FULL
    assert [mode.need_capture() for mode in CaptureHiddenMode] == [False, True, True]
    assert [mode.is_last() for mode in CaptureHiddenMode] == [False, True, False]
    assert [mode.is_full() for mode in CaptureHiddenMode] == [False, False, True]
