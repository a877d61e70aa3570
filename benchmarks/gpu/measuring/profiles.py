"""Tables of a step's kernels and of the host's time between layers: tables, not traces."""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.measuring.timing import wait

KINDS = {
    "compiled": r"^triton_(?!tem)|cpp_fused",
    "attention": r"sdpa|flash|fmha|attention",
    "products": r"gemm|nvjet|cutlass|xmma|splitk|_tem_|::(add)?mm|::linear|scaled_mm",
    "optimizer and norm": r"multi_tensor|fused_adam|foreach",
    "messages": r"nccl|c10d",
    "copies": r"memcpy|memset|copy|catarray",
    "sums": r"reduce|::sum|softmax|norm",
}
"""Patterns of the names of kernels. The first that is found names the kind; no match is `other`."""
LONGEST = 20
"""Number of kernels that are listed by name."""


class Kernel(NamedTuple):
    """Run of a kernel, in microseconds."""

    name: str
    start: float
    end: float


def kind_of(name: str) -> str:
    """Return the kind of a kernel."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "other")


def profiled(step: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Run a step under PyTorch's profiler and return its tables."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        step()
        wait(device)
    events = profiler.events() or ()
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    return tables(
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == wanted and not event.is_user_annotation and (on_gpu or not event.cpu_children)
    )


def tables(kernels: Iterable[Kernel]) -> dict[str, Any]:
    """Tables of kernels: by kind, the longest by name, and the time without any.

    Each row is [name, runs, milliseconds].
    """
    found = sorted(kernels, key=lambda kernel: kernel.start)
    of_kinds, of_names = (
        _rows((key(kernel.name), kernel.end - kernel.start) for kernel in found) for key in (kind_of, lambda name: name)
    )
    idle, end = 0.0, found[0].start if found else 0.0
    for kernel in found:
        idle += max(0.0, kernel.start - end)
        end = max(end, kernel.end)
    return {"kinds": of_kinds, "longest": of_names[:LONGEST], "idle_ms": idle / 1000}


def _rows(spent: Iterable[tuple[str, float]]) -> list[tuple[str, int, float]]:
    runs: dict[str, list[float]] = defaultdict(list)
    for name, microseconds in spent:
        runs[name].append(microseconds)
    rows = [(name[:120], len(times), sum(times) / 1000) for name, times in runs.items()]
    return sorted(rows, key=lambda row: -row[2])


def host_times(blocks: Iterable[torch.nn.Module], step: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Microseconds of the host, as medians over layers: inside a layer's forward pass, between two layers, and from a
    layer's backward pass to the next one's; and of the whole step until it is queued. On a CPU, they contain the work.
    """
    begins: list[float] = []
    ends: list[float] = []
    gradients: list[float] = []

    def end(_module: torch.nn.Module, _inputs: object, output: Any) -> None:
        ends.append(time.perf_counter())
        y: Tensor = output[0] if isinstance(output, tuple) else output
        y.register_hook(lambda _gradient: gradients.append(time.perf_counter()))

    handles = []
    for block in blocks:
        handles.append(block.register_forward_pre_hook(lambda *_: begins.append(time.perf_counter())))
        handles.append(block.register_forward_hook(end))
    wait(device)
    start = time.perf_counter()
    step()
    queued = time.perf_counter() - start
    wait(device)
    for handle in handles:
        handle.remove()
    spans = {
        "layer_forward": [end - begin for begin, end in zip(begins, ends, strict=True)],
        "between_layers": [begin - end for begin, end in zip(begins[1:], ends, strict=False)],
        "layer_backward": [later - earlier for earlier, later in pairwise(gradients)],
        "step": [queued],
    }
    return {name: median(seconds) * 1e6 for name, seconds in spans.items() if seconds}
