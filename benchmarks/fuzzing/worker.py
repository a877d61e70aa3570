"""Batches of cases in a process of the pool: draw, build, run, judge, and make new findings smaller."""

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from pathlib import Path

from hypothesis.strategies import SearchStrategy

from benchmarks.fuzzing.cases import BATCH, Case, cases_of, draw
from benchmarks.fuzzing.edits import Edit
from benchmarks.fuzzing.findings import Finding, command_line, judge, keep
from benchmarks.fuzzing.kinds import KINDS, Kind, build
from benchmarks.fuzzing.metadata import run as metadata
from benchmarks.fuzzing.repetition.run import REPETITION, Rates, cases, run_one
from benchmarks.fuzzing.sandbox import Job, Outcome, run

_IMPORTED = ("crosscut", "torch", "pyarrow", "jinja2", "rich", "numpy", "tokenizers", "safetensors", "matplotlib",
             "PIL", "tensorboard")  # fmt: skip
"""Beginnings of the names of modules that the pool imports before the cases run."""


@dataclass
class Figures:
    """Figures of the cases of one kind."""

    cases: int = 0
    seconds: float = 0.0
    longest: float = 0.0
    longest_case: str = ""
    peak: int = 0
    peak_case: str = ""
    findings: dict[tuple[str, str, str], Finding] = field(default_factory=dict)
    rates: dict[str, Rates] = field(default_factory=dict)
    """Figures of the readers, for files that are built by repetition."""

    @property
    def rate(self) -> float:
        """Cases per second."""
        return self.cases / self.seconds if self.seconds else 0.0

    def note(self, name: str, seconds: float, peak: int) -> None:
        """Count one case."""
        self.cases += 1
        if seconds > self.longest:
            self.longest, self.longest_case = seconds, name
        if peak > self.peak:
            self.peak, self.peak_case = peak, name

    def add(self, finding: Finding) -> bool:
        """Count a finding. Returns whether its cause is new."""
        known = self.findings.setdefault(finding.key, finding)
        if known is finding:
            return True
        known.count += finding.count
        return False

    def join(self, other: "Figures") -> None:
        """Add the figures of another batch."""
        self.cases += other.cases
        if other.longest > self.longest:
            self.longest, self.longest_case = other.longest, other.longest_case
        if other.peak > self.peak:
            self.peak, self.peak_case = other.peak, other.peak_case
        for finding in other.findings.values():
            self.add(finding)
        for reader, rates in other.rates.items():
            self.rates.setdefault(reader, Rates()).join(rates)


@dataclass(frozen=True)
class Setting:
    """Settings that all batches of one run of the benchmark share."""

    valid: Path
    """Folder of the valid inputs."""
    scratch: Path
    """Folder for the cases' folders."""
    keep: Path | None
    """Folder for the findings."""
    seed: int
    known: frozenset[tuple[str, str, str]] = frozenset()
    """Causes that other batches have already found. Further findings with these causes are only counted."""
    deadline: float = float("inf")
    """Time, on the clock of `time.monotonic`, at which the batch ends early."""


def run_batch(kind_name: str, batch: int, most: int, setting: Setting) -> Figures:
    """Run the first `most` cases of a batch."""
    kind = KINDS[kind_name]
    prepare_process()
    if kind_name == REPETITION:
        return _run_repeated(cases()[batch * BATCH :][:most], setting)
    if kind_name == metadata.METADATA:
        return _run_metadata(batch * BATCH, most, setting)
    warm_up(kind.name, setting.valid, setting.scratch)
    figures, drawn = Figures(), draw(strategy_of(kind.name, setting.valid), setting.seed, kind.name, batch)[:most]
    for start in range(0, len(drawn), kind.together):
        if time.monotonic() > setting.deadline:
            break
        _run_group(kind, drawn[start : start + kind.together], setting, figures)
    return figures


def _run_repeated(repeated: list[Case], setting: Setting) -> Figures:
    """Run files that are built by repetition. Patterns with a finding are left out in larger files."""
    figures = Figures()
    for case in repeated:
        reader, _, name = case.base.partition(": ")[2].partition(": ")
        slow = {place for _, _, place in (*setting.known, *figures.findings)}
        if time.monotonic() > setting.deadline or f"{reader}: {name}" in slow:
            continue
        found, outcome, rates = run_one(case, setting.scratch)
        figures.note(f"{setting.seed}/{REPETITION}/{case.number}", outcome.processor, outcome.peak)
        figures.rates.setdefault(reader, Rates()).join(rates)
        for finding in found:
            figures.add(finding)
            if setting.keep is not None:
                keep(setting.keep, finding, None)
    return figures


def _run_metadata(first: int, most: int, setting: Setting) -> Figures:
    """Run cases with one edited key."""
    figures = Figures()
    for case in metadata.cases(first + most, setting.seed, setting.scratch)[first:]:
        if time.monotonic() > setting.deadline:
            break
        found, outcome = metadata.run_one(case, setting.seed, setting.scratch)
        figures.note(f"{setting.seed}/{metadata.METADATA}/{case.number}", outcome.seconds, outcome.peak)
        for finding in found:
            if figures.add(finding) and finding.key not in setting.known and setting.keep is not None:
                keep(setting.keep, finding, None)
    return figures


