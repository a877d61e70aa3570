"""Runs whose number of ranks changes from start to start."""

import json
import os
import time
from pathlib import Path

import pytest

from crosscut.checkpoint import list_checkpoints
from crosscut.checkpoint.folders import remove_checkpoint
from crosscut.config import LayoutError, RunConfig, write_toml
from crosscut.config.conventions import CONFIG_FILE
from crosscut.config.system.deletion import claim
from crosscut.logbook.contents import read_metrics, read_restarts
from crosscut.logbook.objects import write_object
from crosscut.logbook.rows import append_row
from crosscut.logbook.schema import METRICS_FILE, RESTARTS_FILE, SUMMARY_FILE
from crosscut.training.elastic import Restart, for_started_ranks, is_elastic, without_a_node
from tests.refusals import refusal
from tests.training.jobs import losses_of, whole_run

FLOAT64 = "training.precision=float64"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch):
    """Function that makes this process one of the ranks that torchrun has started."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)

    def start(world_size: int) -> None:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(world_size))

    return start


def test_without_torchrun_a_run_keeps_its_layout(run_with, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    run = run_with("layout.data=4", "layout.elastic=data")
    assert not is_elastic(run)
    assert for_started_ranks(run) is run


def test_the_layout_follows_the_ranks_that_torchrun_has_started(run_with, started):
    started(2)
    assert for_started_ranks(run_with("layout.data=4", "layout.elastic=data")).layout.data == 2
    fixed = run_with("layout.data=4")
    assert for_started_ranks(fixed) is fixed


@pytest.mark.parametrize(
    ("settings", "told"),
    {
        "layout.data=4 training.batch_size=8": "After the loss of a node, 2 of 6 ranks would be idle. 3 data ranks do "
        "not divide `training.batch_size` (8). A new run could use all with 12.",
        "layout.data=4 training.batch_size=64 training.initial_batch_size=16 training.ramp_steps=2": "After the loss "
        "of a node, 2 of 6 ranks would be idle. 3 data ranks do not divide `training.initial_batch_size` (16). A new "
        "run could use all with 12 or 24.",
        "layout.data=4 training.batch_size=24": "",
        "layout.data=1 layout.pipeline=4 training.batch_size=8": "After the loss of a node, the run could not "
        "continue: `layout.tensor` x `layout.pipeline` must be at most the number of processes (6), but is 8.",
        "layout.data=4 training.batch_size=8 layout.elastic=off": "",
    }.items(),
)
def test_what_the_loss_of_a_node_would_leave_idle_is_told_before(run_with, started, monkeypatch, settings, told):
    started(8)
    for name, value in {"LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    run = run_with("layout.tensor=2", "model.num_layers=4", "layout.elastic=data", *settings.split())
    assert without_a_node(run).startswith(told)
    assert bool(without_a_node(run)) == bool(told)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    assert without_a_node(run) == ""


def test_a_store_that_outlives_its_rendezvous_is_refused(run_with, started, monkeypatch):
    started(4)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert refusal(LayoutError, for_started_ranks, run_with("layout.data=4", "layout.elastic=data")) == (
        "If `layout.elastic` is set, torchrun needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, but the variable is not "
        "1. Without it, restarted ranks find the addresses of ranks that have ended, and wait for them. Start "
        "torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1."
    )


def test_the_first_start_is_no_restart(run_with, started):
    started(2)
    assert Restart.of(run_with("layout.data=2", "layout.elastic=data"), None) is None


def test_a_start_without_a_checkpoint_repeats_all_steps(run_with, started):
    started(3)
    run = run_with("layout.data=2", "layout.elastic=data")
    folder = Path(run.output.folder)
    folder.mkdir()
    write_toml(run_with("layout.data=4"), folder / CONFIG_FILE)  # of a start on other ranks
    rows = [{"step": 1, "loss": 1.0, "tokens_per_second": 64.0}, {"step": 2, "loss": 1.0, "tokens_per_second": 32.0}]
    (folder / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    ago = time.time() - 10
    os.utime(folder / METRICS_FILE, (ago, ago))
    restart = Restart.of(run, None)
    assert restart is not None
    assert str(restart) == (
        "The run continues on the layout tensor 1 x data 2, from its first step. Steps to repeat: 2. Idle ranks: 1."
    )
    restart.record(folder)
    (row,) = read_restarts(folder)
    assert row.pop("seconds_lost") == pytest.approx(10 + 2 + 4, abs=1)  # 4 x 32 tokens at 64 and 32 tokens per second
    assert row == {
        "step": 0, "before": "", "after": "tensor 1 x data 2", "restored_from": "", "ranks": 3, "idle_ranks": 1,
        "steps_lost": 2, "seconds_of_steps_lost": pytest.approx(6),
    }  # fmt: skip


@pytest.mark.parametrize("earlier", ["another run", "no settings", "a complete run"])
def test_a_new_run_in_the_folder_of_an_earlier_one_is_no_restart(run_with, started, earlier):
    started(2)
    run = run_with("layout.data=2", "layout.elastic=data")
    leave_start(run, run_with("training.seed=7") if earlier == "another run" else run)
    folder = Path(run.output.folder)
    if earlier == "no settings":
        (folder / CONFIG_FILE).unlink()
    elif earlier == "a complete run":
        write_object(folder / SUMMARY_FILE, {"steps": 1})
    assert Restart.of(run, None) is None


@pytest.mark.parametrize("is_same_run", [True, False])
def test_a_start_without_a_checkpoint_keeps_the_record_of_its_own_run_only(ranks, run_with, is_same_run):
    run = run_with("layout.data=2", "layout.elastic=data", "training.steps=3", "training.validate_every=0")
    folder = Path(run.output.folder)
    leave_start(run, run if is_same_run else run_with("training.seed=7"))
    append_row(folder / RESTARTS_FILE, {"step": 0, "after": "tensor 1 x data 9"})
    for name in ("hang-5.txt", "loss.png", "samples.jsonl"):
        (folder / name).write_text("")
    ranks.run(2, whole_run, run)
    layouts = [row["after"] for row in read_restarts(folder)]
    assert layouts == (["tensor 1 x data 9", "tensor 1 x data 2"] if is_same_run else [])
    assert (folder / "hang-5.txt").exists() == is_same_run
    assert not (folder / "samples.jsonl").exists()
    assert (folder / "loss.png").stat().st_size > 0
    assert [row["step"] for row in read_metrics(folder) if "loss" in row] == [1, 2, 3]


def leave_start(run: RunConfig, earlier: RunConfig) -> None:
    """Leave what a killed start of the run `earlier` leaves in the folder of `run`, two steps without a checkpoint."""
    folder = Path(run.output.folder)
    folder.mkdir()
    claim(folder)
    write_toml(earlier, folder / CONFIG_FILE)
    for step in (1, 2):
        append_row(folder / METRICS_FILE, {"step": step, "loss": 1.0, "tokens_per_second": 64.0})


def test_a_run_that_loses_ranks_and_gets_them_back_has_the_losses_of_an_undisturbed_run(ranks, run_with, tmp_path):
    def run(folder: str, *overrides: str):
        settings = (FLOAT64, "model.dropout=0.0", "layout.data=2", "training.validate_every=0")
        return run_with(*settings, f"output.folder={tmp_path / folder}", *overrides)

    whole, elastic = run("whole"), run("elastic", "layout.elastic=data", "checkpoint.every=2", "checkpoint.keep=9")
    undisturbed = ranks.run(2, losses_of, whole, 6)[0]
    ranks.run(2, whole_run, elastic)
    folder = Path(elastic.output.folder)
    assert not (folder / RESTARTS_FILE).exists()
    (folder / "summary.json").unlink()
    for checkpoint in list_checkpoints(elastic.checkpoints_folder)[1:]:  # as if killed after step 3
        assert remove_checkpoint(checkpoint) == ""
    ranks.run(1, whole_run, elastic)
    (folder / "summary.json").unlink()
    assert remove_checkpoint(list_checkpoints(elastic.checkpoints_folder)[-1]) == ""
    ranks.run(2, whole_run, elastic)
    lost, back = read_restarts(folder)
    names = ("step", "before", "after", "steps_lost")
    assert [lost[name] for name in names] == [2, "tensor 1 x data 2", "tensor 1 x data 1", 4]
    assert [back[name] for name in names] == [4, "tensor 1 x data 1", "tensor 1 x data 2", 2]
    assert lost["restored_from"] == back["restored_from"] == "disk"
    curve = [(row["step"], row["loss"]) for row in read_metrics(folder) if "loss" in row]
    assert [step for step, _ in curve] == list(range(1, 7))
    assert [loss for _, loss in curve] == pytest.approx(undisturbed, rel=1e-10, abs=0)
