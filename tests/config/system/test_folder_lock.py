"""One run at a time in a folder, whether the other run is alive, halted, killed, or on another machine."""

import json
import multiprocessing
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from crosscut.config import ConfigError, TrainingError
from crosscut.config.system import folder_lock
from crosscut.config.system.folder_lock import LOCK_FILE, FolderLock, Holder, require_unused
from tests.disks import small_disk
from tests.nursery import forked
from tests.refusals import refusal


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A lock is renewed twenty times a second, and abandoned after 0.6 s."""
    monkeypatch.setattr(folder_lock, "BEAT", 0.05)
    monkeypatch.setattr(folder_lock, "STALE", 0.6)
    monkeypatch.setattr(folder_lock, "_SETTLE", 0.05)
    monkeypatch.setattr(folder_lock, "_ENDING", 0.05)
    yield


def take(folder: Path) -> list[str]:
    """Take the lock and give it back. Returns what a user is told meanwhile."""
    told: list[str] = []
    with FolderLock(folder).held(told.append):
        pass
    return told


def elsewhere(folder: Path, machine: str = "another machine") -> Path:
    """The lock of a run on another machine."""
    folder.mkdir(exist_ok=True)
    holder = replace(Holder.here("theirs"), host="node7", machine=machine)
    (folder / LOCK_FILE).write_text(json.dumps(asdict(holder)))
    return folder / LOCK_FILE


def hold_until_told(folder: Path, connection: Connection) -> None:
    with FolderLock(folder).held(print):
        connection.send("held")
        connection.recv()


def test_a_lock_is_gone_when_its_run_ends_and_so_is_an_empty_folder(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / "run", tmp_path / "elsewhere" / "checkpoints")
    with lock.held(print):
        assert all((folder / LOCK_FILE).is_file() for folder in lock.folders)
        (tmp_path / "run" / "kept").touch()
        lock.require_held()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["kept"]
    assert not (tmp_path / "elsewhere" / "checkpoints").exists()


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    with FolderLock(tmp_path).held(print):
        with pytest.raises(ConfigError) as caught:
            take(tmp_path)
        assert (tmp_path / LOCK_FILE).exists(), "a refused run leaves the lock alone"
    host = os.uname().nodename
    assert str(caught.value).startswith(
        f"The run's folder must be used by one run at a time, but `{tmp_path}` is in use by process {os.getpid()} on "
        f"{host} (since 20"
    )
    assert take(tmp_path) == []


def test_the_second_of_two_folders_frees_the_first_if_it_is_in_use(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    in_use = pytest.raises(ConfigError, match="is in use by process")
    with FolderLock(second).held(print), in_use, FolderLock(first, second).held(print):
        pass
    assert not first.exists()


@pytest.mark.parametrize("end", ["end", "kill", "halt"])
def test_a_killed_run_frees_its_folder_at_once_but_a_halted_one_keeps_it(tmp_path: Path, end: str) -> None:
    ours, theirs = multiprocessing.Pipe()
    process = forked().Process(target=hold_until_told, args=(tmp_path, theirs))
    process.start()
    assert process.pid is not None
    assert ours.recv() == "held"
    if end == "end":
        ours.send("")
        process.join()
    elif end == "kill":
        process.kill()  # not waited for: it stays in the system's table
    else:
        os.kill(process.pid, 19)
        time.sleep(0.9)  # long enough for a run on another machine
        with pytest.raises(ConfigError, match=f"is in use by process {process.pid}"):
            take(tmp_path)
        with pytest.raises(ConfigError, match=f"must not be in use, but .* process {process.pid}"):
            require_unused(tmp_path)
        process.kill()
    begin = time.monotonic()
    deadline = begin + 10
    while end != "end" and process.exitcode is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert take(tmp_path) == []
    assert time.monotonic() - begin < 5
    require_unused(tmp_path)


def test_the_lock_of_a_live_run_on_another_machine_holds(tmp_path: Path) -> None:
    path = elsewhere(tmp_path)
    os.utime(path, (time.time() - 0.2, time.time() - 0.2))
    told: list[str] = []
    threading.Timer(0.1, os.utime, [path]).start()
    with pytest.raises(ConfigError, match=r"is in use by process \d+ on node7"), FolderLock(tmp_path).held(told.append):
        pass
    assert len(told) == 1
    assert "whether that run is still alive" in told[0]


def test_the_lock_of_a_dead_run_on_another_machine_is_waited_for_and_taken_over(tmp_path: Path) -> None:
    elsewhere(tmp_path)
    begin = time.monotonic()
    assert len(take(tmp_path)) == 1
    assert 0.5 < time.monotonic() - begin < 5


HOLDER = {"token": "t", "host": "h", "machine": "m", "processes": {"1": "1"}, "since": "s"}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        json.dumps(HOLDER | {"processes": 5}),
        json.dumps(HOLDER | {"processes": {"x": "1"}}),
        json.dumps(HOLDER | {"processes": {"9" * 5000: "1"}}),
        json.dumps(HOLDER | {"processes": {"1": 7}}),
        json.dumps(HOLDER | {"machine": ["m"]}),
    ],
    ids=[
        "empty", "cut", "a number of processes", "a word for a process", "a long number",
        "a number for a time", "a list for a machine",
    ],
)  # fmt: skip
def test_an_unreadable_lock_counts_by_its_age(tmp_path: Path, content: str) -> None:
    (tmp_path / LOCK_FILE).write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match="must not be in use"):
        require_unused(tmp_path)
    os.utime(tmp_path / LOCK_FILE, (1, 1))
    require_unused(tmp_path)
    assert take(tmp_path) == []


@pytest.mark.parametrize("content", ["[1]", '{"token": 1}', "[" * 100_000, "\xff", "poetry 1.8"])
def test_a_file_that_is_no_lock_is_never_replaced(tmp_path: Path, content: str) -> None:
    path = tmp_path / LOCK_FILE
    path.write_text(content, encoding="latin-1")
    os.utime(path, (1, 1))
    for look in (take, require_unused):
        with pytest.raises(ConfigError, match="must be the lock of a run, but Crosscut did not write this file"):
            look(tmp_path)
    assert path.read_text(encoding="latin-1") == content


def socket_at(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("nowhere"), lambda path: path.symlink_to(path), socket_at],
    ids=["FIFO", "folder", "dangling link", "circular link", "socket"],
)
def test_a_lock_that_is_not_a_file_is_told(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / LOCK_FILE)
    for look in (take, require_unused):
        assert refusal(ConfigError, look, tmp_path) == (
            f"The lock of a run's folder must be a regular file, but `{tmp_path / LOCK_FILE}` is not. If no run "
            "uses the folder, remove this path. Otherwise, choose another folder."
        )


def test_a_lock_whose_time_is_in_the_future_does_not_hold_for_ever(tmp_path: Path) -> None:
    path = elsewhere(tmp_path)
    os.utime(path, (time.time() + 1e9, time.time() + 1e9))
    require_unused(tmp_path)
    assert take(tmp_path) == []


def test_a_full_disk_leaves_no_lock(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 64) as disk:
        with suppress(OSError), (disk / "full").open("wb", buffering=0) as file:
            while file.write(b"0" * 4096):
                pass
        with pytest.raises(ConfigError, match=r"must be writable, but .* No space left on device"):
            take(disk)
        assert [path.name for path in disk.iterdir()] == ["full"]


def test_the_clocks_of_machines_may_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The age of a lock is measured with a second file, not with this machine's clock."""
    path = elsewhere(tmp_path)
    os.utime(path, (time.time() - 2, time.time() - 2))
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert take(tmp_path) == []


