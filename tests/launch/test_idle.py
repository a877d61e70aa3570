"""Ranks that torchrun has started and that the layout does not need."""

import os
import signal
import socket
import sys

import pytest
import torch.distributed as dist

from crosscut.config import Layout, LayoutError
from crosscut.launch import Ranks, in_ranks
from crosscut.launch.idle import WAITING
from tests.nursery import forked


def work(prepared: str, _device: object) -> tuple[str, int, int]:
    return prepared, dist.get_rank(), dist.get_world_size()


def started_rank(rank: int, port: int, results, fails: bool) -> None:
    """One of three ranks of a layout that needs two."""
    names = {"RANK": rank, "WORLD_SIZE": 3, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    ranks = Ranks(layout=Layout(data=2), device="cpu", may_idle=True)
    results.put(in_ranks(ranks, fail if fails else work, prepare=lambda: "prepared"))


def fail(*_: object) -> None:
    """End this rank while the idle rank waits."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    dist.TCPStore(address, port, is_master=False, wait_for_workers=False).wait([WAITING])
    os.kill(os.getpid(), signal.SIGKILL)


def statuses(*, fails: bool) -> tuple[list[int | None], list[object]]:
    """Exit status of each of three ranks, and the results of the first two."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = forked()
    results = context.SimpleQueue()
    ranks = [context.Process(target=started_rank, args=(rank, port, results, fails)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(60)
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.exitcode for rank in ranks], [] if fails else [results.get(), results.get()]


def test_an_idle_rank_is_no_part_of_the_group_and_ends_with_the_others():
    ended, results = statuses(fails=False)
    assert ended == [0, 0, 0]
    assert sorted(results) == [("prepared", 0, 2), ("prepared", 1, 2)]


@pytest.mark.slow  # a rank that connects late notices after a minute that there is no store any more
def test_an_idle_rank_fails_if_the_run_fails():
    ended, _ = statuses(fails=True)
    assert -signal.SIGKILL in ended[:2]
    assert 0 not in ended[:2]  # one of the two may fail before its own signal, because it has lost the other one
    assert ended[2] == 1


@pytest.mark.parametrize(("started", "may_idle"), [(3, False), (1, True)])
def test_other_commands_and_too_few_ranks_are_refused(monkeypatch, started, may_idle):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(started))
    with pytest.raises(LayoutError, match=f"must be the number of processes \\({started}\\), but is 1 x 2 = 2"):
        Ranks(layout=Layout(data=2), device="cpu", may_idle=may_idle)
