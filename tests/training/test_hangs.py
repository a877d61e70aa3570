"""A run that hangs ends or starts again as `training.on_hang` says, and a request to stop is met during a hang."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from crosscut.checkpoint import list_checkpoints
from crosscut.config import RunConfig, RunStopped
from crosscut.flight.reading import read_records
from crosscut.flight.record import RecordWord
from crosscut.logbook.schema import WATCH_FOLDER
from crosscut.training import job
from crosscut.training.driving import driver
from crosscut.training.loop import Loop
from crosscut.training.resuming import can_resume_after_hang

_train = driver.train_runs

slow = pytest.mark.slow  # each of these tests starts ranks, and waits for a hang


def train_with_a_small_bound(prepared: driver.PreparedRuns, device: torch.device, **options: Any) -> object:
    Loop.hang_bound = 2.0
    return _train(prepared, device, **options)


def stop_rank_once(folder: Path, *, after: int, ask: int) -> None:
    """Stop rank 1 after a number of steps, and then send this process a request to stop."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        records = read_records(folder / WATCH_FOLDER)
        if 1 in records and records[1].words[RecordWord.STEPS] >= after and list_checkpoints(folder / "checkpoints"):
            os.kill(records[1].pid, signal.SIGSTOP)
            break
        time.sleep(0.02)
    if ask:
        time.sleep(0.5)
        os.kill(os.getpid(), ask)


def run_until_it_hangs(run: RunConfig, monkeypatch: pytest.MonkeyPatch, ask: int = 0) -> None:
    monkeypatch.setattr(driver, "train_runs", train_with_a_small_bound)
    folder = Path(run.output.folder)
    helper = threading.Thread(target=stop_rank_once, args=(folder,), kwargs={"after": 5, "ask": ask})
    helper.start()
    try:
        job.run_training(run)
    finally:
        helper.join()
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)


LAYOUT = ("layout.tensor=2", "training.steps=3000", "training.validate_every=0", "training.device=cpu")


@slow
def test_stop_ends_with_a_checkpoint_to_resume_from(run_with, monkeypatch, forked_ranks):
    run = run_with(*LAYOUT, "training.on_hang=stop", "checkpoint.every=3")
    begin = time.monotonic()
    with pytest.raises(RunStopped, match="The run hung and has ended") as stopped:
        run_until_it_hangs(run, monkeypatch)
    assert time.monotonic() - begin < 200
    folder = Path(run.output.folder)
    assert str(list_checkpoints(folder / "checkpoints")[-1]) in str(stopped.value)
    (report,) = folder.glob("hang-*.txt")
    assert "DID NOT ARRIVE: rank 1 (" in report.read_text()


@slow
def test_restart_continues_from_the_checkpoint(run_with, monkeypatch, forked_ranks):
    run = run_with(*LAYOUT, "training.on_hang=restart", "checkpoint.every=3", "training.steps=60")
    run_until_it_hangs(run, monkeypatch)
    assert len(list(Path(run.output.folder).glob("hang-*.txt"))) == 1
    assert job.is_complete(run)


@slow
def test_a_request_to_stop_during_a_hang_ends_the_run(run_with, monkeypatch, forked_ranks):
    run = run_with(*LAYOUT, "checkpoint.every=3")
    with pytest.raises(RunStopped, match="The run hung and has ended"):
        run_until_it_hangs(run, monkeypatch, ask=signal.SIGTERM)


RANK_UNDER_TORCHRUN = """
from crosscut.cli import main
from crosscut.training.loop import Loop
Loop.hang_bound = 10.0
main()
"""


@slow
@pytest.mark.skipif(sys.platform != "linux", reason="the rank is found through the memory of its record")
@pytest.mark.parametrize(("on_hang", "restarts", "status"), [("wait", 0, 0), ("stop", 0, 1), ("restart", 1, 0)])
def test_a_hang_under_torchrun(tokens_folder, tmp_path, on_hang, restarts, status):
    script, run = tmp_path / "rank.py", tmp_path / "run"
    script.write_text(RANK_UNDER_TORCHRUN)
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         f"--max-restarts={restarts}", str(script), "train", "model.preset=laptop-tiny", "data.vocab_size=500",
         f"data.tokens={tokens_folder}", *LAYOUT, "training.steps=30", "training.batch_size=4",
         "training.sequence_length=32", "checkpoint.every=3", f"training.on_hang={on_hang}", f"output.folder={run}",
         "--resume", "auto"],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    helper = threading.Thread(target=stop_rank_once, args=(run,), kwargs={"after": 5, "ask": 0})
    helper.start()
    if on_hang == "wait":
        continue_after_report(run)
    output, _ = process.communicate(timeout=300)
    helper.join()
    (report,) = run.glob("hang-*.txt")
    assert "DID NOT ARRIVE: rank 1 (" in report.read_text()
    assert process.returncode == status, output
    assert ("The run continues: all ranks are making progress again." in output) == (on_hang == "wait")
    assert ("(exitcode: 75)" in output) == (on_hang != "wait")
    assert (run / "summary.json").exists() == (status == 0)
    assert list_checkpoints(run / "checkpoints")


def continue_after_report(run: Path) -> None:
    deadline = time.monotonic() + 180
    while not list(run.glob("hang-*.txt")) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(read_records(run / WATCH_FOLDER)[1].pid, signal.SIGCONT)


def test_a_run_continues_three_times_from_one_checkpoint(tmp_path):
    assert not can_resume_after_hang(tmp_path, tmp_path / "checkpoints")
    (tmp_path / "checkpoints" / "step-00000010").mkdir(parents=True)
    for name in ("hang-9.txt", "hang-11.txt", "hang-11-2.txt", "hang-14.txt"):
        (tmp_path / name).touch()
        assert can_resume_after_hang(tmp_path, tmp_path / "checkpoints")
    (tmp_path / "hang-15.txt").touch()
    assert not can_resume_after_hang(tmp_path, tmp_path / "checkpoints")
