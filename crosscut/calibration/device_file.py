"""Measure this machine's device, and write the results to a device file."""

import time
from pathlib import Path

import torch

from crosscut.calibration.device import Rates, Sizes, measure, sizes_for
from crosscut.calibration.ranks import RANKS, Links, measure_ranks
from crosscut.config import ConfigError, write_whole
from crosscut.config.system.machine import available_cores, available_memory, processor_name
from crosscut.planner import find_hardware
from crosscut.planner.hardware import Hardware, Link


def calibrate(path: Path) -> str:
    """Measure the device, write the file `path`, and return the device's name.

    If the planner knows the device, the file states the device's published peak FLOP/s, so utilisation still refers to
    this peak. With a single GPU, the link between ranks cannot be measured. The file then contains the published
    figures of the link, or assumed figures if the planner does not know the device. Raises `ConfigError` unless `path`
    ends in .toml.
    """
    import tomli_w  # imported here, as in `config.loading`

    if path.suffix != ".toml":
        raise ConfigError(f"`--calibrate` must name a .toml file to write, but is `{path}`. Add the ending .toml.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rates, link = _measure(device, sizes_for(device))
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    name = gpu or processor_name()
    ranks = torch.cuda.device_count() if gpu else max(RANKS, available_cores())
    table = device_table(name, rates, link, memory=_memory(device), ranks=ranks, known=find_hardware(gpu))
    write_whole(path, tomli_w.dumps({"device": device.type, **table}))
    return str(table["name"])


def device_table(
    name: str, rates: Rates, link: Links | None, *, memory: int, ranks: int, known: Hardware | None
) -> dict[str, object]:
    """Return the content of the device file for a device with `memory` bytes of memory and `ranks` ranks per node. The
    content consists of the measured figures and of `known`, the published figures of the device. `known` is None if the
    planner does not know the device. `link` is None if the link was not measured.
    """
    source = f"measured by crosscut plan --calibrate on {time.strftime('%Y-%m-%d')}, torch {torch.__version__}"
    held = {"gigabytes": memory / 1e9, "gigabytes_per_second": rates.memory, "attained": 1.0}
    table: dict[str, object] = {
        "name": f"{name}, measured",
        "memory": {**held, "source": source},
        "products": {**_products(rates, known), "source": source},
        "node": _node(link, ranks, known, source),
    }
    if any(rates.host):
        forward, backward, parameter = (seconds * 1e6 for seconds in rates.host)
        table["operators"] = {
            "gelu_gigaelements_per_second": rates.gelu,
            "forward_microseconds": forward,
            "backward_microseconds": backward,
            "parameter_microseconds": parameter,
            "source": source,
        }
    if known is not None and known.network is not None:
        table["network"] = {**_as_table(known.network), "source": known.sources["network"]}
    if known is not None:
        table["host"] = {"gigabytes_per_second": known.host_bandwidth / 1e9, "source": known.sources["host"]}
    return table


def _measure(device: torch.device, sizes: Sizes) -> tuple[Rates, Links | None]:
    """Measure the rates of the device, and the rates of the link between ranks if there is more than one rank."""
    if device.type == "cpu":
        rates, link = measure_ranks("cpu", sizes)
        assert rates is not None
        return rates, link
    link_or_none = measure_ranks("cuda", None)[1] if torch.cuda.device_count() > 1 else None
    return measure(device, sizes), link_or_none


def _products(rates: Rates, known: Hardware | None) -> dict[str, object]:
    best = {precision: max(rate for *_, rate in points) for precision, points in rates.measured.items()}
    stated = {precision: rate / 1e12 for precision, rate in known.flops.items()} if known else {}
    peaks, last = {**best, **stated}, list(best)[-1]
    return {
        "teraflops": peaks,
        "attained": best[last] / peaks[last],
        "attention": rates.attention / peaks[last],
        "start_microseconds": rates.start * 1e6,
        "measured": rates.measured,
    }


def _node(link: Links | None, ranks: int, known: Hardware | None, source: str) -> dict[str, object]:
    if link is not None:
        whole = link["all_reduce"]
        return {
            "ranks": ranks,
            "latency_microseconds": whole.latency_microseconds,
            "gigabytes_per_second": whole.rates[-1][1],
            "attained": 1.0,
            "measured": {operation: rate._asdict() for operation, rate in link.items()},
            "source": source,
        }
    if known is not None:
        return {"ranks": known.ranks_per_node, **_as_table(known.node), "source": known.sources["node"]}
    return {"ranks": ranks, "gigabytes_per_second": 32.0, "source": "assumed: PCIe 4.0 x16, each way"}


def _as_table(link: Link) -> dict[str, float]:
    return {
        "gigabytes_per_second": link.bandwidth / 1e9,
        "attained": link.attained,
        "latency_microseconds": link.latency * 1e6,
        "reducing": link.reducing,
        "reducing_latency_microseconds": round(link.reducing_latency * 1e6, 9),
    }


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return available_memory()
