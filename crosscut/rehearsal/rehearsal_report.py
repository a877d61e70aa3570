"""Report of a dry run, as tables or as JSON."""

from typing import Any

from rich import box
from rich.table import Table

from crosscut.config.system.terminal import new_console
from crosscut.rehearsal.comparison import compare, rehearsed_forecast
from crosscut.rehearsal.rehearse import Rehearsal

CATEGORIES = ("weights", "master_weights", "gradients", "optimizer", "activations", "logits", "buffers")
"""Categories of memory, with the planner's names (`planner.memory.MemoryForecast`)."""


def to_json(rehearsal: Rehearsal) -> dict[str, Any]:
    """Return the figures of a dry run by name, as values for JSON."""
    return {
        "layout": str(rehearsal.run.layout),
        "rank": rehearsal.rank,
        "device": rehearsal.device,
        "seconds": rehearsal.seconds,
        "peak_bytes": rehearsal.peak.total,
        "instant": rehearsal.peak.instant,
        "categories": rehearsal.peak.categories,
        "modules": rehearsal.peak.modules,
        "compared": [{"name": r.name, "planned": r.planned, "counted": r.counted} for r in compare(rehearsal)],
    }


def print_rehearsal(rehearsal: Rehearsal) -> None:
    """Print the counted figures next to the planner's."""
    console = new_console()
    run, peak = rehearsal.run, rehearsal.peak
    console.print(
        f"dry run of rank {rehearsal.rank} of {run.layout} as on {rehearsal.device} took {rehearsal.seconds:.1f} s; "
        f"peak during: {peak.instant}",
        highlight=False,
    )
    forecast = rehearsed_forecast(run, rehearsal.device)
    held = _table("held at the peak", "counted MiB", "planned MiB")
    for name in CATEGORIES:
        counted, planned = peak.categories.get(name, 0), getattr(forecast, name)
        if counted or planned:
            held.add_row(name.replace("_", " "), _mib(counted), _mib(planned))
    console.print(held)
    modules = _table("held for module", "MiB", "share")
    for name, size in peak.modules.items():
        modules.add_row(name or "root", _mib(size), f"{size / peak.total:.1%}")
    console.print(modules)
    rows = _table("per step", "counted", "planned", "difference")
    for row in compare(rehearsal):
        rows.add_row(row.name, f"{row.counted:,}", f"{row.planned:,}", f"{row.error:+.2%}")
    console.print(rows)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f}"


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table
