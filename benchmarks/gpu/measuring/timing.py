"""Seconds of an operation on a device."""

import time
from collections.abc import Callable

import torch

SECONDS = 0.03
"""Seconds for which short operations are repeated."""
_WARM_UP = 2


def seconds_of(call: Callable[[], object], device: torch.device, *, seconds: float = SECONDS) -> float:
    """Mean seconds of a call that is repeated for about `seconds`. On a GPU, the calls are queued, so the host's time
    counts only where it is longer.
    """
    for _ in range(_WARM_UP):
        call()
    once = _repeated(call, device, 1)
    return _repeated(call, device, max(1, min(10_000, round(seconds / once))))


def _repeated(call: Callable[[], object], device: torch.device, times: int) -> float:
    wait(device)
    start = time.perf_counter()
    for _ in range(times):
        call()
    wait(device)
    return (time.perf_counter() - start) / times


def wait(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def tried(measure: Callable[[], float]) -> float | str:
    """Return the figure, or the reason why there is none: a kernel that the device or this PyTorch does not have."""
    try:
        return measure()
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {(str(error).strip() or 'no reason').splitlines()[0][:100]}"
