"""Steps of one program: it is built, warmed up, and timed in windows.

A window starts when the device is idle and ends when the device has finished all steps of the window; no program waits
for the device in between. Losses are read before the first window and after the last one.

Crosscut's initial weights are drawn on the device here, from the usual distribution. A training run draws them with one
host thread, so that every layout starts with the same weights, which takes seconds per billion weights. This does not
change the figures of a step, and the plain program draws on the device, too.
"""

import math
import os
import socket
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.contenders.programs import CrosscutStep, make_step, require_compiled
from benchmarks.contenders.task import Step, draw
from benchmarks.gpu.measuring.clocks import sampled, summary
from benchmarks.gpu.measuring.profiles import host_times, profiled
from benchmarks.gpu.measuring.timing import wait
from benchmarks.gpu.plan import Entry

WARMUP = 3
WINDOWS = 3
WINDOW_SECONDS = 1.0

MOST_OFF = 0.5
"""Largest relative difference of a compiled gradient.

Over 24 layers this is twice the rounding error of 8 bits and three times that of bfloat16.
"""

OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""Words in the errors of libraries and compiled kernels that got no memory. PyTorch's own error has a type."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error or one of its causes is a lack of memory, such as one inside a compiler's error."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in OUT_OF_MEMORY):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def measure_step(entry: Entry, device: torch.device) -> dict[str, Any]:
    """Build the program and measure seconds per step, peak memory, clocks, losses and gradients, and with `profiled`
    its kernels and the host.
    """
    with _group(entry, device), patch("crosscut.model.initialization.normal_", _normal_on_device):
        began = time.perf_counter()
        step = make_step(entry.program, entry.shape, entry.way(device.type))
        wait(device)
        building = time.perf_counter() - began
        batches = [_batch(entry, device, seed) for seed in range(2)]
        first_loss, warming, one_step = _warm_up(step, batches, device)
        if entry.compiled:
            require_compiled()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        with sampled() as samples:
            windows, last_loss = _time_windows(step, batches, device, _steps_of_window(one_step, device))
        peaks = _peak_bytes(device)
        if not (math.isfinite(first_loss) and math.isfinite(last_loss)):
            raise ArithmeticError(f"the loss is {first_loss} after the first step and {last_loss} after the last")
        tables = _tables(step, batches[0], device) if entry.profiled else {}
        # After the timing, because a trainer that has run out of memory cannot take another step.
        off = _require_right_gradients(step, batches[0][0]) if entry.compiled else None
    return {
        "seconds_per_step": statistics.median(windows),
        "seconds_of_windows": windows,
        "seconds_to_build": building,
        "seconds_to_warm_up": warming,
        **peaks,
        "clocks": summary(samples),
        "first_loss": first_loss,
        "last_loss": last_loss,
        "compiled_gradients_off": off,
        **tables,
    }


def _tables(step: Step, micro_batches: list[tuple[Any, Any]], device: torch.device) -> dict[str, Any]:
    """Return the tables of the host and of the kernels, or the reason why there are none: the timed steps stand without
    them.
    """
    number = count(WARMUP + 1)

    def again() -> None:
        step(next(number), micro_batches)

    try:
        host = host_times(step.trainer.model.blocks, again, device) if isinstance(step, CrosscutStep) else {}
        return {"host_microseconds": host, "profile": profiled(again, device)}
    except Exception as error:
        return {"no_profile": f"{type(error).__name__}: {error}"[:300]}


def _peak_bytes(device: torch.device) -> dict[str, int | None]:
    """Return the peaks since the last reset: of allocated and of reserved memory."""
    if device.type != "cuda":
        return {"peak_bytes": None, "peak_reserved_bytes": None}
    return {
        "peak_bytes": torch.cuda.max_memory_allocated(device),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
    }


def _require_right_gradients(step: Step, micro_batch: tuple[Any, Any]) -> float | None:
    """Return the largest difference of compiled gradients, or None for peers and if two sets do not fit into memory.

    Raises `ArithmeticError` if the difference is more than rounding, because code that forgets a gradient is fast.
    """
    if not isinstance(step, CrosscutStep):
        return None
    try:
        off, name = step.compiled_gradients_off(micro_batch)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None
    if not off < MOST_OFF:
        raise ArithmeticError(
            f"the compiled gradient of {name} differs from the uncompiled one by {off:.2f} of its norm"
        )
    return off


def _normal_on_device(parameter: Any, *, std: float, **_seed_and_name: object) -> None:
    """Replace the package's `normal_`: draw this rank's part of a parameter on its device."""
    with torch.no_grad():
        parameter.to_local().normal_(0.0, std)


@contextmanager
def _group(entry: Entry, device: torch.device) -> Iterator[None]:
    """Process group of a program that needs one.

    It is this process alone, or rank 0 of a layout whose other ranks do not exist. In the second case collectives do
    nothing. A sum is then the rank's own part, so losses are meaningless, and times do not include messages.
    """
    if entry.program != "crosscut":
        yield
    elif entry.tensor == 1:
        from crosscut.launch import process_group

        if device.type == "cuda" and any(name == "lo" for _, name in socket.if_nameindex()):
            # Without a network, looking up the address of the host name may take long.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with process_group(device):
            yield
    else:
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=entry.tensor)
        yield
        dist.destroy_process_group()


def _batch(entry: Entry, device: torch.device, seed: int) -> list[tuple[Any, Any]]:
    """Draw micro-batches of random tokens."""
    whole = draw(entry.shape, torch.Generator().manual_seed(seed))
    parts = (each.to(device).contiguous().split(entry.sequences) for each in whole)
    return list(zip(*parts, strict=True))


def _warm_up(step: Step, batches: list[list[tuple[Any, Any]]], device: torch.device) -> tuple[float, float, float]:
    """Do the warm-up steps. Returns the first loss, the seconds of all steps, and the seconds of the last step."""
    began = time.perf_counter()
    first_loss = step(0, batches[0])()
    for number in range(1, WARMUP):
        wait(device)
        start = time.perf_counter()
        step(number, batches[number % len(batches)])
    wait(device)
    end = time.perf_counter()
    return first_loss, end - began, end - start


def _time_windows(
    step: Step, batches: list[list[tuple[Any, Any]]], device: torch.device, steps: int
) -> tuple[list[float], float]:
    """Time all windows. Returns the seconds per step of each window and the last loss."""
    windows = []
    number = WARMUP
    for _ in range(WINDOWS):
        wait(device)
        start = time.perf_counter()
        for _ in range(steps):
            loss = step(number, batches[number % len(batches)])
            number += 1
        wait(device)
        windows.append((time.perf_counter() - start) / steps)
    return windows, loss()


def _steps_of_window(seconds: float, device: torch.device) -> int:
    """Return the steps of a window: about a second of them on a GPU, one on a CPU."""
    return max(1, min(10, round(WINDOW_SECONDS / seconds))) if device.type == "cuda" else 1
