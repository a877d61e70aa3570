"""Tables of `docs/tables/faults.md`: one row for each fault, and one row for each message."""

import re
from collections.abc import Mapping
from pathlib import Path

from benchmarks.commands import markdown, replace_section
from benchmarks.faulting.registry import FAULTS
from benchmarks.faulting.trial import Row
from benchmarks.machine import machine_line

HEAD = ["fault", "layout", "named after", "right", "steps lost", "same bits", "status"]
MESSAGES = ["fault", "message", "what survives"]
"""Columns of both tables."""
Rows = tuple[list[str], list[str]]
"""Rows of one fault in both tables."""
_NOT_RUN = "not run: "


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
    measured = {row.fault.name: (cells(row), [row.fault.name, _message_cell(row), row.fault.survives]) for row in rows}
    found = {**_kept(page.read_text(encoding="utf-8")), **measured}
    every = {name: found[name] for name in (*(fault.name for fault in FAULTS), *measured) if name in found}
    figures, messages = ([rows[i] for rows in every.values()] for i in range(2))
    tables = [markdown(HEAD, figures), _count(every, len(measured), seed), markdown(MESSAGES, messages)]
    replace_section(page, "faults", "\n\n".join(tables))


def _count(every: Mapping[str, Rows], num_measured: int, seed: int) -> str:
    """Paragraph about the number of measured faults, the machine, and the faults that have not been measured."""
    done = {name for name, (figures, _) in every.items() if not figures[2].startswith(_NOT_RUN)}
    missing = [fault.name for fault in FAULTS if fault.name not in done]
    latest = f"the latest {num_measured} with " if num_measured < len(every) else ""
    told = f"{len(done)} of {len(FAULTS)} faults; {latest}seed {seed}; {machine_line('torch')}."
    return f"{told}\n\nNot measured: {'; '.join(missing)}." if missing else told


def _kept(tables: str) -> dict[str, Rows]:
    """Rows of the faults that have a row in both tables of the page."""
    rows = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in tables.splitlines()]
    found = {}
    for fault in FAULTS:
        own = [row for row in rows if row[0] == fault.name]
        figures = [row for row in own if row[1:2] == [fault.layout]]
        messages = [row for row in own if row not in figures]
        if len(figures) == len(messages) == 1:
            found[fault.name] = figures[0], messages[0]
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
