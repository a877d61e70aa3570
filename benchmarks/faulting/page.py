"""Tables of `docs/tables/faults.md`: one row for each fault, and one row for each message."""

import re
from pathlib import Path
from typing import NamedTuple

from benchmarks.commands import replace_section
from benchmarks.faulting.registry import FAULTS
from benchmarks.faulting.trial import Row
from benchmarks.machine import machine_line

HEAD = ["fault", "layout", "named after", "right", "steps lost", "same bits", "status"]
"""Columns of the first table."""
_NOT_RUN = "not run: "


class _Lines(NamedTuple):
    """Lines of one fault in both tables."""

    figures: str
    message: str


def cells(row: Row) -> list[str]:
    """Cells of a row of the table."""
    fault = row.fault
    if row.skipped:
        return [fault.name, fault.layout, f"{_NOT_RUN}{row.skipped}", "", "", "", ""]
    seconds = "-" if not fault.named else "not named" if row.seconds is None else f"{row.seconds:.1f} s"
    yes = {True: "yes", False: "NO", None: "-"}
    lost = "-" if row.lost is None else "all" if fault.loses_all else str(row.lost)
    status = "hangs" if row.status is None else str(row.status)
    compared = f" ({fault.compared})" if fault.compared and row.same is not None else ""
    return [fault.name, fault.layout, seconds, yes[row.right], lost, yes[row.same] + compared, status]


def write_page(rows: list[Row], seed: int, page: Path) -> None:
    """Replace the rows of these faults on a page of the documentation. The rows of the other faults stay."""
    measured = {row.fault.name: _lines(row) for row in rows}
    found = {**_kept(page.read_text(encoding="utf-8")), **measured}
    every = {name: found[name] for name in (*(fault.name for fault in FAULTS), *measured) if name in found}
    head = [_line(HEAD), "|" + "---|" * len(HEAD)]
    told = ["| fault | message | what survives |", "|---|---|---|"]
    tables = [*head, *(lines.figures for lines in every.values()), "", _count(every, len(measured), seed)]
    tables += ["", *told, *(lines.message for lines in every.values())]
    replace_section(page, "faults", "\n".join(tables))


def _count(every: dict[str, _Lines], num_measured: int, seed: int) -> str:
    """Paragraph about the number of measured faults, the machine, and the faults that have not been measured."""
    done = {name for name, lines in every.items() if _NOT_RUN not in lines.figures}
    missing = [fault.name for fault in FAULTS if fault.name not in done]
    latest = f"the latest {num_measured} with " if num_measured < len(every) else ""
    told = f"{len(done)} of {len(FAULTS)} faults; {latest}seed {seed}; {machine_line('torch')}."
    return f"{told}\n\nNot measured: {'; '.join(missing)}." if missing else told


def _lines(row: Row) -> _Lines:
    """Lines of a row."""
    return _Lines(_line(cells(row)), _line([row.fault.name, _message_cell(row), row.fault.survives]))


def _line(row: list[str]) -> str:
    return f"| {' | '.join(row)} |"


def _kept(tables: str) -> dict[str, _Lines]:
    """Lines of the faults that have a row in both tables of the page."""
    lines, found = tables.splitlines(), {}
    for fault in FAULTS:
        own = [line for line in lines if line.startswith(f"| {fault.name} | ")]
        figures = [line for line in own if line.startswith(f"| {fault.name} | {fault.layout} | ")]
        messages = [line for line in own if line not in figures]
        if len(figures) == len(messages) == 1:
            found[fault.name] = _Lines(figures[0], messages[0])
    return found


_AFTER = re.compile(r"\s*(\u256d|PYTHON STACK|Training step|step +\d+ +validation|second run ended).*", re.DOTALL)
"""Output of a run that goes on after its message."""


def _message_cell(row: Row) -> str:
    """Return the cell of the message of a row."""
    if row.skipped:
        return "not run"
    if not row.message and row.fault.named:
        return "not recorded"
    return _in_cell(row.message or ("none" if row.status == 0 else "none: no process is left to print one"))


def _in_cell(message: str) -> str:
    """Return a message without the output that follows it, for a cell of a table."""
    return re.sub(r"\s+", " ", _AFTER.sub("", message)).replace("|", "\\|").replace("<", "&lt;")
