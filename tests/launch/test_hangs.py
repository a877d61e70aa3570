"""A run that makes no progress is explained by the ranks that still answer, and from outside."""

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch._C import _distributed_c10d as c10d

from crosscut.cli.runs.doctor import doctor
from crosscut.config import Layout
from crosscut.flight import RECORD, RunPhase
from crosscut.flight.reading import read_records
from crosscut.flight.report import examine
from crosscut.launch.hangs import Watch
from crosscut.parallel import make_mesh, make_reducer
from crosscut.parallel.collectives import all_reduce
from tests.model.twins import batch, build
from tests.parallel.twins import CPU

BOUND = 1.0
has_recorder = hasattr(c10d, "_dump_fr_trace_json")


def wait_for(folder: Path, name: str = "hang-*.txt") -> None:
    """Wait for a file, by default the report about a hang."""
    deadline = time.monotonic() + 30
    while not list(folder.glob(name)) and time.monotonic() < deadline:
        time.sleep(0.05)


def continue_after_report(folder: Path, pid: int, told: dict[str, Any]) -> None:
    """Wait for the report about a hang, ask the doctor, and let the stopped rank continue."""
    begin = time.monotonic()
    wait_for(folder)
    told["seconds"] = time.monotonic() - begin
    told["doctor"] = CliRunner().invoke(doctor, ["--attach", str(folder)]).output
    folder.with_name("told").touch()
    os.kill(pid, signal.SIGCONT)


@contextmanager
def continued(folder: Path, told: dict[str, Any]) -> Iterator[threading.Thread]:
    """Watch two ranks. A thread, once it is started, lets rank 1 continue after the report."""
    others = [0, 0]
    dist.all_gather_object(others, os.getpid())
    helper = threading.Thread(target=continue_after_report, args=(folder, others[1], told))
    with Watch(folder, CPU, least_bound=BOUND):
        yield helper
    if helper.ident is not None:
        helper.join()
    dist.barrier()


def train_with_a_stop(folder: Path, stopped: bool) -> dict[str, Any]:
    """Three steps on two ranks. In the last step, rank 1 is stopped before its all-reduce, or sleeps there."""
    mesh = make_mesh(Layout(tensor=2), CPU)
    told: dict[str, Any] = {"printed": []}
    printed = patch("crosscut.launch.hangs.echo", lambda text, **_: told["printed"].append(text))
    with printed, continued(folder, told) as helper:
        for step in range(3):
            RECORD.phase(RunPhase.FORWARD, step)
            if step == 2 and mesh.tensor.rank == 0:
                helper.start()
            if step == 2 and mesh.tensor.rank == 1:
                RECORD.phase(RunPhase.DATA)
                if stopped:
                    os.kill(os.getpid(), signal.SIGSTOP)
                else:
                    wait_for(folder.parent, "told")
            all_reduce(torch.ones(6), mesh.tensor)
            RECORD.progress(is_step=True)
    return {**told, "left": sorted(path.name for path in folder.glob("[!.]*"))}


# A stopped rank is also reported in the test of a sharded run.
@pytest.mark.parametrize("stopped", [pytest.param(True, marks=pytest.mark.slow), False], ids=["stopped", "reads data"])
def test_a_hang_is_explained_by_a_rank_that_waits_and_by_the_doctor(ranks, tmp_path, stopped):
    folder = tmp_path / "run"
    first, second = ranks.run(2, train_with_a_stop, folder, stopped)
    report = (folder / "hang-3.txt").read_text()
    for text in (report, first["doctor"]):
        assert "DID NOT ARRIVE: rank 1 (" in text
        assert "position   reading of a batch, step 3" in text
        assert "all-reduce of 6 elements over the axis `tensor` (forward pass, step 3), number 3 of its group" in text
        assert "WAITING: rank 0\n" in text
        assert ("is stopped (by SIGSTOP" in text) == stopped
        assert not has_recorder or ("\n    rank 1: does not answer\n" in text) == stopped
        assert "PYTHON STACK of rank 0, main thread:" in text
    assert ("PYTHON STACK of rank 1, main thread:" in report) == (not stopped)
    assert first["printed"][-1] == "The run continues: all ranks are making progress again."  # though it ends at once
    assert first["seconds"] < BOUND + 5
    assert first["left"] == second["left"] == ["hang-3.txt", "metrics.jsonl"]
    assert '"hang_rank": 1' in (folder / "metrics.jsonl").read_text()


