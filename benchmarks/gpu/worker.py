"""Processes of `run.py`: the first describes the device, each other builds one contender and times its steps.

Steps are timed in windows. A window starts when the device is idle and ends when the device has finished all steps of
the window; no contender waits for the device in between. Losses are read before the first window and after the last
one.

Crosscut's initial weights are drawn on the device here, from the usual distribution. A training run draws them with one
host thread, so that every layout starts with the same weights, which takes seconds per billion weights. This does not
change the figures of a step, and the peers draw on the device, too.
"""

import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.attention import SDPBackend

from benchmarks.contenders.programs import PEERS_OF, CrosscutStep, make_step, require_compiled
from benchmarks.contenders.task import Step, Way, draw
from benchmarks.gpu.plan import Measurement
from benchmarks.machine import describe_machine
from benchmarks.turns import Failure

WARMUP = 3
WINDOWS = 3
WINDOW_SECONDS = 1.0

MOST_OFF = 0.5
"""Largest relative difference of a compiled gradient.

Over 24 layers this is twice the rounding error of 8 bits and three times that of bfloat16.
"""

GRAPHED = ("torchtitan",)
"""Programs that run a CUDA graph. The graph allocates its memory when it is captured, at the second micro-batch, so the
peak memory is that of the warm-up.
"""

OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""Words in the errors of libraries and compiled kernels that got no memory. PyTorch's own error has a type."""


def answer(function: Callable[..., Any], arguments: tuple[Any, ...], back: Connection) -> None:
    """Send the result of `function`, or a `Failure`, and end the process at once.

    An orderly exit would spend seconds on releasing the model and the helpers of the compiler.
    """
    try:
        result = function(*arguments)
    except Exception as error:  # of any kind, so that the other measurements go on
        if function is measure:
            traceback.print_exc()
        reason = f"{type(error).__name__}: {_first_line(error)}"
        result = Failure(reason, out_of_memory=is_out_of_memory(error))
    back.send(result)
    back.close()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error or one of its causes is a lack of memory, such as one inside a compiler's error."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in OUT_OF_MEMORY):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def describe(device_type: str) -> dict[str, Any]:
    """Describe the device: name, bytes of memory, driver, published peak, and the kernel of PyTorch's attention.

    Raises `ImportError` if a package that every measurement needs cannot be imported.
    """
    import crosscut.training  # noqa: F401
    from crosscut.planner import find_hardware

    if device_type == "cpu":
        return {"device": describe_machine()["device"], "memory": 0, "driver": "none", "dense_peak": None}
    properties = torch.cuda.get_device_properties(0)
    hardware = find_hardware(properties.name)
    return {
        "device": properties.name,
        "memory": properties.total_memory,
        "driver": _driver(),
        "cudnn": torch.backends.cudnn.version(),
        "attention": ", ".join(f"{attention_kernel(size, 'cuda')} for heads of {size}" for size in (96, 128)),
        "dense_peak": hardware.flops.get("bfloat16") if hardware else None,
    }


def attention_kernel(head_size: int, device: str) -> str:
    """Return PyTorch's name of the kernel that it chooses for causal attention with heads of this size."""
    q = torch.empty(1, 16, 1024, head_size, device=device, dtype=torch.bfloat16)
    return SDPBackend(torch._fused_sdp_choice(q, q, q, None, 0.0, is_causal=True)).name.lower().replace("_", " ")


