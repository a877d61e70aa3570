"""All measurements of this machine's device, and the file of them."""

import platform
import time
from pathlib import Path
from typing import Any

import torch

from crosscut.calibration.device import Sizes, attention_rate, memory_rate, product_rates, sizes_for, start_seconds
from crosscut.calibration.link import link_rate
from crosscut.config import ConfigError, write_whole
from crosscut.config.machine import available_cores
from crosscut.planner import find_hardware
from crosscut.planner.hardware import Hardware, Link


def calibrate(path: Path, *, sizes: Sizes | None = None) -> str:
    """Measure, write `path`, and give the device's name. `sizes` of other work may be given.

    A stated peak stays the one that utilisation is told of where the device is known. Where there is one GPU, there is
    no second rank to send to: the link is that of the known device. Raises `ConfigError` for a path that is no .toml.
    """
    import tomli_w  # as in `config.loading`

    if path.suffix != ".toml":
        raise ConfigError(f"`--calibrate` must name a .toml file to write, but is `{path}`.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = sizes or sizes_for(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    known = find_hardware(name) if device.type == "cuda" else None
    source = f"measured by crosscut plan --calibrate on {time.strftime('%Y-%m-%d')}, torch {torch.__version__}"
    table = {
        "name": f"{name}, measured",
        "device": device.type,
        "memory": {
            "gigabytes": _memory(device) / 1e9,
            "gigabytes_per_second": memory_rate(device, sizes),
            "attained": 1.0,
            "source": source,
        },
        "products": {**_products(device, sizes, known), "source": source},
        "node": {**_node(device, known), "source": source},
    }
    if known is not None and known.network is not None:
        table["network"] = {**_as_table(known.network), "source": known.sources["network"]}
    if known is not None:
        host = {"gigabytes_per_second": known.host_bandwidth / 1e9, "source": known.sources["host"]}
        table["host"] = host
    write_whole(path, tomli_w.dumps(table))
    return str(table["name"])


def _products(device: torch.device, sizes: Sizes, known: Hardware | None) -> dict[str, Any]:
    measured, attention = {}, 0.0
    for dtype in _dtypes(device):
        precision = str(dtype).removeprefix("torch.")
        measured[precision] = product_rates(device, dtype, sizes)
        attention = attention_rate(device, dtype, sizes)  # the last one: that of the precision that trains
    best = {precision: max(rate for *_, rate in points) for precision, points in measured.items()}
    stated = {precision: rate / 1e12 for precision, rate in known.flops.items()} if known else {}
    peaks = {**best, **stated}
    last = precision
    return {
        "teraflops": peaks,
        "attained": best[last] / peaks[last],
        "attention": attention / peaks[last],
        "start_microseconds": start_seconds(device) * 1e6,
        "measured": measured,
    }


def _dtypes(device: torch.device) -> list[torch.dtype]:
    """The precision that most runs train in comes last."""
    if device.type == "cpu":
        return [torch.float32]
    return [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_bf16_supported() else [])]


def _node(device: torch.device, known: Hardware | None) -> dict[str, float]:
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        link = _as_table(known.node) if known else {"gigabytes_per_second": 32.0}  # PCIe 4.0 x16, each way
        return {"ranks": known.ranks_per_node if known else 1, **link}
    rate = link_rate(device.type)
    ranks = torch.cuda.device_count() if device.type == "cuda" else available_cores()
    return {"ranks": ranks, **rate._asdict(), "attained": 1.0}


def _as_table(link: Link) -> dict[str, float]:
    return {
        "gigabytes_per_second": link.bandwidth / 1e9,
        "attained": link.attained,
        "latency_microseconds": link.latency * 1e6,
    }


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    import os

    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