def taken_by(folder: Path, start: threading.Barrier, taken: list[bool]) -> None:
    lock = FolderLock(folder)
    start.wait()
    try:
        with lock.held(lambda text: None):
            lock.require_held()
            taken.append(True)
            time.sleep(0.3)
            lock.require_held()
    except ConfigError:
        taken.append(False)


@pytest.mark.parametrize("is_abandoned", [False, True])
def test_one_of_many_that_come_at_once_gets_the_folder(tmp_path: Path, is_abandoned: bool) -> None:
    if is_abandoned:
        os.utime(elsewhere(tmp_path), (1, 1))
    start, taken = threading.Barrier(8), []
    threads = [threading.Thread(target=taken_by, args=(tmp_path, start, taken)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == [False] * 7 + [True]


def test_a_rank_keeps_the_lock_alive_for_a_halted_launcher(tmp_path: Path) -> None:
    with FolderLock(tmp_path).held(print):
        lock = FolderLock(tmp_path)
        holder = json.loads((tmp_path / LOCK_FILE).read_text())
        lock.token = holder["token"]
        (tmp_path / LOCK_FILE).write_text(json.dumps(holder | {"processes": {"999999999": "1"}}))
        in_use = pytest.raises(ConfigError, match="is in use by process")
        with pickle.loads(pickle.dumps(lock)).renewed(), in_use:
            take(tmp_path)


@pytest.mark.parametrize("how", ["moved", "removed", "taken"])
def test_a_run_whose_folder_is_gone_or_taken_over_is_told(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "run"
    with pytest.raises(TrainingError) as caught, FolderLock(folder).held(print):
        lock = FolderLock(folder)
        lock.token = json.loads((folder / LOCK_FILE).read_text())["token"]
        with lock.renewed():
            lock.require_held()
            if how == "moved":
                folder.rename(tmp_path / "moved")
            elif how == "removed":
                (folder / LOCK_FILE).unlink()
            else:
                elsewhere(folder)
            deadline = time.monotonic() + 5
            while not lock.is_lost and time.monotonic() < deadline:
                time.sleep(0.01)
            assert lock.is_lost, "a renewal must see it"
            lock.require_held()
    told = "is now used by process" if how == "taken" else "was moved or removed"
    assert f"`{folder}` must stay the folder of this run, but {told}" in str(caught.value)
    assert (folder / LOCK_FILE).exists() == (how == "taken"), "the lock of another run is not removed"


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match=r"must be a folder, but .* is a file, or a path inside a file"):
            take(folder)
    with pytest.raises(ConfigError, match=r"must be writable, but .*/proc/.* is not"):
        take(Path("/proc/1/run"))
