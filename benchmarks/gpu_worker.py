"""The processes of `gpu.py`: one describes the device, each other builds one contender and times its steps.

Nothing waits for the device between the steps of a window, for any contender: a window is started when the device has
nothing to do and ends when it has done all its steps.
"""

import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from contenders import Step, Way, make_step, require_compiled
from gpu_plan import Measurement

WARMUP = 3
WINDOWS = 3
WINDOW_SECONDS = 1.0


class Failed:
    """What a process sends in place of figures."""

    def __init__(self, reason: str, *, out_of_memory: bool = False) -> None:
        self.reason, self.out_of_memory = reason, out_of_memory


def answer(function: Callable[..., Any], arguments: tuple[Any, ...], back: Connection) -> None:
    """Send what `function` gives, or why it gives nothing."""
    try:
        back.send(function(*arguments))
    except torch.OutOfMemoryError as error:
        back.send(Failed(_first_line(error), out_of_memory=True))
    except Exception as error:  # whatever it is: the other measurements go on
        back.send(Failed(f"{type(error).__name__}: {_first_line(error)}"))


def describe(device_type: str) -> dict[str, Any]:
    """The device's name, bytes of memory, driver and published peak."""
    from crosscut.planner import find_hardware

    if device_type == "cpu":
        return {"device": _processor(), "memory": 0, "driver": "none", "dense_peak": None}
    properties = torch.cuda.get_device_properties(0)
    hardware = find_hardware(properties.name)
    return {
        "device": properties.name,
        "memory": properties.total_memory,
        "driver": _driver(),
        "dense_peak": hardware.flops.get("bfloat16") if hardware else None,
    }


def measure(measurement: Measurement, device_type: str) -> dict[str, Any]:
    """Seconds per step, peak memory and what follows from them."""
    from crosscut.training.throughput import measure_matrix_rate, synchronize

    device = torch.device("cuda", 0) if device_type == "cuda" else torch.device("cpu")
    way = Way(
        compiled=measurement.compiled,
        device=device_type,
        precision=measurement.precision,
        overrides=(*measurement.overrides, f"training.micro_batch_size={measurement.micro_batch_size}"),
    )
    torch.manual_seed(0)
    if device_type == "cpu":
        torch.set_num_threads(1)  # on models this small threads wait for each other longer than they compute
    with _group(measurement, device):
        began = time.perf_counter()
        step = make_step(measurement.program, measurement.shape, _for_program(way, measurement.program))
        synchronize(device)
        building = time.perf_counter() - began
        batches = [_batch(measurement, device, seed) for seed in range(2)]
        first_loss, warming, one_step = _warm_up(step, batches, device)
        if measurement.compiled:
            require_compiled()
        rate = measure_matrix_rate(device, torch.bfloat16)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        windows = _time_windows(step, batches, device, _steps_of_window(one_step, device))
    cuda = device.type == "cuda"
    return {
        "seconds_per_step": statistics.median(windows),
        "seconds_of_windows": windows,
        "seconds_to_build": building,
        "seconds_to_warm_up": warming,
        "measured_matrix_rate": rate,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if cuda else None,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device) if cuda else None,
        "first_loss": first_loss,
    }


def _for_program(way: Way, program: str) -> Way:
    return way if program == "crosscut" else replace(way, overrides=())


@contextmanager
def _group(measurement: Measurement, device: torch.device) -> Iterator[None]:
    """What Crosscut's ranks meet in: a group of this process alone, or of ranks that are not there.

    The latter's collectives do nothing: a sum leaves a rank's own part, so losses mean nothing and times lack the
    sending.
    """
    if measurement.program != "crosscut":
        yield
    elif measurement.tensor * measurement.data == 1:
        from crosscut.parallel import process_group

        with process_group(device):
            yield
    else:
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=measurement.tensor * measurement.data)
        yield
        dist.destroy_process_group()


def _batch(measurement: Measurement, device: torch.device, seed: int) -> list[tuple[Any, Any]]:
    """Micro-batches of random tokens."""
    shape = measurement.shape
    generator = torch.Generator().manual_seed(seed)
    size = (shape.batch_size, shape.sequence_length + 1)
    tokens = torch.randint(0, shape.vocab_size, size, generator=generator).to(device)
    parts = tokens.split(measurement.micro_batch_size)
    return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in parts]


def _warm_up(step: Step, batches: list[list[tuple[Any, Any]]], device: torch.device) -> tuple[float, float, float]:
    """The first loss, the seconds of all warm-up steps, and those of the last."""
    from crosscut.training.throughput import synchronize

    began = time.perf_counter()
    first_loss = step(0, batches[0])()
    for number in range(1, WARMUP):
        synchronize(device)
        start = time.perf_counter()
        step(number, batches[number % len(batches)])
    synchronize(device)
    end = time.perf_counter()
    return first_loss, end - began, end - start


def _time_windows(step: Step, batches: list[list[tuple[Any, Any]]], device: torch.device, steps: int) -> list[float]:
    """Seconds per step of each window."""
    from crosscut.training.throughput import synchronize

    windows = []
    number = WARMUP
    for _ in range(WINDOWS):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(steps):
            step(number, batches[number % len(batches)])
            number += 1
        synchronize(device)
        windows.append((time.perf_counter() - start) / steps)
    return windows


def _steps_of_window(seconds: float, device: torch.device) -> int:
    """Enough for the window to be long beside what ends it; on the CPU, where only the path is tried, one."""
    return max(1, min(10, round(WINDOW_SECONDS / seconds))) if device.type == "cuda" else 1


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def _processor() -> str:
    import platform

    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def _driver() -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        return "unknown"
    query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    told = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    return told.stdout.strip().splitlines()[0] if told.stdout.strip() else "unknown"