def measure(measurement: Measurement, device_type: str) -> dict[str, Any]:
    """Build the contender and measure seconds per step, peak memory, losses and gradients."""
    from crosscut.training.watching.throughput import measure_matrix_rate, synchronize

    device = torch.device("cuda", 0) if device_type == "cuda" else torch.device("cpu")
    way = way_of(measurement, device_type)
    torch.manual_seed(0)
    if device_type == "cpu":
        torch.set_num_threads(1)  # threads would only wait for each other in so small a model
    with _group(measurement, device), patch("crosscut.model.initialization.normal_", _normal_on_device):
        began = time.perf_counter()
        step = make_step(measurement.program, measurement.shape, way)
        synchronize(device)
        building = time.perf_counter() - began
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        batches = [_batch(measurement, device, seed) for seed in range(2)]
        first_loss, warming, one_step = _warm_up(step, batches, device)
        if measurement.compiled:
            require_compiled()
        rate = measure_matrix_rate(device, torch.bfloat16)
        if device.type == "cuda" and measurement.program not in GRAPHED:
            torch.cuda.reset_peak_memory_stats(device)
        windows, last_loss = _time_windows(step, batches, device, _steps_of_window(one_step, device))
        peaks = _peak_bytes(device)
        if not (math.isfinite(first_loss) and math.isfinite(last_loss)):
            raise ArithmeticError(f"the loss is {first_loss} after the first step and {last_loss} after the last")
        # After the timing, because a trainer that has run out of memory cannot take another step.
        off = _require_right_gradients(step, batches[0][0]) if measurement.compiled else None
    return {
        "seconds_per_step": statistics.median(windows),
        "seconds_of_windows": windows,
        "seconds_to_build": building,
        "seconds_to_warm_up": warming,
        "measured_matrix_rate": rate,
        **peaks,
        "first_loss": first_loss,
        "last_loss": last_loss,
        "compiled_gradients_off": off,
    }


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


def way_of(measurement: Measurement, device: str) -> Way:
    """Way of a measurement. The peers have no settings of Crosscut."""
    own = (*measurement.overrides, f"training.micro_batch_size={measurement.micro_batch_size}")
    overrides = own if measurement.program == "crosscut" else ()
    return Way(compiled=measurement.compiled, device=device, precision=measurement.precision, overrides=overrides)


@contextmanager
def _group(measurement: Measurement, device: torch.device) -> Iterator[None]:
    """Process group of a program that needs one.

    It is this process alone, or rank 0 of a layout whose other ranks do not exist. In the second case collectives do
    nothing. A sum is then the rank's own part, so losses are meaningless, and times do not include messages.
    """
    if measurement.program not in ("crosscut", *PEERS_OF["Llama"]):
        yield
    elif measurement.tensor * measurement.data == 1:
        from crosscut.launch import process_group

        if device.type == "cuda" and any(name == "lo" for _, name in socket.if_nameindex()):
            # Without a network, looking up the address of the host name may take long.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with process_group(device):
            yield
    else:
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=measurement.tensor * measurement.data)
        yield
        dist.destroy_process_group()


def _batch(measurement: Measurement, device: torch.device, seed: int) -> list[tuple[Any, Any]]:
    """Draw micro-batches of random tokens."""
    whole = draw(measurement.shape, torch.Generator().manual_seed(seed))
    parts = (each.to(device).contiguous().split(measurement.micro_batch_size) for each in whole)
    return list(zip(*parts, strict=True))


def _warm_up(step: Step, batches: list[list[tuple[Any, Any]]], device: torch.device) -> tuple[float, float, float]:
    """Do the warm-up steps. Returns the first loss, the seconds of all steps, and the seconds of the last step."""
    from crosscut.training.watching.throughput import synchronize

    began = time.perf_counter()
    first_loss = step(0, batches[0])()
    for number in range(1, WARMUP):
        synchronize(device)
        start = time.perf_counter()
        step(number, batches[number % len(batches)])
    synchronize(device)
    end = time.perf_counter()
    return first_loss, end - began, end - start


def _time_windows(
    step: Step, batches: list[list[tuple[Any, Any]]], device: torch.device, steps: int
) -> tuple[list[float], float]:
    """Time all windows. Returns the seconds per step of each window and the last loss."""
    from crosscut.training.watching.throughput import synchronize

    windows = []
    number = WARMUP
    for _ in range(WINDOWS):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(steps):
            loss = step(number, batches[number % len(batches)])
            number += 1
        synchronize(device)
        windows.append((time.perf_counter() - start) / steps)
    return windows, loss()


def _steps_of_window(seconds: float, device: torch.device) -> int:
    """Return the steps of a window: about a second of them on a GPU, one on a CPU."""
    return max(1, min(10, round(WINDOW_SECONDS / seconds))) if device.type == "cuda" else 1


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def _driver() -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        return "unknown"
    query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, check=False, timeout=15)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return told.stdout.strip().splitlines()[0] if told.stdout.strip() else "unknown"
