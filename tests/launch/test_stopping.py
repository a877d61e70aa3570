"""Stopping on all ranks alike, whichever of them a signal reaches, and when."""

import multiprocessing.process
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch.distributed as dist

from crosscut.launch import process_group, stopping
from crosscut.launch.stopping import INTERRUPTIBLE, REQUESTS, Stopped, StopRequest
from tests.nursery import handlers_kept, started
from tests.parallel.twins import CPU

CHECKS = 8


def send(request: StopRequest, number: int) -> None:
    os.kill(os.getpid(), number)
    deadline = time.monotonic() + 5
    while not request.asked and time.monotonic() < deadline:
        time.sleep(0.001)


def stopped_at(asked: dict[int, int], number: int) -> int:
    """The check at which this rank stopped, where rank r is sent a signal before check asked[r]."""
    descriptor = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor)
    at = CHECKS
    with handlers_kept(*REQUESTS) as handlers:
        with StopRequest() as request:
            for i in range(CHECKS):
                if asked.get(dist.get_rank()) == i:
                    send(request, number)
                try:
                    request.check()
                except Stopped:
                    at = i
                    break
        left = [signal.getsignal(number) for number in REQUESTS]
    assert left == (handlers if at == CHECKS else [signal.SIG_IGN, signal.SIG_IGN])
    assert signal.set_wakeup_fd(descriptor) == descriptor
    return at


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_all_ranks_stop_at_the_same_check_whichever_was_asked(ranks, number):
    assert ranks.run(3, stopped_at, {1: 2}, number) == [3, 3, 3]
    assert ranks.run(3, stopped_at, {0: 2, 1: 3, 2: 2}, number) == [3, 3, 3]


def test_a_rank_alone_stops_at_once(ranks):
    assert ranks.run(1, stopped_at, {0: 2}, signal.SIGTERM) == [2]


def test_nobody_stops_unasked_nor_when_there_is_no_check_left(ranks):
    assert ranks.run(2, stopped_at, {}, signal.SIGTERM) == [CHECKS, CHECKS]
    assert ranks.run(2, stopped_at, {0: CHECKS - 1}, signal.SIGTERM) == [CHECKS, CHECKS]


def told_and_left(accepted: bool) -> tuple[bool, list[bool]]:
    """Whether a callback was told of a SIGINT, and which signals are ignored afterwards."""
    told = threading.Event()
    with handlers_kept(*INTERRUPTIBLE):
        with StopRequest(INTERRUPTIBLE, told.set) as request:
            os.kill(os.getpid(), signal.SIGINT)
            was_told = told.wait(5)
            if accepted:
                request.accept()
        return was_told, [signal.getsignal(number) == signal.SIG_IGN for number in INTERRUPTIBLE]


@pytest.mark.parametrize("accepted", [False, True])
def test_an_interrupt_is_a_request_where_it_is_taken_for_one(ranks, accepted):
    assert ranks.run(2, told_and_left, accepted) == [(True, [accepted] * 3)] * 2


def items_until_stopped() -> list[int]:
    seen: list[int] = []
    with handlers_kept(*REQUESTS), StopRequest() as request, suppress(Stopped):
        for item in request.checked(range(CHECKS)):
            seen.append(item)
            if item == 2 and dist.get_rank() == 1:
                send(request, signal.SIGUSR1)
    return seen


def test_long_work_is_left_between_two_of_its_parts(ranks):
    assert ranks.run(2, items_until_stopped) == [[0, 1, 2, 3]] * 2


def found_after_meeting(path: Path) -> bool:
    with StopRequest() as request:
        if dist.get_rank() == 0:
            time.sleep(0.2)
            path.touch()
        request.meet()
        return path.exists()


def test_ranks_leave_together(ranks, tmp_path):
    assert ranks.run(2, found_after_meeting, tmp_path / "written") == [True, True]


def asked_while_waiting(path: Path) -> bool:
    """Rank 1 waits for rank 0 inside a collective; the signal is seen all the same."""
    with StopRequest() as request:
        if dist.get_rank() == 1:
            path.write_text(str(os.getpid()))
            dist.barrier()
        else:
            while not path.exists() or not path.read_text():
                time.sleep(0.01)
            time.sleep(0.1)
            os.kill(int(path.read_text()), signal.SIGTERM)
            time.sleep(0.2)
            dist.barrier()
        return request.asked


def test_a_signal_is_taken_while_the_main_thread_waits(ranks, tmp_path):
    assert ranks.run(2, asked_while_waiting, tmp_path / "pid") == [False, True]


def alone(told: Connection) -> None:
    """In a process of its own: say when a request has come, and go on for a while."""
    stopping.SAME_REQUEST = stopping.SAME_INTERRUPT = 0.5
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]  # no rank of a launching process
    with process_group(CPU), StopRequest(INTERRUPTIBLE) as request:
        told.send("ready")
        while not request.asked:
            time.sleep(0.01)
        told.send("asked")
        time.sleep(0.8)
    told.send("left")


def pid_of(process: BaseProcess) -> int:
    assert process.pid is not None
    return process.pid


@pytest.mark.one_in(3)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("wait", "left"), [(0.1, True), (0.6, False)], ids=["a copy", "a second"])
def test_a_second_signal_ends_the_process_at_once_but_a_copy_of_the_first_does_not(number, wait, left):
    process, ours = started(alone)
    assert ours.recv() == "ready"
    os.kill(pid_of(process), number)
    assert ours.recv() == "asked"
    time.sleep(wait)
    os.kill(pid_of(process), number)
    process.join(20)
    assert process.exitcode == (0 if left else 128 + number)
    if left:
        assert ours.recv() == "left"
    with pytest.raises(EOFError):
        ours.recv()


def stopped_and_slow(told: Connection) -> None:
    """In a process of its own: stop when asked, say so, and take a while to end."""
    stopping.SAME_REQUEST = 0.1
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a new program
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]  # no rank of a launching process
    with process_group(CPU), StopRequest() as request:
        told.send("ready")
        with suppress(Stopped):
            while True:
                time.sleep(0.01)
                request.check()
    told.send("stopped")
    with suppress(KeyboardInterrupt):
        time.sleep(0.6)
        sys.exit(75)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 75),
        pytest.param(signal.SIGUSR1, 75, marks=pytest.mark.slow),  # taken like SIGTERM
        (signal.SIGINT, 0),
    ],
)
def test_after_a_stop_further_requests_change_nothing_but_an_interrupt_ends_it(number, code):
    process, ours = started(stopped_and_slow)
    assert ours.recv() == "ready"
    os.kill(pid_of(process), signal.SIGUSR1)
    assert ours.recv() == "stopped"
    time.sleep(0.3)
    os.kill(pid_of(process), number)
    process.join(20)
    assert process.exitcode == code
