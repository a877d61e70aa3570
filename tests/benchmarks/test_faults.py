"""The benchmark of faults: its library causes the right faults, its table tells failures, and real trials pass."""

import errno
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import faults
from benchmarks.faulting.inside import Place
from benchmarks.faulting.nodes import NODES
from benchmarks.faulting.registry import FAULTS
from benchmarks.faulting.shim import Shim
from benchmarks.faulting.trial import Fault, Row, message_of
from benchmarks.recovery.runs import LAYOUTS
from tests.benchmarks.conftest import BENCHMARKS, run_program, run_python, write_files


@pytest.fixture(scope="module")
def shim(tmp_path_factory) -> Shim:
    return Shim(tmp_path_factory.mktemp("shim"))


def python(shim: Shim, program: str, *arguments: object) -> str:
    """Output of a program in a process with the library."""
    return run_python(program, *arguments, **shim.environment)


WRITES = """
import sys
for path in sys.argv[1:]:
    with open(path, "wb", buffering=0) as file:
        try:
            left = bytes(100)
            while left:
                left = left[file.write(left) :]
        except OSError as error:
            print(error.errno)
"""


@pytest.mark.parametrize("room", [0, 1, 99, 150])
def test_disk_is_full_at_the_exact_byte(shim, tmp_path, room):
    files = [tmp_path / "full-1", tmp_path / "full-2", tmp_path / "other"]
    shim.set(pattern="/full", room=room)
    told = python(shim, WRITES, *files)
    assert [file.stat().st_size for file in files] == [min(room, 100), max(0, room - 100), 100]
    assert told.split() == [str(errno.ENOSPC)] * (2 - room // 100)
    shim.set()
    assert python(shim, WRITES, *files) == ""


def test_disk_fails_and_is_slow(shim, tmp_path):
    shim.set(pattern="/failing", room=0, error=errno.EIO)
    assert python(shim, WRITES, tmp_path / "failing") == f"{errno.EIO}\n"
    shim.set(pattern="/slow", delay=0.5)
    began = time.monotonic()
    assert python(shim, WRITES, tmp_path / "slow") == ""
    assert time.monotonic() - began > 0.5
    shim.set()


def test_only_the_real_time_clock_jumps(shim):
    program = "import time; print(time.time(), time.monotonic())"
    shim.set(clock=-86_400)
    wall, monotonic = map(float, python(shim, program).split())
    shim.set()
    assert -86_460 < wall - time.time() < -86_340
    assert abs(monotonic - time.monotonic()) < 60


def test_registry_has_forty_kinds_on_all_layouts():
    assert len(FAULTS) >= 40
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    of_layouts = Counter(fault.layout for fault in FAULTS if fault.layout != NODES)
    assert min(of_layouts.values()) >= 10
    assert {*of_layouts} == {*LAYOUTS}


def empty_page(folder: Path) -> Path:
    return write_files(folder, {"page.md": "<!-- faults: begin -->\n<!-- faults: end -->\n"}) / "page.md"


def a_fault(**more: object) -> Fault:
    return Fault(name="a fault", layout="data 2", named=("rank 1",), place=Place("a:b"), **more)


def test_table_tells_what_failed(tmp_path, capsys):
    fault = a_fault()
    good = Row(fault, seconds=1.25, right=True, lost=3, same=True, status=1, message="rank 1 failed | here")
    hung = Row(fault, right=False, problems=["the run must end, but hangs"])
    left_out = Row(fault, skipped="no root")
    assert faults.cells(good) == ["a fault", "data 2", "1.2 s", "yes", "3", "yes", "1"]
    assert faults.cells(hung)[2:] == ["not named", "NO", "-", "-", "hangs"]
    assert faults.cells(left_out)[2] == "not run: no root"
    assert faults.report([good, left_out], 0)
    assert not faults.report([good, hung], 0)
    assert "FAILED a fault\n  the run must end, but hangs" in capsys.readouterr().out
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- faults: begin -->\nstale\n<!-- faults: end -->\nafter\n")
    faults.write_page([good], 7, page)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "stale" not in text
    assert "| a fault | data 2 | 1.2 s | yes | 3 | yes | 1 |" in text
    assert "| a fault | rank 1 failed \\| here | the earlier checkpoints |" in text
    assert "seed 7; date " in text


def test_table_tells_what_a_row_compares_if_it_is_not_the_undisturbed_run():
    fault = a_fault(compared="losses to 1e-10")
    assert faults.cells(Row(fault, right=True, lost=2, same=True, status=0))[5] == "yes (losses to 1e-10)"
    assert faults.cells(Row(fault, right=True, lost=2, same=False, status=0))[5] == "NO (losses to 1e-10)"
    assert faults.cells(Row(fault, problems=["hangs"]))[5] == "-"


def test_page_names_the_faults_without_a_row_and_the_rows_without_a_message(tmp_path):
    page = empty_page(tmp_path)
    first, second, *others = FAULTS
    faults.write_page([Row(first, status=0, lost=0, right=True), Row(second, skipped="no root")], 0, page)
    text = page.read_text()
    assert f"\n1 of {len(FAULTS)} faults; seed 0; " in text
    assert f"\nNot measured: {'; '.join(fault.name for fault in (second, *others))}.\n" in text
    assert f"| {first.name} | not recorded | {first.survives} |" in text
    assert f"| {second.name} | not run | {second.survives} |" in text


def test_rows_of_other_faults_stay_on_the_page_in_the_order_of_the_registry(tmp_path):
    page = empty_page(tmp_path)
    first, second, third = FAULTS[:3]
    older = [Row(fault, status=1, lost=2, right=True, message=f"older | {fault.name}") for fault in (first, third)]
    faults.write_page([*older, Row(second, skipped="no root")], 0, page)
    newer = [Row(fault, status=1, lost=4, right=True, message=f"newer {fault.name}") for fault in (second, third)]
    faults.write_page(newer, 5, page)
    lines = [line for line in page.read_text().splitlines() if line.startswith(tuple(f"| {f.name} |" for f in FAULTS))]
    lost = [line.split(" | ")[4] for line in lines[:3]]
    assert lost == ["2", "4", "4"]
    told = [
        line.split(" | ", 1)[1].partition(f" {fault.name} |")[0] for line, fault in zip(lines[3:], FAULTS, strict=False)
    ]
    assert told == ["older \\|", "newer", "newer"]
    assert f"\n3 of {len(FAULTS)} faults; the latest 2 with seed 5; " in page.read_text()


def test_fault_that_removes_the_checkpoints_loses_all_steps():
    fault = next(fault for fault in FAULTS if fault.name == "the folder of the run is removed")
    assert faults.cells(Row(fault, lost=0, status=2))[4] == "all"


def test_rows_of_an_earlier_version_are_read():
    row = Row(a_fault(), lost=3, status=1)
    assert Row.from_json(row.fault, {**row.to_json(), "section": 4}) == row


def test_rows_outlive_an_interrupted_call(tmp_path):
    first, second = FAULTS[:2]
    path = tmp_path / "results.json"
    results = faults.Results(path, 3)
    good, failed = Row(first, right=True, lost=2, same=True, status=1), Row(second, problems=["hangs"])
    results.add(good)
    results.add(failed)
    again = faults.Results(path, 3)
    assert again.rows == {first.name: good, second.name: failed}
    assert again.is_done(first)
    assert not again.is_done(second), "a failed fault runs again"
    assert faults.Results(path, 4).rows == {}, "other random bytes"


def test_message_is_the_last_of_crosscut():
    told = "Training\ncrosscut: A checkpoint could not be written.\ncrosscut: `x` must be y,\nbut is z.\n"
    assert message_of(told) == "crosscut: `x` must be y, but is z."
    assert message_of("Training\n") == ""


def test_unknown_pattern_is_told(capsys):
    with pytest.raises(SystemExit):
        faults.main(["--only", "no such fault"])
    assert "`--only` must match the name of a fault" in capsys.readouterr().err


@pytest.mark.slow  # real runs: half a minute
def test_trials_of_real_runs_pass(tmp_path):
    figures = tmp_path / "figures.json"
    only = ["--only", "rank 1 in a forward pass", "a random byte of a checkpoint's manifest", "jumps back by a day",
            "data rank, with on_spike=skip"]  # fmt: skip
    run_program("faults.py", *only, "--results", figures)
    rows = {row["name"]: row for row in json.loads(figures.read_text())["faults"]}
    killed = rows["SIGKILL of rank 1 in a forward pass"]
    assert killed["right"] and killed["same"] and killed["status"] == 1
    assert 0 <= killed["lost"] <= 4
    returned = rows["NaN in a summed gradient of one data rank, with on_spike=skip"]
    assert returned["message"].startswith("Spike at step 56: loss ")
    assert (returned["lost"], returned["same"], returned["status"]) == (6, True, 0)


@pytest.mark.slow  # real runs: half a minute
def test_wrong_name_fails_the_trial(tmp_path):
    program = (
        "import sys; from dataclasses import replace; from benchmarks import faults\n"
        "fault = next(f for f in faults.FAULTS if f.name == 'SIGKILL of rank 1 in a forward pass')\n"
        "faults.FAULTS[:] = [replace(fault, named=('rank 0 of 2',))]\n"
        "faults.main([])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=BENCHMARKS.parent, capture_output=True, text=True, timeout=280,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "the output must name ['rank 0 of 2'], but does not" in done.stdout
