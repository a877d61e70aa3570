"""A run's folder belongs to one run at a time, and stays the folder of this run."""

import json
import os
import signal
import time

import pytest

from crosscut.checkpoint import find_damage, list_checkpoints
from tests.cli.conftest import TINY
from tests.cli.test_stopping import ENDLESS, wait_for_steps


@pytest.fixture
def command(book, tmp_path):
    """A run that goes on until it is stopped."""
    return ("train", *TINY, *ENDLESS, f"data.text={book}", f"output.folder={tmp_path / 'run'}")


@pytest.mark.slow  # test_stopping.py has a live run that holds its folder, and tests/config/system a killed one
def test_a_live_run_holds_its_folder_and_a_killed_one_does_not(crosscut_here, fork, command, tmp_path):
    run = tmp_path / "run"
    first = fork(*command, "checkpoint.every=2")
    wait_for_steps(run, 5)
    second = crosscut_here(*command)
    resumed = crosscut_here(*command, "--resume", "auto")
    assert first.process.exitcode is None, "the first one goes on"
    for refused in (second, resumed):
        assert refused.returncode == 2
        assert refused.stderr.startswith(
            f"crosscut: The run's folder must be used by one run at a time, but `{run}` is in use by process "
            f"{first.pid} on "
        )
    os.killpg(first.pid, signal.SIGKILL)
    first.ended()
    assert (run / ".lock").exists()
    steps = int(list_checkpoints(run / "checkpoints")[-1].name.removeprefix("step-")) + 1
    resumed = crosscut_here(*command, f"training.steps={steps}", "--resume", "auto", status=0)
    assert not (run / ".lock").exists()
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, steps + 1))


@pytest.mark.slow  # a whole run
@pytest.mark.parametrize("layout", ["layout.tensor=1", "layout.tensor=2"])
def test_a_run_whose_folder_is_moved_away_ends_and_does_not_make_it_anew(fork, command, tmp_path, layout):
    run, moved = tmp_path / "run", tmp_path / "moved"
    first = fork(*command, layout, "checkpoint.every=20")
    while len(list_checkpoints(run / "checkpoints")) < 2:
        time.sleep(0.05)
    run.rename(moved)
    status, _, errors = first.ended()
    assert status == 2, errors
    assert f"crosscut: `{run}` must stay the folder of this run, but was moved or removed." in errors
    assert "Traceback" not in errors
    assert not run.exists()
    assert [find_damage(folder) for folder in list_checkpoints(moved / "checkpoints")] == [[]] * 2
