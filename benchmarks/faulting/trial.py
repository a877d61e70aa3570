"""A fault of a registry, and one trial: cause the fault in a real run, watch the run, cure, resume, and compare."""

import random
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from benchmarks.faulting.inside import Place
from benchmarks.faulting.scene import EVERY, STEPS, Scene
from crosscut.checkpoint import find_damage, list_checkpoints

LIMIT = 150.0
"""Seconds that most runs may take from the fault to their end. A longer run counts as a hang."""

_OWN = re.compile(r"crosscut: |rank \d of|Some rows of |Some scalars in |The run has made no progress|Spike at step ")

Cause = Callable[[Scene, random.Random], None]


def nothing(_scene: Scene, _chance: random.Random) -> None:
    """Do nothing."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One kind of fault, the layout of the run that it hits, and what must hold."""

    name: str
    layout: str
    named: tuple[str, ...]
    """Regular expressions that must all match the output: the rank, the axis, the module or the file. Empty for a fault
    after which no process is left that could say something."""
    place: Place | None = None
    """Place in the run at which the fault happens. None for a fault before the run starts."""
    cause: Cause = nothing
    cure: Cause = nothing
    """Repair before the run is resumed, such as room on the disk."""
    status: tuple[int, ...] = (1, 2, 65)
    """Exit statuses that are correct. 0 means that the run goes on to its end."""
    may_lose: int = EVERY
    """Maximum number of steps that may be lost."""
    more: tuple[str, ...] = ()
    """Further overrides of the run."""
    prefix: tuple[str, ...] = ()
    """Command that starts the run, such as `unshare`."""
    survives: str = "the earlier checkpoints"
    """Work that survives, for the table of messages."""
    damages: bool = False
    """Whether the fault itself damages checkpoints."""
    at_resume: bool = False
    """Whether the message comes at the next start, because the fault leaves no process, or damages a checkpoint."""
    answer: Cause = nothing
    """Action as soon as the output names the fault, for a run that would wait forever."""
    then: Cause | None = None
    """Second repair, after a resumed run with `at_resume` has failed as it must."""
    loses_all: bool = False
    """Whether the fault removes all checkpoints, so that the resumed run begins again and no row tells the steps."""
    loses_rows: bool = False
    """Whether rows of `metrics.jsonl` may be missing at the end."""
    needs: Callable[[], str] = lambda: ""
    """Reason why this machine cannot cause the fault; empty if it can."""
    limit: float = LIMIT
    """Seconds that the run may take from the fault to its end."""
    trial: "Trial | None" = None
    """Trial of a fault after which the end of the run differs from the undisturbed run of the layout by design. None
    for the usual trial.
    """
    compared: str = ""
    """Note beside "same bits" about the comparison of such a trial."""


@dataclass
class Row:
    """Result of one trial."""

    fault: Fault
    seconds: float | None = None
    """Seconds from the fault until its message was complete; None without a message."""
    right: bool | None = None
    """Whether the message names what it must name; None if no process is left to say something."""
    lost: int | None = None
    same: bool | None = None
    """Whether the end of the run is bit by bit that of the undisturbed run, or agrees as `Fault.compared` says."""
    status: int | None = None
    message: str = ""
    problems: list[str] = field(default_factory=list)
    skipped: str = ""

    def lose(self, steps: int) -> None:
        """Note the steps that the run has to repeat."""
        self.lost = max(0, steps)
        if self.lost > self.fault.may_lose:
            self.problems.append(f"at most {self.fault.may_lose} steps may be lost, but {self.lost} are")

    @property
    def is_well(self) -> bool:
        """Whether all checks passed."""
        return bool(self.skipped) or not self.problems

    def to_json(self) -> dict[str, Any]:
        """Return the figures as values for JSON."""
        fault = {"name": self.fault.name, "layout": self.fault.layout}
        return {**fault, **{name: value for name, value in vars(self).items() if name != "fault"}}

    @classmethod
    def from_json(cls, fault: Fault, values: dict[str, Any]) -> "Row":
        """Return the row of a fault that `to_json` has written, perhaps in an earlier version with more fields."""
        own = {field.name for field in fields(cls)} - {"fault"}
        return cls(fault, **{name: value for name, value in values.items() if name in own})


Trial = Callable[[Fault, Scene, random.Random, Row], None]


def try_fault(fault: Fault, scene: Scene, reference: dict[str, str], chance: random.Random) -> Row:
    """Do one trial. The tokens of the run are in place unless the fault removes them."""
    row = Row(fault)
    if reason := fault.needs():
        row.skipped = reason
        return row
    try:
        if fault.trial is not None:
            fault.trial(fault, scene, chance, row)
        else:
            _try_as_usual(fault, scene, reference, chance, row)
    finally:
        scene.shim.set()
        scene.stop_all()
    return row


