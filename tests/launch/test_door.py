"""The door to the ranks: what is checked, what is prepared once, and what every rank gets."""

import os
import pickle
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from crosscut.config import ConfigError, Layout, LayoutError
from crosscut.launch import Done, Ranks, in_ranks
from crosscut.launch.door import _note_crowd, stay_in_ranks
from tests.parallel.twins import CPU
from tests.refusals import refusal

MESSAGE = "`training.steps` must be at least 1, but is 0."


def look(more: str, prepared: str, device: torch.device) -> tuple[str, int, int, torch.device]:
    """The prepared value, this rank and the number of ranks, and the device."""
    return prepared + more, dist.get_rank(), dist.get_world_size(), device


def refuse() -> str:
    raise ConfigError(MESSAGE)


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*_arguments: object, **_options: object) -> None:
        raise AssertionError("a process was about to start")

    monkeypatch.setattr("crosscut.launch.door.launch", launch)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("alone")
def test_one_rank_works_in_this_process_inside_a_group_of_its_own():
    threads, calls = torch.get_num_threads(), []

    def prepare() -> str:
        calls.append("prepare")
        return "prepared"

    try:
        ranks = Ranks(device="cpu")
        seen = in_ranks(ranks, lambda *given: (*look("", *given), os.getpid()), prepare=prepare)
    finally:
        torch.set_num_threads(threads)
    assert seen == ("prepared", 0, 1, CPU, os.getpid())
    assert calls == ["prepare"]
    assert not dist.is_initialized()


@pytest.mark.usefixtures("alone")
def test_started_ranks_get_what_this_process_prepares_and_the_first_one_s_result_comes_back():
    pid = os.getpid()
    two = Ranks(layout=Layout(tensor=2), device="cpu")
    seen = in_ranks(two, partial(look, " of them"), prepare=lambda: f"prepared by {os.getpid()}")
    assert seen == (f"prepared by {pid} of them", 0, 2, CPU)


@pytest.mark.usefixtures("alone", "no_launch")
def test_no_rank_starts_where_preparing_fails_or_nothing_is_left_to_do():
    two = Ranks(layout=Layout(tensor=2), device="cpu")
    assert refusal(ConfigError, in_ranks, two, partial(look, ""), prepare=refuse) == MESSAGE
    assert in_ranks(two, partial(look, ""), prepare=lambda: Done(("done", 0, 0, CPU))) == ("done", 0, 0, CPU)


@pytest.mark.usefixtures("alone", "no_launch")
@pytest.mark.parametrize("sizes", [{"data": 100_000}, {"tensor": 4096, "data": 4096}, {"data": 2, "tensor": 33}])
def test_more_ranks_than_this_machine_can_hold_are_refused(monkeypatch, sizes):
    monkeypatch.setattr("crosscut.config.system.machine.available_cores", lambda: 2)
    monkeypatch.setattr("crosscut.config.system.machine.available_memory", lambda: 16 * 10**9)
    with pytest.raises(LayoutError) as error:
        Ranks(layout=Layout(**sizes), device="cpu")
    number = sizes["data"] * sizes.get("tensor", 1)
    assert str(error.value) == (
        f"`layout.tensor` x `layout.data` must be at most 64 on this machine, but is {number:,}. The machine "
        f"has too few cores (2) or too little memory (16 GB) for {number:,} processes. Choose a smaller layout, or use "
        "several machines with torchrun."
    )
    assert Ranks(layout=Layout(data=64), device="cpu")


def test_ranks_that_torchrun_has_started_are_as_many_as_they_are(monkeypatch):
    monkeypatch.setattr("crosscut.config.system.machine.available_cores", lambda: 1)
    for name, value in {"RANK": "0", "WORLD_SIZE": "512", "LOCAL_WORLD_SIZE": "64"}.items():
        monkeypatch.setenv(name, value)
    assert Ranks(layout=Layout(data=512), device="cpu").are_there


@pytest.mark.parametrize(("number", "device", "is_told"), [(8, "cpu", False), (9, "cpu", True), (9, "cuda", False)])
def test_many_ranks_on_few_cores_are_told_with_numbers(monkeypatch, capsys, number, device, is_told):
    monkeypatch.setattr("crosscut.launch.door.available_cores", lambda: 2)
    monkeypatch.setattr("crosscut.launch.door.require_devices", lambda *_: None)
    _note_crowd(Ranks(layout=Layout(data=number), device=device))
    told = capsys.readouterr().err
    begin = "9 ranks share 2 cores of this machine, so a step takes at least 4 times as long as with a core for each "
    assert told.startswith(begin) if is_told else told == ""