def train_sharded_with_a_stop(folder: Path, phase: RunPhase) -> None:
    """Three steps of a model that two data ranks shard. In the last step, rank 1 is stopped inside the first layer, in
    the forward or in the backward pass.
    """
    model = build(Layout(data=2, sharding="zero3"))
    mesh, reducer = model.mesh, make_reducer(model, model.mesh)

    def stop(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def stop_here(module: object, inputs: object, output: torch.Tensor) -> None:
        if phase is RunPhase.FORWARD:
            stop()
        else:
            output.register_hook(stop)

    with patch("crosscut.launch.hangs._GRACE", 0.5), continued(folder, {}) as helper:
        for step in range(3):
            if step == 2 and mesh.data.rank == 0:
                helper.start()
            elif step == 2:
                model.blocks[0].mlp.register_forward_hook(stop_here)
            RECORD.phase(RunPhase.FORWARD, step)
            loss = model.loss(batch(step).chunk(2)[mesh.data.rank])
            RECORD.phase(RunPhase.BACKWARD)
            reducer.arm()
            loss.backward()
            reducer.finish()
            RECORD.progress(is_step=True)


@pytest.mark.parametrize(
    ("phase", "missing"),
    [
        pytest.param(  # the same hook of PyTorch, in the other pass
            RunPhase.FORWARD,
            r"all-gather of [\d,]+ elements over the axis `data` \(forward pass of layer 1",
            marks=pytest.mark.slow,
        ),
        (RunPhase.BACKWARD, r"reduce-scatter of [\d,]+ elements over the axis `data` \(backward pass of layer 0"),
    ],
    ids=["forward", "backward"],
)
def test_a_stop_of_a_sharded_run_names_the_message_of_fully_shard(ranks, tmp_path, phase, missing):
    folder = tmp_path / "run"
    ranks.run(2, train_sharded_with_a_stop, folder, phase)
    report = (folder / "hang-3.txt").read_text()
    assert "DID NOT ARRIVE: rank 1 (" in report
    assert "is stopped (by SIGSTOP" in report
    assert not has_recorder or "\n    rank 1: does not answer\n" in report
    assert re.search(rf"  missing    {missing}, step 3\), number \d+ of its group; waiting: rank 0\n", report), report


def hang_outside(folder: Path, differ: bool) -> None:
    """A hang in collectives that Crosscut does not send and therefore does not record, as in compiled code. The ranks
    call different collectives, or rank 1 comes late.
    """
    group = dist.new_group([0, 1], timeout=timedelta(seconds=5 if differ else 8), group_desc="outside")
    with Watch(folder, CPU, least_bound=BOUND):
        for step in range(2):
            RECORD.phase(RunPhase.FORWARD, step)
            dist.all_reduce(torch.ones(4), group=group)
            RECORD.progress(is_step=True)
        first = dist.get_rank() == 0
        if not differ:
            if not first:
                wait_for(folder)
            dist.all_reduce(torch.ones(2, 3), group=group)
        else:
            with pytest.raises(RuntimeError, match=r"Timed out|by peer"):  # neither rank sends what the other awaits
                dist.broadcast(torch.ones(4), 1, group=group) if first else dist.reduce(torch.ones(8), 1, group=group)
        RECORD.progress(is_step=True)


recorded = pytest.mark.skipif(not has_recorder, reason="this torch has no Flight Recorder for gloo")


@recorded
def test_a_late_rank_is_named_by_pytorchs_flight_recorder(ranks, tmp_path):
    ranks.run(2, hang_outside, tmp_path, False)
    report = (tmp_path / "hang-2.txt").read_text()
    assert "DID NOT ARRIVE: rank 1 (" in report
    assert "DID NOT ARRIVE: rank 0" not in report
    awaited = r"for collective 3 \(all_reduce, Float \[2, 3\]\) of group `\w+`\n"
    assert re.search(rf"\nWAITING: rank 0\n  rank 0 \(host .*\) {awaited}", report), report
    assert re.search(
        r"\n  group `\w+` \(description `outside`, gloo\)\n"
        r"    rank 0: completed 2 \(all_reduce, Float \[4\]\); scheduled 3 \(all_reduce, Float \[2, 3\]\)\n"
        r"    rank 1: completed 2 \(all_reduce, Float \[4\]\); has not scheduled 3\n",
        report,
    ), report
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("watch")] == []


