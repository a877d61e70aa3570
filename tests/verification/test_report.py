import dataclasses
import json

from crosscut.config import Layout
from crosscut.verification import CallRow, FirstDifference, LayoutReport, ReportCheck, for_verification, print_report
from crosscut.verification.report import StepPhase
from crosscut.verification.run_proof import told_layout
from tests.verification.runs import tiny_run

GOOD = LayoutReport(
    layout="tensor 2 x data 1",
    model="GPT-2, 35,584 parameters",
    precision="float64",
    tolerance=1.5e-13,
    largest_tolerance=1.5e-13,
    rows=(CallRow("tokens", 0.0, 3e-16, True), CallRow("loss", None, 1e-15, True)),
    checks=(ReportCheck("copies on all ranks", None, True, "the same to the last bit"),),
    first=None,
    seconds=3.2,
)
BAD = dataclasses.replace(
    GOOD,
    rows=(CallRow("tokens", 0.5, 3e-16, False), CallRow("loss", None, 1e-15, True)),
    first=FirstDifference("tokens", StepPhase.FORWARD, "A sum is missing."),
)


def printed(report, capsys) -> str:
    print_report(report)
    return " ".join(capsys.readouterr().out.split())


def test_the_verdict_is_told_with_each_module_and_the_first_difference(capsys):
    good, bad = printed(GOOD, capsys), printed(BAD, capsys)
    assert all(part in good for part in ("tokens", "3.0e-16", "tensor 2 x data 1 equals the uncut model"))
    assert "DIFFERS" not in good
    assert "tensor 2 x data 1 DIFFERS from the uncut model" in bad
    assert "The first difference is in the forward pass of tokens. A sum is missing." in bad
    assert bad.count("DIFFERS") == 2, "in the row of the module and in the verdict"


def test_any_failed_row_or_check_is_a_difference():
    assert GOOD.same
    assert not BAD.same
    failed = ReportCheck("collectives", None, False, "one more")
    assert not dataclasses.replace(GOOD, checks=(failed,)).same


def test_what_was_in_the_step_and_what_was_not_is_said(capsys):
    assert "step" not in printed(GOOD, capsys), "nothing is said of nothing"
    narrow = dataclasses.replace(GOOD, largest_tolerance=0.5, included=("a loss scale",), left_out=("this", "that"))
    told = printed(narrow, capsys)
    assert "tolerance 1.5e-13, up to 5.0e-01 by rounding" in told
    assert "Verified with: a loss scale. Not verified: this, that." in told
    assert narrow.to_json()["left_out"] == ("this", "that")


def test_where_both_models_may_be_wrong_alike_nothing_is_proven(capsys):
    check = ReportCheck("rounding of outputs", 0.7, False, "at most 0.1 from float32, largest at output of tokens")
    first = FirstDifference("rounding of outputs", StepPhase.STEP, "Both models agree.")
    told = printed(dataclasses.replace(GOOD, checks=(check,), first=first), capsys)
    assert "is NOT PROVEN to equal the uncut model" in told
    assert "The failed check is rounding of outputs. Both models agree." in told


def test_json_holds_the_whole_report():
    values = json.loads(json.dumps(BAD.to_json()))
    assert values["same"] is False
    first = {"module": "tokens", "direction": "forward", "cause": "A sum is missing.", "micro_batch": 1}
    assert values["first"] == first
    assert values["rows"][0] == {"module": "tokens", "forward": 0.5, "gradient": 3e-16, "same": False}


STAGED = {"pipeline": 2, "schedule": "1f1b"}
CHANGED = {
    "tensor": ({}, {"tensor": 2}),
    "data": ({}, {"data": 2}),
    "context": ({}, {"context": 2}),
    "context_attention": ({"context": 2}, {"context": 2, "context_attention": "gather"}),
    "pipeline": ({}, {"pipeline": 2}),
    "schedule": (STAGED, {**STAGED, "schedule": "zero_bubble"}),
    "stages_per_rank": (STAGED, {**STAGED, "stages_per_rank": 2}),
    "stages": (STAGED, {**STAGED, "stages": (1, 3)}),
    "sequence_parallel": ({"tensor": 2}, {"tensor": 2, "sequence_parallel": True}),
    "sharding": ({"data": 2}, {"data": 2, "sharding": "zero2"}),
    "shard_group": ({"data": 4, "sharding": "zero3"}, {"data": 4, "sharding": "zero3", "shard_group": 2}),
    "symmetric_memory": (
        {"tensor": 2, "sequence_parallel": True}, {"tensor": 2, "sequence_parallel": True, "symmetric_memory": True}
    )
}  # fmt: skip


def test_the_header_shows_every_setting_of_the_layout():
    without_effect = {"expert", "elastic"}  # one rank; the number of ranks that torchrun starts
    assert {field.name for field in dataclasses.fields(Layout)} == {*CHANGED, *without_effect}
    run = tiny_run(num_layers=4, num_heads=4)
    for name, settings in CHANGED.items():
        headers = {told_layout(for_verification(run, Layout(**each), "float64")) for each in settings}
        assert len(headers) == 2, name
