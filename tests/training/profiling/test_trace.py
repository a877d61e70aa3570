"""Shares of a step from events whose times are known."""

import pytest

from crosscut.training.profiling.trace import Shares, shares_of_steps, union


def event(name: str, start: float, end: float, *, cat: str, tid: int = 1) -> dict:
    return {"ph": "X", "name": name, "cat": cat, "tid": tid, "ts": start, "dur": end - start}


def step(number: int, start: float, end: float) -> dict:
    return event(f"crosscut step {number}", start, end, cat="user_annotation")


def parts_of(shares: Shares) -> tuple[float, ...]:
    return shares.compute, shares.overlapped, shares.communication, shares.idle


def test_union_joins_what_touches_or_overlaps():
    assert union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]


def test_on_a_gpu_kernels_count_and_overlap_is_told_apart():
    events = [
        step(3, 0, 100),
        event("aten::mm", 0, 100, cat="cpu_op"),  # launching is not computing
        event("gemm", 0, 30, cat="kernel", tid=7),
        event("gemm", 20, 40, cat="kernel", tid=8),
        event("ncclDevKernel_AllReduce", 30, 60, cat="kernel", tid=9),
        event("Memcpy DtoD", 70, 80, cat="gpu_memcpy", tid=7),
        event("gemm", 95, 120, cat="kernel", tid=7),  # ends after the step
        step(4, 100, 200),
    ]
    third, fourth = shares_of_steps(events)
    assert (third.step, third.seconds) == (3, pytest.approx(1e-4))
    assert parts_of(third) == pytest.approx((0.30 + 0.10 + 0.05, 0.10, 0.20, 0.25))
    assert fourth.compute == pytest.approx(0.20)
    assert fourth.idle == pytest.approx(0.80)


def test_on_the_cpu_what_a_collective_does_within_itself_is_communication():
    events = [
        step(0, 0, 100),
        event("_EnterAndMultiply", 0, 90, cat="cpu_op"),  # a wrapper around operators is none itself
        event("aten::mm", 0, 20, cat="cpu_op"),
        event("c10d::allreduce_", 20, 30, cat="cpu_op"),
        event("aten::copy_", 22, 28, cat="cpu_op"),
        event("gloo:all_reduce", 25, 60, cat="cpu_op", tid=5),  # a thread of its own
        event("aten::mm", 40, 50, cat="cpu_op"),
        event("_c10d_functional::wait_tensor", 50, 60, cat="cpu_op"),
        event("aten::mm", 0, 100, cat="cpu_op", tid=3),  # of another thread, such as one that loads data
    ]
    (shares,) = shares_of_steps(events)
    assert parts_of(shares) == pytest.approx((0.20, 0.10, 0.30, 0.40))


def test_on_the_cpu_a_message_between_stages_is_no_communication_while_the_stage_computes():
    events = [
        step(0, 0, 100),
        event("aten::mm", 0, 30, cat="cpu_op"),
        event("c10d::send", 30, 32, cat="cpu_op"),
        event("gloo:send", 31, 98, cat="user_annotation"),  # until the other stage has received it
        event("gloo:recv", 10, 60, cat="user_annotation"),
        event("aten::mm", 60, 90, cat="cpu_op"),
    ]
    (shares,) = shares_of_steps(events)
    assert parts_of(shares) == pytest.approx((0.60, 0.0, 0.02, 0.38))  # idle while it waits for another stage
