"""Report of a dry run, as tables or as JSON."""

import math

from crosscut.config.system.console import figures_table
from crosscut.config.system.terminal import new_console
from crosscut.rehearsal.comparison import ComparedFigure, compare, rehearsed_forecast
from crosscut.rehearsal.rehearse import Rehearsal

CATEGORIES = ("weights", "master_weights", "gradients", "optimizer", "activations", "logits", "buffers")
"""Categories of memory, with the planner's names (`planner.memory.MemoryForecast`)."""

_PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))


def to_json(rehearsal: Rehearsal) -> dict[str, object]:
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
    """Print the counted figures next to the planner's figures."""
    console = new_console()
    run, peak = rehearsal.run, rehearsal.peak
    console.print(
        f"dry run of rank {rehearsal.rank} of {run.layout} as on {rehearsal.device} took {rehearsal.seconds:.1f} s; "
        f"peak during: {peak.instant}; 1 GB is 10^9 bytes",
        highlight=False,
    )
    forecast = rehearsed_forecast(rehearsal)
    held = figures_table("held at the peak", "counted GB", "planned GB")
    for name in CATEGORIES:
        counted, planned = peak.categories.get(name, 0), getattr(forecast, name)
        if counted or planned:
            held.add_row(name.replace("_", " "), _gigabytes(counted, peak.total), _gigabytes(planned, peak.total))
    console.print(held)
    modules = figures_table("held for module", "GB", "share")
    for name, size in peak.modules.items():
        modules.add_row(name or "root", _gigabytes(size, peak.total), f"{size / peak.total:.1%}")
    console.print(modules)
    rows = figures_table("per step", "counted", "planned", "difference")
    for row in compare(rehearsal):
        rows.add_row(row.name.replace("bytes", "GB"), *_in_units(row), f"{row.error:+.2%}")
    console.print(rows)


def _gigabytes(size: int, largest: int) -> str:
    """Format `size` bytes in GB, with as many decimals as the size `largest` needs for four significant digits."""
    return f"{size / 1e9:,.{_decimals(largest / 1e9)}f}"


def _in_units(row: ComparedFigure) -> tuple[str, str]:
    """Format the counted and the planned value of a row with four significant digits. Bytes are in GB, and FLOPs have a
    unit prefix.
    """
    largest = max(row.counted, row.planned)
    if row.name != "FLOPs":
        return _gigabytes(row.counted, largest), _gigabytes(row.planned, largest)
    scale, letter = next(((scale, letter) for scale, letter in _PREFIXES if largest >= scale), (1.0, ""))
    decimals = _decimals(largest / scale)
    counted, planned = (f"{value / scale:,.{decimals}f} {letter}FLOP" for value in (row.counted, row.planned))
    return counted, planned


def _decimals(number: float) -> int:
    """Return the number of decimals with which `number` shows four significant digits."""
    return max(0, 3 - math.floor(math.log10(number))) if number > 0 else 0
