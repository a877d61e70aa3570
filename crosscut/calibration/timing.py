"""The median time of a piece of work on a device."""

import time
from collections.abc import Callable
from statistics import median

import torch

_WARM_UP = 1
_REPEATS = 5
_SECONDS = 0.3
"""After which no more repeats of one piece of work begin."""


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Median seconds of `work`, after a warm-up, waiting for the device each time."""
    for _ in range(_WARM_UP):
        work()
    times: list[float] = []
    while len(times) < _REPEATS and sum(times) < _SECONDS:
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - start)
    return median(times)


def repeated_seconds(work: Callable[[], object], device: torch.device, *, repeats: int = 7) -> float:
    """Median seconds of `work`, done as often whatever it takes: ranks that wait for each other must."""
    times = []
    for _ in range(_WARM_UP + repeats):
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - start)
    return median(times[_WARM_UP:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
