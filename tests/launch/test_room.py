"""A machine without ports or shared memory for the ranks is told before a rank waits."""

import ctypes
import errno
import os
import resource
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from crosscut.config import ConfigError
from crosscut.launch.room import require_files, require_ports, shared_memory_told
from tests.nursery import started
from tests.refusals import refusal

CLONE_NEWNET = 0x40000000  # <linux/sched.h>


def require_ports_of_four(told: Connection) -> None:
    """In a process of its own: send the message that comes in a network with four ports."""
    assert ctypes.CDLL(None).unshare(CLONE_NEWNET) == 0
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("20000 20003")
    try:
        require_ports("127.0.0.1", 2)
    except ConfigError as error:
        told.send(str(error))


def descriptors() -> set[int]:
    return {int(path.name) for path in Path("/proc/self/fd").iterdir()}


def test_enough_ports_leave_nothing_open():
    before = descriptors()
    require_ports("127.0.0.1", 1000)
    assert descriptors() == before


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="namespaces need root on Linux")
def test_too_few_ports_are_told():
    process, ours = started(require_ports_of_four)
    assert ours.poll(60)
    assert ours.recv() == (
        "At 127.0.0.1, there must be at least 16 free ports for the connections of 2 ranks, but there are only 4: "
        "Address already in use. End programs that hold ports, or widen `net.ipv4.ip_local_port_range`."
    )
    process.join(20)


def test_limit_on_open_files_is_told():
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = descriptors()
    third_free = [number for number in range(len(taken) + 4) if number not in taken][2]
    resource.setrlimit(resource.RLIMIT_NOFILE, (third_free + 1, most))
    try:
        with pytest.raises(ConfigError, match=r"at least 16 sockets for .* ranks, but there are only [2-4]: Too many"):
            require_ports("127.0.0.1", 2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (now, most))


@pytest.mark.parametrize("num_ranks", [1, 2, 8, 64])
def test_limit_that_would_end_a_rank_at_its_start_is_told(monkeypatch, num_ranks):
    needed = 56 + 4 * num_ranks
    monkeypatch.setattr("resource.getrlimit", lambda _kind: (needed, 4096))
    require_files(num_ranks)
    monkeypatch.setattr("resource.getrlimit", lambda _kind: (40, 4096))
    assert refusal(ConfigError, require_files, num_ranks) == (
        f"Each of {num_ranks} ranks must be able to open at least {needed} files and connections, but `ulimit -n` "
        "allows 40. Raise the limit: ulimit -n 4096"
    )


def test_full_shared_memory_is_told():
    with pytest.raises(ConfigError) as told, shared_memory_told():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert str(told.value) == (
        "`/dev/shm` must have room for the semaphores of the ranks, but has none: No space left on device. Free some "
        "space in `/dev/shm`, or give the container more shared memory (`--shm-size`)."
    )


def test_errors_of_files_stay():
    with pytest.raises(FileNotFoundError), shared_memory_told():
        Path("/no such folder/file").read_text()
    with pytest.raises(OSError, match="in use"), shared_memory_told(), socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        one.listen()
        two.bind(one.getsockname())
