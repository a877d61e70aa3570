"""Starting ranks, and what a user sees when one fails."""

import atexit
import multiprocessing.process
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from crosscut.launch import launch, process_group, processes, server, stopping
from crosscut.launch.processes import keep_process_group
from crosscut.launch.stopping import Stopped, StopRequest
from crosscut.parallel import RankFailure
from tests.nursery import forked, started
from tests.parallel.twins import CPU
from tests.refusals import refusal


def work(folder: str, what: str) -> None:
    """On a rank: meet the other, then fail as told while it waits."""
    with process_group(CPU):
        rank = dist.get_rank()
        dist.all_reduce(torch.ones(1))
        if rank == 1 and what == "raise":
            raise ValueError("the cause")
        if rank == 1 and what == "be killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1 and what == "run out of memory":
            resource.setrlimit(resource.RLIMIT_AS, (1 << 30, resource.RLIM_INFINITY))
            torch.empty(1 << 36)
        if rank == 1 and what == "leave":
            os._exit(3)
        dist.all_reduce(torch.ones(1))  # in vain, where the other rank has failed
        if what == "wait":
            (Path(folder) / str(os.getpid())).touch()
            time.sleep(100)


def threads_of_first(folder: str) -> int:
    """On a rank: note its share of the cores, then take three threads on the first, two on the second; how many there
    are in a process group.
    """
    rank = int(os.environ["RANK"])
    (Path(folder) / f"rank {rank}").write_text(f"{os.environ['LOCAL_WORLD_SIZE']} {torch.get_num_threads()}")
    torch.set_num_threads(3 - rank)
    with process_group(CPU):
        return torch.get_num_threads()


