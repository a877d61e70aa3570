"""Interface for schedulers: signals that stop a run, its exit status, and one command line for every start."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from crosscut.checkpoint import list_checkpoints
from crosscut.cli.train import train
from crosscut.logbook.contents import read_metrics
from tests.cli.conftest import ON_LOOPBACK, TINY, ranks_of


@pytest.mark.parametrize(
    ("typed", "resume", "arguments"),
    [
        ([], None, ()),
        (["run.toml"], None, ("run.toml",)),
        (["--resume"], "newest", ()),
        (["--resume", "training.steps=840"], "newest", ("training.steps=840",)),
        (["--resume", "run.toml", "training.steps=840"], "newest", ("run.toml", "training.steps=840")),
        (["run.toml", "--resume", "training.steps=840"], "newest", ("run.toml", "training.steps=840")),
        (["run.toml", "training.steps=840", "--resume"], "newest", ("run.toml", "training.steps=840")),
        (["--resume", "auto"], "auto", ()),
        (["run.toml", "--resume", "auto", "training.steps=840"], "auto", ("run.toml", "training.steps=840")),
        (["run.toml", "training.steps=840", "--resume=auto"], "auto", ("run.toml", "training.steps=840")),
        (["--resume", "./auto"], "newest", ("./auto",)),
    ],
)
def test_only_auto_belongs_to_resume(typed, resume, arguments):
    parsed = train.make_context("train", typed).params
    assert (parsed["resume"], parsed["arguments"]) == (resume, arguments)


def test_another_way_to_resume_is_refused():
    with pytest.raises(click.BadParameter, match="'latest' is not one of 'newest', 'auto'"):
        train.make_context("train", ["--resume=latest"])


def wait_for_steps(run: Path, count: int) -> None:
    deadline = time.monotonic() + 300
    metrics = run / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count('"loss"') >= count):
        assert time.monotonic() < deadline, "the run must begin"
        time.sleep(0.05)


def only_checkpoint(run: Path) -> int:
    (folder,) = list_checkpoints(run / "checkpoints")
    return int(folder.name.removeprefix("step-"))


ENDLESS = ("training.steps=1000000", "training.validate_every=0", "checkpoint.every=0")


# `tests/launch` asks two ranks to stop.
LAYOUTS = ["layout.tensor=1", pytest.param("layout.tensor=2", marks=pytest.mark.slow)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stopped_run_exits_75_and_the_same_command_completes_it(crosscut_here, fork, book, tmp_path, layout):
    run = tmp_path / "run"
    command = ("train", *TINY, f"data.text={book}", layout, f"output.folder={run}", "--resume", "auto")
    first = fork(*command, *ENDLESS)
    wait_for_steps(run, 3)
    second = crosscut_here(*command)
    assert (second.returncode, first.process.exitcode) == (2, None), "the first run goes on"
    assert second.stderr.startswith(
        f"crosscut: The run's folder must be used by one run at a time, but `{run}` is in use by process {first.pid} "
    )
    begin = time.monotonic()
    os.killpg(first.pid, signal.SIGTERM)  # the ranks get it directly, too
    status, _, errors = first.ended()
    assert status == 75, errors
    assert time.monotonic() - begin < 30, "at the end of a step, on a busy machine"
    step = only_checkpoint(run)
    assert errors.splitlines()[-1].startswith(
        f"crosscut: The run was asked to stop and has stopped after step {step} of 1000000. Its check"
    )
    assert "--resume auto`." in errors
    assert "Traceback" not in errors
    crosscut_here(*command, f"training.steps={step + 3}", "training.validate_every=0", status=0)
    rows = read_metrics(run)
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, step + 4))
    again = crosscut_here(*command, f"training.steps={step + 3}", "training.validate_every=0")
    assert (again.returncode, again.stderr) == (0, "")
    assert f"is complete: all {step + 3} steps are done." in again.stdout


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_complete_run_that_trains_further_has_no_result_while_it_does(crosscut_here, fork, book, tmp_path, layout):
    run = tmp_path / "run"
    command = ("train", *TINY, f"data.text={book}", layout, f"output.folder={run}", "--resume", "auto")
    crosscut_here(*command, "training.steps=3", status=0)
    assert "A run that has ended has no records" in crosscut_here("doctor", "--attach", str(run), status=2).stderr
    written = (run / "summary.json").stat()
    crosscut_here(*command, "training.steps=3", status=0)
    assert (run / "summary.json").stat() == written
    fork(*command, *ENDLESS)
    wait_for_steps(run, 9)  # the rows of validations have a loss, too
    assert not (run / "summary.json").exists()
    assert "rank 0" in crosscut_here("doctor", "--attach", str(run), status=0).stdout


@pytest.mark.parametrize(
    "number",
    # One handler takes the first two; Python's own takes the third.
    [signal.SIGTERM, *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGUSR1, signal.SIGINT))],
)
def test_request_during_preparation_ends_at_once(fork, book, tmp_path, number):
    """There is nothing to save, so nothing is said of a checkpoint."""
    corpus, run = tmp_path / "long.txt", tmp_path / "run"
    corpus.write_text(book.read_text() * 60)  # seconds of work
    command = fork("train", *TINY, f"data.text={corpus}", f"output.folder={run}")
    deadline = time.monotonic() + 60
    while not list(run.glob(".tokens*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    begin = time.monotonic()
    os.kill(command.pid, number)
    status, _, errors = command.ended()
    assert status == 128 + number, errors
    assert time.monotonic() - begin < 30, "at once, on a busy machine"
    assert "has stopped after step" not in errors
    assert not (run / "tokens").exists()


@pytest.mark.slow  # starts torchrun
def test_under_torchrun_the_agents_sigterm_leaves_a_checkpoint(book, tmp_path):
    run = tmp_path / "run"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "crosscut", "train",
        *TINY, *ENDLESS, f"data.text={book}", "layout.tensor=2", f"output.folder={run}", "--resume", "auto",
    ]  # fmt: skip
    environment = os.environ | ON_LOOPBACK | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    try:
        wait_for_steps(run, 3)
        os.killpg(process.pid, signal.SIGTERM)  # the agent passes it on: the ranks get it twice
        _, errors = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode != 0
    assert errors.count("crosscut: The run was asked to stop and has stopped after step") == 1
    assert only_checkpoint(run) >= 3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ctrl_c_leaves_a_checkpoint_and_exits_130(fork, book, tmp_path, layout):
    run = tmp_path / "run"
    command = fork("train", *TINY, *ENDLESS, f"data.text={book}", layout, f"output.folder={run}")
    wait_for_steps(run, 3)
    os.killpg(command.pid, signal.SIGINT)  # as a terminal does
    status, output, errors = command.ended()
    assert status == 130, errors
    step = only_checkpoint(run)
    assert step >= 3
    assert "Stopping after this step, with a checkpoint. Press Ctrl-C again to end at once" in output
    assert f"crosscut: The run was interrupted and has stopped after step {step} of 1000000. Its checkpoint" in errors
    assert "Resume with `" in errors
    assert "Traceback" not in errors


@pytest.mark.slow  # waits for ranks that are halted
@pytest.mark.skipif(sys.platform != "linux", reason="the ranks are found in /proc")
def test_a_second_ctrl_c_ends_a_run_at_once(fork, book, tmp_path):
    """The first one cannot take effect, since the ranks are halted and reach the end of no step."""
    run, layout = tmp_path / "run", "layout.tensor=2"
    command = fork("train", *TINY, *ENDLESS, f"data.text={book}", layout, f"output.folder={run}")
    wait_for_steps(run, 3)
    ranks = ranks_of(command.pid)
    assert len(ranks) == 2, "both ranks must be running"
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    os.killpg(command.pid, signal.SIGINT)
    time.sleep(1)
    os.killpg(command.pid, signal.SIGINT)
    status, _, errors = command.ended()
    assert status == 130, errors
    assert list_checkpoints(run / "checkpoints") == []
    assert "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.4, 0.8, 1.6, 3.2, 6.4])
def test_ctrl_c_while_a_run_starts_shows_no_traceback(tmp_path, book, seconds):
    """While the modules of the program, of the server of the ranks and of the ranks are imported."""
    command = (sys.executable, "-m", "crosscut", "train", *TINY, f"data.text={book}", "layout.tensor=2", *ENDLESS)
    with subprocess.Popen(
        (*command, f"output.folder={tmp_path / 'run'}"), stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGINT)
        errors = process.communicate(timeout=120)[1]
    assert process.returncode in {130, -signal.SIGINT}
    assert "Traceback" not in errors