@pytest.mark.slow  # until the collectives time out; tests/flight/test_traces.py has the report
@recorded
def test_different_collectives_are_named_by_pytorchs_flight_recorder(ranks, tmp_path):
    ranks.run(2, hang_outside, tmp_path, True)
    report = (tmp_path / "hang-2.txt").read_text()
    assert re.search(
        r"\nTHE RANKS DISAGREE: ranks 0 and 1 have started different collectives in group `\w+` "
        r"\(PyTorch's Flight Recorder\)\.\n"
        r"  rank 0: 3 \(broadcast, Float \[4\]\), scheduled\n"
        r"  rank 1: 3 \(reduce, Float \[8\]\), scheduled\n",
        report,
    ), report
    assert re.search(r"  process    runs, and waits for collective 3 \(broadcast, Float \[4\]\) of group", report)


def work_without_hang(folder: Path) -> list[str]:
    """Slow progress, and a pause of the whole process that is longer than the bound."""
    with Watch(folder, CPU, least_bound=BOUND):
        for _ in range(4):
            time.sleep(BOUND / 3)
            RECORD.progress(is_step=True)
    return [path.name for path in folder.glob("hang-*")]  # the other rank may still have its record


def test_slow_steps_are_no_hang(ranks, tmp_path):
    assert ranks.run(2, work_without_hang, tmp_path)[0] == []


def hang_in_a_checkpoint(folder: Path) -> float:
    """A hang while a rank writes a checkpoint. The rank first writes bytes again, and later ends its step."""
    with Watch(folder, CPU, least_bound=BOUND / 2) as watch:
        for _ in range(2):
            RECORD.progress(is_step=True)
        RECORD.phase(RunPhase.CHECKPOINT)
        wait_for(folder)
        (folder / "bytes").write_bytes(bytes(1 << 18))
        time.sleep(BOUND / 2)
        RECORD.progress(is_step=True)
        time.sleep(BOUND / 2)
        return watch.bound


def test_a_hang_does_not_raise_the_bound_of_the_next_one(ranks, tmp_path):
    assert ranks.run(1, hang_in_a_checkpoint, tmp_path) == [BOUND / 2]


def report_twice_and_again(folder: Path) -> list[str]:
    """Two reports of one hang, and one of a hang at the same step after progress."""
    with Watch(folder, CPU) as watch:
        hang = examine(read_records(watch.folder), {}, seconds=1.0, bound=1.0)
        watch._report(hang)
        watch._report(hang)
        watch._moved(1.0)
        watch._report(hang)
    return sorted(path.name for path in folder.glob("hang-*"))


def test_a_hang_has_one_report_though_it_is_told_again(ranks, tmp_path):
    assert len(ranks.run(1, report_twice_and_again, tmp_path)[0]) == 2


def test_the_doctor_needs_records(tmp_path):
    error = CliRunner().invoke(doctor, ["--attach", str(tmp_path)]).exception
    assert str(error) == (
        f"`--attach` must name the folder of a run that is training, but `{tmp_path}` has no records of ranks (in "
        f"`{tmp_path}/watch`). A run that has ended has no records. Check the path."
    )