@pytest.fixture
def nothing_left(
    forked_ranks: None,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[None]:
    """Nothing is printed and no file or signal handler stays, apart from the server and its folder."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    handlers = [signal.getsignal(number) for number in numbers]
    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    yield
    assert capfd.readouterr() == ("", "")
    assert list(temporary.iterdir()) == []
    assert [signal.getsignal(number) for number in numbers] == handlers


KILLED = (
    "rank 1 of 2 was ended by SIGKILL; the other ranks were stopped. The system probably ran out of memory. Try a "
    "smaller batch or model."
)
LEFT = (
    "rank 1 of 2 exited with code 3 and recorded no error; the other ranks were stopped. Look for the cause in the "
    "output above."
)


@pytest.mark.usefixtures("nothing_left")
def test_ranks_share_the_cores_compute_with_the_fewest_threads_of_any_and_end(tmp_path):
    assert launch(threads_of_first, (str(tmp_path),), num_ranks=2) == 2
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert written == dict.fromkeys(("rank 0", "rank 1"), f"2 {max(1, cores // 2)}")


@pytest.mark.usefixtures("forked_ranks")
def test_the_traceback_is_that_of_the_rank_at_fault(tmp_path):
    with pytest.raises(RankFailure) as caught:
        launch(work, (str(tmp_path), "raise"), num_ranks=2)
    lines = str(caught.value).splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-2:] == [
        "ValueError: the cause",
        "rank 1 of 2 failed (traceback above); the other ranks were stopped.",
    ]
    assert "in work" in str(caught.value)
    assert "by peer" not in str(caught.value)


@pytest.mark.usefixtures("nothing_left")
def test_a_rank_that_runs_out_of_memory_is_named_without_a_traceback(tmp_path):
    message = refusal(RankFailure, launch, work, (str(tmp_path), "run out of memory"), num_ranks=2)
    assert message.startswith("rank 1 of 2 ran out of memory in `crosscut/")
    assert "can't allocate memory" in message
    assert message.endswith(
        ". The other ranks were stopped. Try a smaller batch or model, a smaller `training.micro_batch_size`, or "
        "`training.recompute`."
    )
    assert "\n" not in message


def interrupts_kept_out(folder: str) -> None:
    """On a rank: note whether Ctrl-C is blocked or ignored here and in the server."""
    statuses = (Path(f"/proc/{process}/status").read_text() for process in (os.getpid(), os.getppid()))
    masks = ([int(mask, 16) for mask in re.findall(r"Sig(?:Blk|Ign):\s*(\w+)", status)] for status in statuses)
    kept_out = [any(mask >> (signal.SIGINT - 1) & 1 for mask in of_process) for of_process in masks]
    (Path(folder) / os.environ["RANK"]).write_text(str(kept_out))


@pytest.mark.skipif(not server.FORKS, reason="ranks are forks on Linux only")
@pytest.mark.usefixtures("nothing_left")
def test_ctrl_c_reaches_ranks_and_not_their_server(tmp_path):
    launch(interrupts_kept_out, (str(tmp_path),), num_ranks=2)
    assert (tmp_path / "1").read_text() == "[False, True]"


@pytest.mark.slow  # `tests/cli/test_train.py` kills a rank of a run
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(("what", "message"), [("be killed", KILLED), ("leave", LEFT)], ids=["be killed", "leave"])
def test_a_rank_that_dies_takes_the_run_down_and_is_named(tmp_path, what, message):
    begin = time.monotonic()
    assert refusal(RankFailure, launch, work, (str(tmp_path), what), num_ranks=2) == message
    assert time.monotonic() - begin < 60, "start included, on a busy machine"


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
def test_an_interrupt_stops_all_ranks(tmp_path):
    def interrupt() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        launch(work, (str(tmp_path), "wait"), num_ranks=2)
    for path in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.name), 0)


def work_until_asked(folder: str, how: str) -> tuple[int, int]:
    """Steps of a tenth of a second until asked to stop: this rank's number and the step after which it stopped."""
    with process_group(CPU):
        rank, stopped_after = dist.get_rank(), -1
        dist.all_reduce(torch.ones(1))
        with nullcontext() if how == "takes none" else StopRequest() as request:
            (Path(folder) / str(os.getpid())).touch()
            for step in range(300):
                time.sleep(0.1)
                dist.all_reduce(torch.ones(1))
                try:
                    if request is not None and how == "checks":
                        request.check()
                except Stopped:
                    stopped_after = step
                    break
    return rank, stopped_after


def when_both_work(folder: Path, act: Callable[[list[int]], object]) -> None:
    """Call `act` with the ranks' process ids as soon as both are there."""

    def wait() -> None:
        while len(there := list(folder.iterdir())) < 2:
            time.sleep(0.05)
        time.sleep(0.3)
        act([int(path.name) for path in there])

    threading.Thread(target=wait, daemon=True).start()


@pytest.mark.usefixtures("forked_ranks", "nothing_left")
def test_a_request_to_stop_is_passed_on_and_the_ranks_are_waited_for(tmp_path):
    """Also when it comes to the whole process group, and so to the ranks twice."""

    def ask(ranks: list[int]) -> None:
        for pid in (*ranks, os.getpid()):
            os.kill(pid, signal.SIGTERM)

    when_both_work(tmp_path, ask)
    rank, step = launch(work_until_asked, (str(tmp_path), "checks"), num_ranks=2)
    assert rank == 0, "the first rank's value is returned"
    assert 0 < step < 50


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(("number", "to_ranks"), [(signal.SIGTERM, 0), (signal.SIGUSR1, 0), (signal.SIGTERM, 2)])
def test_ranks_that_take_no_requests_are_ended(tmp_path, number, to_ranks):
    when_both_work(tmp_path, lambda ranks: [os.kill(pid, number) for pid in (*ranks[:to_ranks], os.getpid())])
    with pytest.raises(SystemExit) as caught:
        launch(work_until_asked, (str(tmp_path), "takes none"), num_ranks=2)
    assert caught.value.code == 128 + number


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
def test_a_second_sigterm_ends_the_ranks_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(stopping, "SAME_REQUEST", 0.1)

    def ask_twice(_: list[int]) -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)

    when_both_work(tmp_path, ask_twice)
    begin = time.monotonic()
    with pytest.raises(SystemExit) as caught:
        launch(work_until_asked, (str(tmp_path), "has no check"), num_ranks=2)
    assert caught.value.code == 143
    assert time.monotonic() - begin < 30
    assert not any(is_alive(int(path.name)) for path in tmp_path.iterdir())


def launch_waiting(folder: str) -> None:
    launch(work, (folder, "wait"), num_ranks=2)