def run_case(case: Case, setting: Setting) -> tuple[list[Finding], Outcome]:
    """Run one case, for a replay."""
    prepare_process()
    if case.kind == REPETITION:
        found, outcome, _ = run_one(case, setting.scratch)
        return found, outcome
    if case.kind == metadata.METADATA:
        return metadata.run_one(case, setting.seed, setting.scratch)
    warm_up(case.kind, setting.valid, setting.scratch)
    with _folder(setting) as folder:
        ((found, outcome),) = _run(KINDS[case.kind], [case], setting, folder)
    return found, outcome


def _run_group(kind: Kind, cases: list[Case], setting: Setting, figures: Figures) -> None:
    with _folder(setting) as folder:
        for case, (found, outcome) in zip(cases, _run(kind, cases, setting, folder), strict=True):
            figures.note(f"{setting.seed}/{kind.name}/{case.number}", outcome.seconds, outcome.peak)
            for finding in found:
                if finding.key in setting.known:
                    figures.add(finding)
                elif figures.add(finding):
                    _publish(kind, finding, setting, figures)


def _publish(kind: Kind, finding: Finding, setting: Setting, figures: Figures) -> None:
    """Make a new finding smaller and keep it. A hang that does not repeat was only a slow machine and is forgotten."""
    smaller = _smaller(kind, finding, setting)
    if smaller is None:
        del figures.findings[finding.key]
        return
    figures.findings[finding.key] = smaller
    if setting.keep is not None:
        with _folder(setting) as folder:
            with suppress(Exception):
                build(kind.base(smaller.case), smaller.case, setting.valid, folder / "case")
            keep(setting.keep, smaller, folder / "case")


def _smaller(kind: Kind, finding: Finding, setting: Setting) -> Finding | None:
    """Leave out edits of the case as long as the case still has the finding."""
    best = _again(kind, finding.case, finding, setting)
    if best is None:
        return None if finding.failure == "hang" else finding  # it needs the cases before it in the same process
    for edit in finding.case.edits if finding.failure != "hang" else ():
        edits = tuple(one for one in best.case.edits if one is not edit)
        if edits and (found := _again(kind, replace(best.case, edits=edits), finding, setting)):
            best = found
    return best


def _again(kind: Kind, case: Case, finding: Finding, setting: Setting) -> Finding | None:
    with _folder(setting) as folder:
        ((found, _),) = _run(kind, [case], setting, folder)
    return next((one for one in found if one.key == finding.key), None)


def _run(kind: Kind, cases: list[Case], setting: Setting, folder: Path) -> Iterator[tuple[list[Finding], Outcome]]:
    """Build and run cases in one fork, and judge each."""
    jobs = []
    for case in cases:
        place = folder / str(case.number)
        jobs.append(Job(place, build(kind.base(case), case, setting.valid, place), case.terminal))
    for case, job, outcome in zip(cases, jobs, run(jobs), strict=True):
        base = kind.base(case)
        failures = judge(outcome, base.statuses, case.terminal)
        if not failures and (accepted := kind.oracle(case, job.folder, setting.valid, outcome)):
            failures = [("accepted", "", accepted)]
        yield [
            Finding(kind=kind.name, failure=failure, place=place or f"crosscut {base.name}", detail=detail, case=case,
                    seed=setting.seed, reproduction=command_line(job.arguments), trace=outcome.trace,
                    output=outcome.output)
            for failure, place, detail in failures
        ], outcome  # fmt: skip


@contextmanager
def _folder(setting: Setting) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=setting.scratch, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@cache
def strategy_of(kind: str, valid: Path) -> SearchStrategy[tuple[str, tuple[Edit, ...]]]:
    """Strategy of a kind's cases."""
    return cases_of(KINDS[kind].bases, valid)


@cache
def prepare_process() -> None:
    """Give this process the environment in which cases run. Its forks inherit it."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NO_COLOR", "FORCE_COLOR", "CROSSCUT_API_KEY"):
        os.environ.pop(name, None)
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "100", "OMP_NUM_THREADS": "1", "HOME": "/nonexistent",
                   "MPLCONFIGDIR": tempfile.gettempdir()}  # fmt: skip
    import torch

    torch.set_num_threads(1)


@cache
def warm_up(kind: str, valid: Path, scratch: Path) -> None:
    """Run every undamaged command of a kind, check how it ends, and import what it imports."""
    setting = Setting(valid, scratch, None, 0)
    for base in KINDS[kind].bases:
        with _folder(setting) as folder:
            case = Case(kind, 1, base.name, ())
            arguments = build(base, case, valid, folder / "case")
            (outcome,) = run([Job(folder / "case", arguments)], longest=60)
        failures = judge(outcome, base.ends_with, "dumb")
        if any(failure != "raw" for failure, *_ in failures):
            sys.exit(f"`{command_line(arguments)}` must end with {base.ends_with}, but: {failures}\n"
                     f"{outcome.trace}{outcome.output.decode(errors='replace')[-2000:]}")  # fmt: skip
        for name in outcome.modules:
            if name.startswith(_IMPORTED):
                with suppress(Exception):
                    import_module(name)
