"""Report of a verification, as a table to read and as JSON."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

DRAWS = "random numbers"
"""The check of who draws what, with dropout."""
ROUNDING = ("rounding of outputs", "rounding of gradients")
"""The checks of the uncut model alone: where one fails, both models may be wrong alike."""


@dataclass(frozen=True)
class Row:
    """One call of a module."""

    module: str
    forward: float | None
    """Largest relative difference of its output; None where it has none."""
    gradient: float | None
    """Largest relative difference of its input's and its own parameters' gradients."""
    same: bool


@dataclass(frozen=True)
class Check:
    """Result of a check that belongs to no module."""

    name: str
    difference: float | None
    same: bool
    told: str


@dataclass(frozen=True)
class First:
    """Place where the difference begins."""

    module: str
    direction: str
    """`forward`, `backward`, or `step` for what is done with the gradients."""
    cause: str
    """Usual cause of the pattern in the difference."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The verdict on one layout."""

    layout: str
    model: str
    precision: str
    tolerance: float
    largest_tolerance: float
    """Tolerance of the tensor that rounds most: `ROUNDINGS` times its rounding, or `tolerance` if that is more."""
    rows: tuple[Row, ...]
    checks: tuple[Check, ...]
    first: First | None
    seconds: float
    included: tuple[str, ...] = ()
    """Options of the run, beside its layout, that the step had."""
    left_out: tuple[str, ...] = ()
    """Options of the run that the step did not have; the report proves nothing of them."""

    @property
    def same(self) -> bool:
        """Whether the cut model is the uncut one."""
        return self.first is None and all(row.same for row in self.rows) and all(check.same for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """The whole report as plain values."""
        return {"same": self.same, **dataclasses.asdict(self)}


def print_report(report: Report) -> None:
    """Print the table, the checks and the verdict."""
    console = Console()
    title = f"{report.model} on {report.layout}, {report.precision}"
    modules = Table(box=None, pad_edge=False)
    modules.add_column("module", no_wrap=True)
    for name in ("forward", "gradient"):
        modules.add_column(name, justify="right")
    modules.add_column("verdict")
    for row in report.rows:
        modules.add_row(row.module, _number(row.forward), _number(row.gradient), _verdict(row.same))
    checks = Table(box=None, pad_edge=False)
    checks.add_column("check", no_wrap=True)
    checks.add_column("difference", justify="right")
    checks.add_column("verdict")
    checks.add_column("", overflow="fold")
    for check in report.checks:
        checks.add_row(check.name, _number(check.difference), _verdict(check.same), Text(check.told, style="dim"))
    scope = [
        Text(f"{title}: {', '.join(items)}.", style="dim")
        for title, items in (("In the step", report.included), ("Not in it", report.left_out))
        if items
    ]
    console.print(
        Group(Text(title, style="bold"), Text(), modules, Text(), checks, Text(), _conclusion(report), *scope)
    )


def _conclusion(report: Report) -> Text:
    more = "" if report.largest_tolerance == report.tolerance else f", by rounding up to {report.largest_tolerance:.1e}"
    told = (
        f"differences relative to the largest element, tolerance {report.tolerance:.1e}{more}; {report.seconds:.0f} s"
    )
    if report.same:
        return Text.assemble((f"{report.layout} is the uncut model", "bold green"), f" ({told}).")
    assert report.first is not None
    verdict = "is NOT PROVEN to be" if report.first.module in ROUNDING else "is NOT"
    is_check = report.first.direction == "step"
    where = "The check that fails is " if is_check else f"It begins in the {report.first.direction} pass of "
    return Text.assemble(
        (f"{report.layout} {verdict} the uncut model", "bold red"),
        f" ({told}).\n{where}",
        (report.first.module, "bold"),
        f".\n{report.first.cause}",
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}" if value else "0"


def _verdict(same: bool) -> Text:
    return Text("same", style="green") if same else Text("DIFFERS", style="bold red")
