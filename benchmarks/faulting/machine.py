"""Faults of the rest of the machine: its clock, shared memory, ports, descriptors and processes."""

import os
import random
import resource
import shutil
import socket
from contextlib import suppress
from functools import partial
from pathlib import Path

from benchmarks.faulting.killed import IN_SIXTH, control_group
from benchmarks.faulting.scene import Scene
from benchmarks.faulting.trial import Fault

_PIDS = Path("/sys/fs/cgroup/pids")


def _jump(scene: Scene, _: random.Random, *, seconds: int) -> None:
    """Set the clock of all processes of the run forward or back."""
    scene.shim.set(clock=seconds)


def _needs_namespaces() -> str:
    if os.geteuid() or not shutil.which("unshare"):
        return "namespaces need root and `unshare`"
    return ""


def _shell(text: str, *kinds: str) -> tuple[str, ...]:
    """Return the prefix of a command that runs in namespaces of its own, after a line of shell."""
    return ("unshare", *kinds, "sh", "-c", f'{text}; exec "$@"', "sh")


def _no_more_files(scene: Scene, _: random.Random) -> None:
    """Let the processes of the run open no further files."""
    for process in scene.ranks().values():
        now = len([*Path(f"/proc/{process.pid}/fd").iterdir()])
        _, most = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (now, most))


def _take_port(scene: Scene, _: random.Random) -> None:
    """Listen on the usual port of a launcher on the loopback address, as another program would."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with suppress(OSError):  # another program is listening already
        listener.bind(("127.0.0.1", 29500))
        listener.listen()
    scene.undo.append(listener.close)


def _few_processes(scene: Scene, _: random.Random) -> None:
    """Put the ranks into a control group in which no further process or thread can start."""
    group = control_group(scene, _PIDS)
    for process in scene.ranks().values():
        (group / "cgroup.procs").write_text(str(process.pid), encoding="ascii")
    (group / "pids.max").write_text("1", encoding="ascii")


def _needs_pids() -> str:
    return "" if os.access(_PIDS / "cgroup.procs", os.W_OK) else "control groups of processes are not writable"


_TAKE_ALL = """ip link set lo up; echo "20000 20003" > /proc/sys/net/ipv4/ip_local_port_range"""
_SMALL_SHM = "mount -t tmpfs -o size=4k tmpfs /dev/shm; dd if=/dev/zero of=/dev/shm/full bs=4k count=1 2>/dev/null"

MACHINE = [
    Fault(name="the clock jumps forward by an hour", layout="tensor 2", named=(), place=IN_SIXTH,
          cause=partial(_jump, seconds=3600), status=(0,), survives="the run"),
    Fault(name="the clock jumps back by a day", layout="pipeline 2", named=(), place=IN_SIXTH,
          cause=partial(_jump, seconds=-86_400), status=(0,), survives="the run"),
    Fault(name="/dev/shm is full", layout="data 2", status=(2,), survives="nothing was done",
          named=("`/dev/shm` must have room", "No space left on device"),
          prefix=_shell(_SMALL_SHM, "-m"), needs=_needs_namespaces),
    Fault(name="the usual port of launchers (29500) is taken", layout="context 2", named=(), status=(0,),
          cause=_take_port, survives="the run"),
    Fault(name="every port is taken", layout="tensor 2", named=("must be at least 16 free ports",),
          status=(2,),
          prefix=_shell(_TAKE_ALL, "-n"), needs=_needs_namespaces, survives="nothing was done"),
    Fault(name="too few file descriptors while training", layout="tensor 2",
          named=("rank 0 of 2 has reached the limit on open files", "ulimit -n"), place=IN_SIXTH, cause=_no_more_files,
          may_lose=8),
    Fault(name="too many processes while training", layout="data 2",
          named=(r"rank \d of 2 has reached the limit on processes",),
          place=IN_SIXTH, cause=_few_processes, needs=_needs_pids, may_lose=8),
]  # fmt: skip
