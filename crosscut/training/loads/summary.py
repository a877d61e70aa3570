"""Figures about the experts in the report of a run."""

from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any

from crosscut.config.system.wording import counted

_SHARE = 10
"""The figures are means over the last tenth of the steps."""


def summarize_loads(rows: Iterable[Mapping[str, Any]], steps: int) -> dict[str, float]:
    """Return the mean of the largest load and of the router's entropy over the last tenth of a run's `steps`, and the
    number of collapses in the whole run. `rows` are those of `metrics.jsonl`. Empty without experts.
    """
    rows = list(rows)
    last = [
        row for row in rows if row.get("largest_load") is not None and row["step"] > steps - max(steps // _SHARE, 1)
    ]
    if not last:
        return {}
    means = {name: fmean(row[name] for row in last) for name in ("largest_load", "router_entropy")}
    return {**means, "collapses": sum("idle_expert" in row for row in rows)}


def describe_loads(figures: Mapping[str, float]) -> str:
    """Return the figures of `summarize_loads` in words."""
    collapses = int(figures["collapses"])
    return (
        f"largest load {figures['largest_load']:.2f} x the mean, router entropy {figures['router_entropy']:.2f} nats, "
        f"over the last 10% of the steps; {counted(collapses, 'collapse') if collapses else 'no collapse'}"
    )