def _try_as_usual(fault: Fault, scene: Scene, reference: dict[str, str], chance: random.Random, row: Row) -> None:
    """Cause the fault, resume the run, and compare its end with the undisturbed run."""
    hit(fault, scene, chance, row)
    done = scene.steps_done() if scene.status else STEPS
    fault.cure(scene, chance)
    scene.shim.set()
    if fault.then is not None:
        resume(fault, scene, row)
        fault.then(scene, chance)
        resume(None, scene, row)
    elif scene.status:
        resume(fault if fault.at_resume else None, scene, row)
    if not row.problems or scene.status == 0:
        _compare(fault, scene, reference, done, row)


def hit(fault: Fault, scene: Scene, chance: random.Random, row: Row) -> None:
    """Start the run, cause the fault, watch the run to its end, and check the checkpoints that are left."""
    _cause(fault, scene, chance, row)
    _check_remains(fault, scene, row)


def _cause(fault: Fault, scene: Scene, chance: random.Random, row: Row) -> None:
    """Start the run, cause the fault, and watch the run to its end."""
    if fault.place is None:
        fault.cause(scene, chance)
    scene.start(fault.place, fault.prefix)
    began = time.monotonic()
    if fault.place is not None:
        if not scene.has_met(LIMIT):
            row.problems.append(f"the run must reach {fault.place.function}, but does not: {scene.told()[-600:]}")
            return
        began = time.monotonic()
        fault.cause(scene, chance)
        scene.go_on()
    _watch(fault, scene, began, row)
    row.status = scene.status
    if not fault.at_resume:
        _judge(fault, scene, row)
    if scene.status is None:
        row.problems.append(f"the run must end, but hangs for {fault.limit:.0f} s: {scene.told()[-600:]}")
    elif scene.status not in fault.status:
        row.problems.append(f"the exit status must be one of {fault.status}, but is {scene.status}: "
                            f"{scene.told()[-1500:]}")  # fmt: skip
    if scene.status is not None and scene.outlives():
        row.problems.append("no rank may outlive the command, but one does")


def _watch(fault: Fault, scene: Scene, began: float, row: Row) -> None:
    """Wait for the end of the run, and note when the output names the fault."""
    while True:
        ended = scene.has_ended(0.05)
        told = scene.told()
        if row.seconds is None and fault.named and all(re.search(text, told, re.DOTALL) for text in fault.named):
            row.seconds = time.monotonic() - began
            fault.answer(scene, random.Random())
        if ended or time.monotonic() - began > fault.limit:
            break
    if "Traceback" in told:
        row.problems.append(f"the output must have no traceback, but has one: {told[-3000:]}")


def _judge(fault: Fault, scene: Scene, row: Row) -> None:
    """Note whether the output of the latest start names what it must name."""
    if fault.named:
        told, row.right = scene.told(), row.seconds is not None
        row.message = message_of(told)
        if not row.right:
            missing = [text for text in fault.named if not re.search(text, told, re.DOTALL)]
            row.problems.append(f"the output must name {missing}, but does not: {told[-1500:]}")


def _check_remains(fault: Fault, scene: Scene, row: Row) -> None:
    """Check that every checkpoint that the fault has left is whole."""
    if fault.damages or not scene.checkpoints.is_dir():
        return
    for folder in list_checkpoints(scene.checkpoints):
        for damage in find_damage(folder):
            row.problems.append(f"a checkpoint must be whole or absent, but {damage}")


def resume(fault: Fault | None, scene: Scene, row: Row) -> None:
    """Resume the run. With `fault`, this start must name the fault."""
    scene.start()
    if fault is not None:
        _watch(fault, scene, time.monotonic(), row)
        _judge(fault, scene, row)
    if not scene.has_ended(LIMIT):
        row.problems.append(f"the resumed run must end, but hangs: {scene.told()[-600:]}")
    elif scene.status and (fault is None or fault.then is None):
        row.problems.append(f"the resumed run must end well, but ends with {scene.status}: {scene.told()[-1500:]}")


def _compare(fault: Fault, scene: Scene, reference: dict[str, str], done: int, row: Row) -> None:
    """Compare the end of the run with the undisturbed run, and count the lost steps."""
    row.lose(done - scene.first_step() if row.status else 0)
    end = scene.end()
    require_same(end, reference, row, compared=end.keys() if fault.loses_rows else reference.keys())


def require_same(
    end: Mapping[str, str], other: Mapping[str, str], row: Row, *, compared: Iterable[str], run: str = "undisturbed"
) -> None:
    """Note whether the ends of two runs (`Scene.end`) agree in the entries `compared`."""
    different = sorted(name for name in compared if end.get(name) != other.get(name))
    row.same = not different
    if different:
        row.problems.append(f"the end must be that of the {run} run, but differs: {', '.join(different)[:200]}")


def message_of(told: str) -> str:
    """Return the message that a run has printed: the last of Crosscut's own, up to an empty line or a frame."""
    lines = told.strip().splitlines()
    starts = [i for i, line in enumerate(lines) if _OWN.match(line)]
    if not starts:
        return ""
    report = lines[starts[-1] : starts[-1] + 8]
    end = next(
        (i for i, line in enumerate(report) if line.startswith(("PYTHON STACK", "\u256d", "step "))), len(report)
    )
    return " ".join(" ".join(report[:end]).split())
