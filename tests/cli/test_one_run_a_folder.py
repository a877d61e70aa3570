"""A run's folder belongs to one run at a time, and stays the folder of this run."""

import json
import os
import signal
import time

import pytest

from crosscut.checkpoint import find_damage, list_checkpoints
from tests.cli.conftest import TINY
from tests.cli.test_stopping import ENDLESS, start, wait_for_steps

__all__ = ["start"]


@pytest.fixture
def command(book, tmp_path):
    """A run that goes on until it is stopped."""
    return ("-m", "crosscut", "train", *TINY, *ENDLESS, f"data.text={book}", f"output.folder={tmp_path / 'run'}")


@pytest.mark.slow  # test_stopping.py has a live run that holds its folder, and tests/config/system a killed one
def test_a_live_run_holds_its_folder_and_a_killed_one_does_not(crosscut_here, start, command, tmp_path):
    run = tmp_path / "run"
    process = start(*command, "checkpoint.every=2")
    wait_for_steps(run, 5)
    second = crosscut_here(*command[2:])
    resumed = crosscut_here(*command[2:], "--resume", "auto")
    assert process.poll() is None, "the first one goes on"
    for refused in (second, resumed):
        assert refused.returncode == 2
        assert refused.stderr.startswith(
            f"crosscut: The run's folder must be used by one run at a time, but `{run}` is in use by process "
            f"{process.pid} on "
        )
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert (run / ".lock").exists()
    steps = int(list_checkpoints(run / "checkpoints")[-1].name.removeprefix("step-")) + 1
    resumed = crosscut_here(*command[2:], f"training.steps={steps}", "--resume", "auto")
    assert resumed.returncode == 0, resumed.stderr
    assert not (run / ".lock").exists()
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, steps + 1))


@pytest.mark.slow  # a whole run
@pytest.mark.parametrize("layout", ["layout.tensor=1", pytest.param("layout.tensor=2", marks=pytest.mark.slow)])
def test_a_run_whose_folder_is_moved_away_ends_and_does_not_make_it_anew(start, command, tmp_path, layout):
    run, moved = tmp_path / "run", tmp_path / "moved"
    process = start(*command, layout, "checkpoint.every=20")
    while len(list_checkpoints(run / "checkpoints")) < 2:
        time.sleep(0.05)
    run.rename(moved)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2, errors
    assert f"crosscut: `{run}` must stay the folder of this run, but was moved or removed." in errors
    assert "Traceback" not in errors
    assert not run.exists()
    assert [find_damage(folder) for folder in list_checkpoints(moved / "checkpoints")] == [[]] * 2