def joined(what: str, folder: Path) -> object:
    """On a rank that others have started: the result of `in_ranks`, or the text of its error."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def prepare() -> str | Done[str]:
        (folder / f"prepared on {rank}").touch()
        kind = what.removesuffix(" in json")
        return {"value": lambda: "value", "nothing left": lambda: Done("done"), "mistake": refuse}[kind]()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(rank))
        patch.setenv("WORLD_SIZE", str(size))
        patch.setattr("crosscut.launch.door.process_group", lambda *_: nullcontext())  # the pool's is there
        ranks = Ranks(layout=Layout(data=size), device="cpu")
        if is_plain := what.endswith("in json"):
            patch.setattr(pickle, "loads", lambda *_: pytest.fail("a message is pickled"))
            patch.setattr("torch.distributed.distributed_c10d._unpickler", lambda *_: pytest.fail("it is pickled"))
        try:
            if what == "kept in json":
                return stay_in_ranks(ranks, prepare=lambda: f"value of {rank}")
            return in_ranks(ranks, lambda prepared, _: f"{prepared} on {rank}", prepare=prepare, is_plain=is_plain)
        except ConfigError as error:
            return f"error, {'told elsewhere' if error.is_told else 'to tell'}: {error}"


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("value", ["value on 0", "value on 1"]),
        ("value in json", ["value on 0", "value on 1"]),
        ("nothing left", ["done"] * 2),
        ("mistake", [f"error, to tell: {MESSAGE}", f"error, told elsewhere: {MESSAGE}"]),
        ("mistake in json", [f"error, to tell: {MESSAGE}", f"error, told elsewhere: {MESSAGE}"]),
    ],
)
def test_joined_ranks_share_what_the_first_one_prepares(ranks, tmp_path, what, told):
    assert ranks.run(2, joined, what, tmp_path) == told
    assert [path.name for path in tmp_path.iterdir()] == ["prepared on 0"]


def test_ranks_that_are_kept_share_what_the_first_one_prepares(ranks, tmp_path):
    assert ranks.run(2, joined, "kept in json", tmp_path) == [("value of 0", CPU)] * 2


def test_ranks_must_be_as_many_as_were_started(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert Ranks(layout=Layout(data=3), device="cpu").are_there
    assert refusal(LayoutError, Ranks, layout=Layout(tensor=2), device="cpu") == (
        "`layout.tensor` x `layout.data` must be the number of processes (3), but is 2 x 1 = 2. Change the number of "
        "processes to 2, or change the layout."
    )
    assert not Ranks(layout=Layout(tensor=2), device="cpu", joins=False).are_there


@pytest.mark.usefixtures("alone")
def test_ranks_must_have_devices(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="This machine has no GPU, so the device must be cpu, but is cuda"):
        Ranks(device="cuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    Ranks(layout=Layout(tensor=4), device="cpu")
    with pytest.raises(LayoutError, match="must be at most 2, this machine's number of GPUs, but is 4"):
        Ranks(layout=Layout(tensor=4))
    with pytest.raises(LayoutError, match=r"^`layout.tensor` x `layout.context` x `layout.data` must be at most 2, "):
        Ranks(layout=Layout(context=2, data=2))
    with pytest.raises(LayoutError, match=r"^`layout.tensor` x `layout.data` x `layout.pipeline` must be at most 2, "):
        Ranks(layout=Layout(pipeline=4))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    Ranks(layout=Layout(tensor=4))  # the other two are on another machine
    with pytest.raises(LayoutError, match="must be at most 2, this machine's number of GPUs, but is 4"):
        Ranks(layout=Layout(tensor=4), joins=False)


@pytest.mark.slow
def test_under_torchrun_a_mistake_that_the_first_rank_finds_is_told_once(tmp_path):
    place = tmp_path / "nowhere"
    place.mkdir()
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "crosscut", "generate"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    done = subprocess.run(
        [sys.executable, *command, str(place), "--tensor", "2", "--device", "cpu", "--prompt", ""],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert done.stderr.count("crosscut: ") == 1, done.stderr
    assert f"crosscut: `{place}` must be a run's folder, a checkpoint or a Hugging Face folder" in done.stderr
