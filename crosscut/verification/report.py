"""Report of a verification, as a table and as JSON."""

import dataclasses
import math
from dataclasses import dataclass
from enum import StrEnum

from rich.console import Group
from rich.table import Column
from rich.text import Text

from crosscut.config.system.console import folded, plain_table, right
from crosscut.config.system.terminal import new_console

DRAWS = "random numbers"
"""Name of the check that compares random draws with dropout on."""
DOCUMENTS = "documents"
"""Name of the check that compares packed sequences with the same documents in separate sequences. A report has this
check only if documents do not attend to each other (`training.document_mask`).
"""
MIXTURE = "mixture"
"""Name of the check that the batches have the right share of samples from each token folder. A report has this check
only if the run mixes token folders (`data.mixture`).
"""
AVERAGE = "formula of the average"
"""Name of the check of the moving average of the weights. A report has this check only if the run keeps an average
(`optimizer.ema_decay`).
"""
AVERAGES = "averaged weights"
"""Name of the check that compares the average of the cut model with the average of the uncut model."""
STATISTICS = "running statistics"
"""Name of the check that compares the running statistics of norms after the step. A report has this check only if the
model has such norms.
"""
LOADS = "loads of experts"
"""Name of the check that every token was counted once for each of its experts."""
MESSAGES = "messages"
"""Name of the check that lists the messages of a model of one's own. The check always passes."""

ROUNDING = ("rounding of outputs", "rounding of gradients")
"""Names of the checks that concern the uncut model alone. If such a check fails, the cut and the uncut model may be
wrong in the same way.
"""


@dataclass(frozen=True)
class CallRow:
    """Result for one call of a module."""

    module: str
    forward: float | None
    """Largest relative difference among the call's outputs; None if the call has no output."""
    gradient: float | None
    """Largest relative difference among the gradients of the call's input and of the module's own parameters; None if
    there are no gradients.
    """
    same: bool
    """Whether all differences are within the tolerance."""


@dataclass(frozen=True)
class ReportCheck:
    """Result of a check of the whole model, such as the loss or the collectives."""

    name: str
    difference: float | None
    """Largest relative difference; None if the check compares no numbers."""
    same: bool
    """Whether the check passed."""
    told: str
    """Explanation for the report."""


class StepPhase(StrEnum):
    """Parts of a training step: the two passes, and everything after them."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


@dataclass(frozen=True)
class FirstDifference:
    """Place of the first difference."""

    module: str
    """Name of the module, or of the failed check if `direction` is `StepPhase.STEP`."""
    direction: StepPhase
    """Part of the step with the difference."""
    cause: str
    """Likely cause of the difference."""
    micro_batch: int = 1
    """Number of the first micro-batch with the difference, from 1."""

    @property
    def place(self) -> str:
        """Name of the module, and the number of the micro-batch if it is not the first."""
        return f"{self.module}, in micro-batch {self.micro_batch}" if self.micro_batch > 1 else self.module


@dataclass(frozen=True, kw_only=True)
class LayoutReport:
    """Verdict on one layout."""

    layout: str
    model: str
    precision: str
    tolerance: float
    """Allowed relative difference of a tensor from the uncut model's tensor."""
    largest_tolerance: float
    """Allowed relative difference of the tensor with the most rounding: `ROUNDINGS` times the tensor's rounding, or
    `tolerance` if that is larger.
    """
    rows: tuple[CallRow, ...]
    checks: tuple[ReportCheck, ...]
    first: FirstDifference | None
    seconds: float
    included: tuple[str, ...] = ()
    """Options of the run, besides the layout, that the verified step used."""
    left_out: tuple[str, ...] = ()
    """Options of the run that the verified step did not use. The report proves nothing about these options."""

    @property
    def same(self) -> bool:
        """Whether the cut model equals the uncut model."""
        return self.first is None and all(row.same for row in self.rows) and all(check.same for check in self.checks)

    def to_json(self) -> dict[str, object]:
        """Return the report as plain values for JSON. JSON has no infinite numbers: such a difference is None."""
        return {"same": self.same, **dataclasses.asdict(self, dict_factory=_finite)}


def _finite(fields: list[tuple[str, object]]) -> dict[str, object]:
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in fields}


def print_report(report: LayoutReport) -> None:
    """Print the table of modules, the checks and the verdict."""
    console = new_console()
    title = f"{report.model} on {report.layout}, {report.precision}"
    modules = plain_table(Column("module", no_wrap=True), *right("forward", "gradient"), "verdict")
    for row in report.rows:
        modules.add_row(row.module, _number(row.forward), _number(row.gradient), _verdict(row.same))
    checks = plain_table(Column("check", no_wrap=True), *right("difference"), "verdict", folded(""))
    for check in report.checks:
        verdict = Text("listed") if check.name == MESSAGES else _verdict(check.same)
        checks.add_row(check.name, _number(check.difference), verdict, Text(check.told, style="dim"))
    scope = [
        Text(f"{title}: {', '.join(items)}.", style="dim")
        for title, items in (("Verified with", report.included), ("Not verified", report.left_out))
        if items
    ]
    console.print(
        Group(Text(title, style="bold"), Text(), modules, Text(), checks, Text(), _conclusion(report), *scope)
    )


def _conclusion(report: LayoutReport) -> Text:
    more = "" if report.largest_tolerance == report.tolerance else f", up to {report.largest_tolerance:.1e} by rounding"
    told = (
        f"differences are relative to the largest element; tolerance {report.tolerance:.1e}{more}; took "
        f"{report.seconds:.0f} s"
    )
    if report.same:
        return Text.assemble((f"{report.layout} equals the uncut model", "bold green"), f" ({told}).")
    assert report.first is not None
    verdict = "is NOT PROVEN to equal" if report.first.module in ROUNDING else "DIFFERS from"
    is_check = report.first.direction is StepPhase.STEP
    where = "The failed check is " if is_check else f"The first difference is in the {report.first.direction} pass of "
    return Text.assemble(
        (f"{report.layout} {verdict} the uncut model", "bold red"),
        f" ({told}).\n{where}",
        (report.first.place, "bold"),
        f".\n{report.first.cause}",
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}" if value else "0"


def _verdict(same: bool) -> Text:
    return Text("same", style="green") if same else Text("DIFFERS", style="bold red")
