"""Figures about the experts in the report of a run."""

from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any

from crosscut.config.system.wording import counted

_SHARE = 10
"""The figures are means over the last tenth of the steps."""


def summarize_loads(rows: Iterable[Mapping[str, Any]], steps: int) -> dict[str, float]:
    """Return the mean of the largest load and of the router's entropy over the last tenth of a run's `steps`, and the
    number of collapses in the whole run. `rows` are those of `metrics.jsonl`. Empty without experts. Steps with numbers
    that are not finite do not count.
    """
    rows, names, first = list(rows), ("largest_load", "router_entropy"), steps - max(steps // _SHARE, 1)
    last = [row for row in rows if row["step"] > first and all(row.get(name) is not None for name in names)]
    if not last:
        return {}
    means = {name: fmean(row[name] for row in last) for name in names}
    return {**means, "collapses": sum("idle_expert" in row for row in rows)}


def describe_loads(figures: Mapping[str, float]) -> str:
    """Return the figures of `summarize_loads` in words."""
    collapses = int(figures["collapses"])
    return (
        f"largest load {figures['largest_load']:.2f} x the mean, router entropy {figures['router_entropy']:.2f} nats, "
        f"over the last 10% of the steps; {counted(collapses, 'collapse') if collapses else 'no collapse'}"
    )
