"""Forecasts of the planner for the entries of `run.py`: seconds of a step without messages, and its peak memory."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

from benchmarks.commands import markdown
from benchmarks.contenders.programs import crosscut_run
from benchmarks.gpu.plan import CHANGED, Entry
from crosscut.planner import find_hardware, forecast_memory, model_flops_per_token, step_time
from crosscut.planner.hardware import Hardware, named_hardware

CARDS = ("h100-sxm", "h200-sxm")
"""Devices whose forecasts are written down before a GPU is seen."""
SHARE_OF_MEMORY = 0.88
"""Largest share of a card's memory that a step may need by the forecast."""


def fitted(entry: Entry, memory: float) -> Entry:
    """Return the entry with the largest micro-batches that should fit into `memory` bytes: those of Crosscut in
    bfloat16 for every program and precision, so that all have the same.
    """
    while entry.kind == "step" and entry.sequences > 1 and _needed(entry) > SHARE_OF_MEMORY * memory:
        entry = replace(entry, micro_batch_size=entry.sequences // 2)
    return entry


def _needed(entry: Entry) -> float:
    return forecast_memory(_run(replace(entry, program="crosscut", precision="bfloat16"))).total


def forecast(entry: Entry, hardware: Hardware | None) -> dict[str, float]:
    """Forecast the seconds, the peak bytes and the share of the dense peak of a step. Empty for other entries, for
    other code than that of this checkout, and for unknown devices.
    """
    if hardware is None or (entry.kind, entry.program, entry.code) != ("step", "crosscut", CHANGED):
        return {}
    run = _run(entry)
    seconds = step_time(run, hardware).compute
    return {
        "seconds_per_step": seconds,
        "of_dense_peak": flops_of(entry) / seconds / hardware.flops["bfloat16"],
        "peak_bytes": forecast_memory(run, capability=hardware.capability).total,
    }


def flops_of(entry: Entry) -> float:
    """Count the model FLOPs of this GPU's step."""
    shape = entry.shape
    per_token = model_flops_per_token(_run(entry).model, shape.sequence_length)
    return shape.batch_size * shape.sequence_length * per_token / entry.tensor


@cache
def forecast_of_device(entry: Entry, device: str) -> dict[str, float]:
    """Forecast an entry on the device with this name, as torch reports it."""
    return forecast(entry, find_hardware(device))


@cache
def forecasts(entry: Entry) -> dict[str, dict[str, float]]:
    """Forecast an entry on each of `CARDS`, with the micro-batches that fit into its memory."""
    cards = {card: named_hardware(card) for card in CARDS}
    return {card: forecast(fitted(entry, device.memory), device) for card, device in cards.items()}


def forecast_table(entries: Iterable[Entry]) -> str:
    """Table in Markdown of the forecasts of all steps, each once."""
    head = ["step", *(f"{card} {figure}" for card in CARDS for figure in ("ms", "share", "GiB")), "measured"]
    rows = {entry.name: _row(entry) for entry in entries if any(forecasts(entry).values())}
    return markdown(head, rows.values())


def _row(entry: Entry) -> list[str]:
    cells = [entry.name]
    for told in forecasts(entry).values():
        cells += [f"{told['seconds_per_step'] * 1000:.0f}", f"{told['of_dense_peak']:.1%}"]
        cells.append(f"{told['peak_bytes'] / 2**30:.1f}")
    return [*cells, "not measured"]


def _run(entry: Entry) -> Any:
    return crosscut_run(entry.shape, entry.way("cuda"))
