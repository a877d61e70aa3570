"""Measurements of one entry, in its process: a step, the card, products, or attention."""

import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu.measuring.attention import attention_kernel, measure_attention
from benchmarks.gpu.measuring.clocks import sampled, stated, summary
from benchmarks.gpu.measuring.products import measure_products
from benchmarks.gpu.measuring.steps import measure_step
from benchmarks.gpu.measuring.timing import seconds_of
from benchmarks.gpu.plan import Entry
from benchmarks.machine import describe_machine

RATE_SECONDS = 3.0
"""Seconds of the matrix rate. Within a tenth of a second, it scatters by 8%."""
_PART_SECONDS = 0.25


def describe(device: str) -> dict[str, Any]:
    """Describe the device: name, bytes of memory, driver, limits, published peak, and PyTorch's kernels of attention.

    Raises `ImportError` if a package that every entry needs cannot be imported.
    """
    import crosscut.training  # noqa: F401
    from crosscut.planner import find_hardware

    if device == "cpu":
        return {"device": describe_machine()["device"], "memory": 0, "driver": "none", "dense_peak": None}
    properties = torch.cuda.get_device_properties(0)
    hardware, limits = find_hardware(properties.name), stated()
    return {
        "device": properties.name,
        "memory": properties.total_memory,
        "driver": limits.pop("driver_version"),
        **limits,
        "cudnn": torch.backends.cudnn.version(),
        "attention": ", ".join(f"{attention_kernel(size, 'cuda')} for heads of {size}" for size in (96, 128)),
        "dense_peak": hardware.flops["bfloat16"] if hardware else None,
    }


def measure(entry: Entry, device_type: str) -> dict[str, Any]:
    """Measure an entry."""
    torch.manual_seed(0)
    if device_type == "cpu":
        torch.set_num_threads(1)  # threads would only wait for each other in so small a model
        with patch("torch._inductor.compile_fx.compile_fx", _without_kernels):
            return _measured(entry, torch.device("cpu"))
    return _measured(entry, torch.device("cuda", 0))


def _without_kernels(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **_settings: object) -> object:
    """Trace a graph and its gradient without making kernels, which takes a quarter of a minute each on a CPU."""
    return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


def _measured(entry: Entry, device: torch.device) -> dict[str, Any]:
    kinds: dict[str, Callable[[Entry, torch.device], dict[str, Any]]] = {
        "step": measure_step, "card": measure_card, "products": measure_products, "attention": measure_attention,
    }  # fmt: skip
    return kinds[entry.kind](entry, device)


def measure_card(_entry: Entry, device: torch.device) -> dict[str, Any]:
    """Measure the rate of large matrix products over `RATE_SECONDS`, with the clocks, and the bandwidth of a copy."""
    size, num_bytes, seconds = (8192, 4 << 30, RATE_SECONDS) if device.type == "cuda" else (256, 1 << 20, 0.1)
    a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    rates, end = [], time.monotonic() + seconds
    with sampled() as samples:
        while time.monotonic() < end:
            rates.append(2 * size**3 / seconds_of(lambda: a @ b, device, seconds=min(_PART_SECONDS, seconds / 4)))
    source = torch.randn(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return {
        "matrix_rate": sum(rates) / len(rates),
        "matrix_rates": rates,
        "copied_bytes_per_second": 2 * num_bytes / seconds_of(lambda: target.copy_(source), device),
        "clocks": summary(samples),
        "samples": samples,
    }
