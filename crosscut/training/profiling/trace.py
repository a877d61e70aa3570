"""Shares of a step's time in a profiler's trace: computation, communication, overlap and idle time.

A trace is the file that `torch.profiler` writes for Perfetto. On a GPU, computation and communication are the times of
the kernels. On a CPU, computation is the time of the operators on the training thread (the autograd engine runs on the
same thread), and communication is the time of the messages on all threads, except the messages between the stages of a
pipeline: a stage that waits for another stage is idle (`passes` says why). C is the time during which something is
computed, and K the time during which something is sent:

    compute = C without K     overlapped = C and K     communication = K without C     idle = neither

The four shares add up to the step.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Event = Mapping[str, Any]
Span = tuple[float, float]
"""Start and end of an interval, in microseconds."""

STEP_NAME = "crosscut step"

_KERNELS = {"kernel", "gpu_memcpy", "gpu_memset"}
_SENDING_KERNEL = re.compile(r"nccl|symm_mem|multimem|c10d", re.IGNORECASE)
_SENDING_OPERATOR = re.compile(r"(_?c10d|gloo(?!:(send|recv)$)|nccl|record_param_comms)")
"""Name of an operator that sends or waits, on the CPU. The spans `gloo:send` and `gloo:recv` are left out: they last
until a message between two stages of a pipeline has arrived, and the stages compute in the meantime.
"""
_COMPUTING_OPERATOR = re.compile(r"(aten|mkldnn|inductor|prims)::|Torch-Compiled Region|## Call CompiledFxGraph")


class Shares(NamedTuple):
    """Shares of compute, overlapped, communication and idle time in one step, as fractions of the step's time. `step`
    counts from 1.
    """

    step: int
    seconds: float
    compute: float
    overlapped: float
    communication: float
    idle: float


def shares_of_steps(events: Sequence[Event]) -> list[Shares]:
    """Return the shares of every step in a trace's events, in order."""
    whole = [e for e in events if e.get("ph") == "X"]
    steps = [e for e in whole if str(e["name"]).startswith(STEP_NAME) and e.get("cat") == "user_annotation"]
    on_gpu = any(e.get("cat") in _KERNELS for e in whole)
    thread = steps[0]["tid"] if steps else None
    computing, sending = _kernels(whole) if on_gpu else _operators(whole, thread)
    return [_shares(step, computing, sending) for step in sorted(steps, key=lambda e: float(e["ts"]))]


def _shares(step: Event, computing: Sequence[Span], sending: Sequence[Span]) -> Shares:
    start, end = _span(step)
    computed, sent = _within(computing, start, end), _within(sending, start, end)
    both = _length(computed) + _length(sent) - _length(union([*computed, *sent]))
    total = end - start
    compute, communication = _length(computed) - both, _length(sent) - both
    return Shares(
        step=int(str(step["name"]).removeprefix(STEP_NAME)),
        seconds=total / 1e6,
        compute=compute / total,
        overlapped=both / total,
        communication=communication / total,
        idle=(total - compute - both - communication) / total,
    )


def _kernels(events: Iterable[Event]) -> tuple[list[Span], list[Span]]:
    computing: list[Span] = []
    sending: list[Span] = []
    for event in events:
        if event.get("cat") in _KERNELS:
            (sending if _SENDING_KERNEL.search(str(event["name"])) else computing).append(_span(event))
    return union(computing), union(sending)


def _operators(events: Iterable[Event], thread: object) -> tuple[list[Span], list[Span]]:
    """Split the CPU operators into computing and sending spans. Operators inside a sending operator, such as a copy,
    count as communication.
    """
    computing, sending, sending_here = [], [], []
    for event in events:
        name = str(event["name"])
        if _SENDING_OPERATOR.match(name):
            sending.append(_span(event))
            if event["tid"] == thread:
                sending_here.append(_span(event))
        elif event["tid"] == thread and _COMPUTING_OPERATOR.match(name):
            computing.append(_span(event))
    return _without(union(computing), union(sending_here)), union(sending)


def union(spans: Iterable[Span]) -> list[Span]:
    """Merge spans that touch or overlap. Returns sorted, disjoint spans that cover the same time."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _without(spans: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    """Return the parts of `spans` that are outside of `holes`. The spans of each list must be disjoint and sorted, as
    `union` returns them.
    """
    left = []
    next_hole = 0
    for start, end in spans:
        while next_hole < len(holes) and holes[next_hole][1] <= start:
            next_hole += 1
        index, begin = next_hole, start
        while index < len(holes) and holes[index][0] < end:
            if holes[index][0] > begin:
                left.append((begin, holes[index][0]))
            begin = max(begin, holes[index][1])
            index += 1
        if begin < end:
            left.append((begin, end))
    return left


def _within(spans: Sequence[Span], start: float, end: float) -> list[Span]:
    return [(max(a, start), min(b, end)) for a, b in spans if b > start and a < end]


def _length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


def _span(event: Event) -> Span:
    start = float(event["ts"])
    return start, start + float(event["dur"])