def test_ranks_end_when_the_process_that_launched_them_is_killed(tmp_path):
    folder = tmp_path / "ranks"
    folder.mkdir()
    process = forked().Process(target=launch_waiting, args=(str(folder),))
    process.start()
    deadline = time.monotonic() + 60
    while len(list(folder.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.join()
    ranks = [int(path.name) for path in folder.iterdir()]
    assert len(ranks) == 2
    deadline = time.monotonic() + 30
    while any(map(is_alive, ranks)):
        assert time.monotonic() < deadline, "the ranks must not go on without the process that waits for them"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] if Path("/proc/1").exists() else ""
        os.kill(pid, 0)
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"  # ended, and nobody has asked for its status yet


def keep_and_end(told: Connection, fails: bool) -> None:
    """In a process of its own: keep a group, then do what Python does at its end, also after an uncaught error."""
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]  # no rank of a launching process
    left: list[bool] = []
    atexit.register(lambda: left.append(dist.is_initialized()))
    for _ in range(2):
        keep_process_group(CPU)
    if fails:
        sys.last_value = ValueError()
    size = dist.get_world_size()
    atexit._run_exitfuncs()
    told.send((size, left))


@pytest.mark.parametrize("fails", [False, True], ids=["well", "an error"])
def test_a_kept_group_is_taken_apart_at_the_end_unless_an_error_is(fails):
    process, ours = started(keep_and_end, fails)
    assert ours.recv() == (1, [fails])
    process.join()


def test_one_rank_runs_in_this_process():
    seen: list[tuple[int, int]] = []

    def look() -> None:
        with process_group(CPU):
            seen.append((os.getpid(), dist.get_world_size()))

    threads = torch.get_num_threads()
    try:
        launch(look, (), num_ranks=1)
    finally:
        torch.set_num_threads(threads)
    assert seen == [(os.getpid(), 1)]
    assert not dist.is_initialized()


def test_a_started_rank_knows_it_from_the_environment(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert (processes.was_started(), processes.started_world_size(), processes.is_first_started()) == (False, 1, True)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (processes.was_started(), processes.started_world_size(), processes.is_first_started()) == (True, 4, False)


def test_the_device_is_the_one_that_is_named_or_the_one_that_is_there(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    for there in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert processes.choose_device("cpu") == CPU
        assert processes.choose_device("cuda") == torch.device("cuda", 3)
        assert processes.choose_device("auto") == (torch.device("cuda", 3) if there else CPU)


def test_too_few_gpus_are_some(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for there, expected in ((0, False), (1, True), (2, False), (3, False)):
        monkeypatch.setattr("torch.cuda.device_count", lambda there=there: there)
        assert processes.has_too_few_gpus(2) == expected
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not processes.has_too_few_gpus(2), "the other rank is on another machine"


FREED = """
import torch
from contextlib import nullcontext
from crosscut.launch import process_group

def resident():
    with open("/proc/self/statm") as status:
        return int(status.read().split()[1]) * 4096

with process_group(torch.device("cpu")) if {inside} else nullcontext():
    torch.ones(3 << 20)  # 12 MiB: once it is freed, glibc would keep others of up to this size
    before = resident()
    # The small tensors have 128 KiB: too large for the holes that start-up has left in the heap.
    pairs = [(torch.ones(2 << 20), torch.ones(32 << 10)) for _ in range(20)]
    small = [pair[1] for pair in pairs]
    del pairs
    print((resident() - before) >> 20)
"""


def _mib_kept(*, inside: bool) -> int:
    code = FREED.format(inside=inside)
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


USED_AGAIN = """
import resource, torch
from crosscut.launch import process_group

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

with process_group(torch.device("cpu")):
    torch.ones(1 << 20)
    before = faults()
    for _ in range(50):
        torch.ones(1 << 20)  # 4 MiB, or 1,024 pages
    print(faults() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="is about glibc")
@pytest.mark.parametrize(("choice", "is_kept"), [({}, True), ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False)])
def test_freed_tensors_that_are_not_large_are_used_again_unless_the_user_says_otherwise(choice, is_kept):
    run = [sys.executable, "-c", USED_AGAIN]
    done = subprocess.run(run, capture_output=True, text=True, check=True, env={**os.environ, **choice})
    assert (int(done.stdout) < 10 * 1024) == is_kept  # the first few tensors' pages, or those of all 50


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="is about glibc")
def test_freed_tensors_leave_a_rank_s_process():
    assert _mib_kept(inside=False) > 100  # of 160, in holes between small tensors
    assert _mib_kept(inside=True) < 16
