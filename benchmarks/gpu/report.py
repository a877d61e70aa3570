"""Lines and tables that `run.py` prints after each entry."""

from collections.abc import Iterator
from typing import Any

from benchmarks.commands import aligned


def step_line(row: Any, figures: dict[str, Any]) -> str:
    """Line of an entry: figures of a step, or remarks."""
    cells = [f"{row.entry.title:44}"]
    if figures:
        peak, share = figures["peak_bytes"], figures["of_dense_peak"]
        clocks = row.turns[-1]["clocks"].get("SM MHz", [])
        cells += [
            f"micro {row.entry.sequences}", f"{figures['seconds_per_step'] * 1000:,.1f} ms",
            f"{figures['tokens_per_second']:,.0f} tokens/s", f"{figures['model_flops_per_second'] / 1e12:,.2f} TFLOP/s",
            *([f"{share:.1%} of the peak"] if share else []), *([f"{peak / 2**30:.1f} GiB"] if peak else []),
            *([f"{clocks[1]:,.0f} MHz"] if clocks else []),
        ]  # fmt: skip
    return "  ".join([*cells, *row.remarks])


def report(turns: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the tables of an entry's last turn, if it has any."""
    for turn in turns:
        if "matrix_rate" in turn:
            lowest, highest = min(turn["matrix_rates"]), max(turn["matrix_rates"])
            yield f"matrix rate {_tera(turn['matrix_rate'])} TFLOP/s ({_tera(lowest)} to {_tera(highest)})"
            copied = turn["copied_bytes_per_second"] / 1e12
            yield f"copies {copied:.2f} TB/s; smallest, median and largest: {turn['clocks']}"
        if "products" in turn:
            yield aligned([_head(turn["products"]), *(_cells(row) for row in turn["products"])], left=2)
        if "attention" in turn:
            yield aligned([_head(turn["attention"]), *(_cells(row) for row in turn["attention"])], left=3)
        if turn.get("host_microseconds"):
            times = ", ".join(f"{name} {value:,.0f}" for name, value in turn["host_microseconds"].items())
            yield f"host, microseconds: {times}"
        if "profile" in turn:
            yield _profile(turn["profile"])
        if "no_profile" in turn:
            yield f"no profile: {turn['no_profile']}"


def _profile(profile: dict[str, Any]) -> str:
    rows = [["kernels", "runs", "ms"]]
    rows += [[name, f"{runs:,}", f"{ms:,.2f}"] for name, runs, ms in (*profile["kinds"], *profile["longest"])]
    return aligned([*rows, ["none", "", f"{profile['idle_ms']:,.2f}"]])


def _head(rows: list[dict[str, Any]]) -> list[str]:
    return [*rows[0]]


def _cells(row: dict[str, Any]) -> list[str]:
    """Cells of a row; rates in TFLOP/s, reasons cut short."""
    cells = (_tera(cell) if isinstance(cell, float) else str(cell) for cell in row.values())
    return [cell if len(cell) <= 24 else f"{cell[:23]}…" for cell in cells]


def _tera(rate: float) -> str:
    return f"{rate / 1e12:,.3g}"
