"""Profile of a few steps (`crosscut train --profile`): the time of each operator and of each part of the model, and the
modules that hold the memory.

After three warm-up steps, the first rank records three steps with `torch.profiler` and the memory of one more step.
Then all ranks time the parts of the model in three steps without the profiler (`part_times`). The run then continues
normally. The recorded steps compute the same results, only more slowly. The device is idle at the start and at the end
of each recorded step. In the first three steps, all other ranks only measure how long their steps took. In a pipeline,
all ranks also record the passes of their stages (`passes`).
"""

import gzip
import json
import os
import re
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from crosscut.config import ConfigError, write_json
from crosscut.config.system.console import figures_table, folded
from crosscut.config.system.deletion import enter_folder, replace_file
from crosscut.config.system.terminal import new_console
from crosscut.logbook.schema import PROFILE_FOLDER
from crosscut.parallel.collectives import gather_to_first
from crosscut.planner.stages import schedule_of_run
from crosscut.training.profiling.part_profile import print_parts, rank_parts, slowest_ranks, write_parts
from crosscut.training.profiling.part_times import PartTimer
from crosscut.training.profiling.passes import PassRecorder, RankPasses, pipeline_steps
from crosscut.training.profiling.pipeline_profile import PASSES_FILE, PipelineProfile
from crosscut.training.profiling.trace import STEP_NAME, Event, Shares, shares_of_steps
from crosscut.training.step import Trainer
from crosscut.training.tracking.measuring import MEASURED_STEP
from crosscut.training.watching.memory_account import Account, account_of
from crosscut.training.watching.throughput import PeakRate, synchronize

TRACE_FILE = "trace.json.gz"
FIGURES_FILE = "profile.json"

WARM_UP_STEPS = MEASURED_STEP
"""Steps before the first recorded one. The last of them counts its messages, whose operators then run twice."""
RECORDED_STEPS = 3
TIMED_STEPS = 3
"""Number of steps in which the parts of the model are timed."""
_TOLD = 10
"""Maximum number of operators, and of holders, in the printed tables."""

_COMPILED_GRAPH = re.compile(r"## Call CompiledFxGraph \w+ ##")
"""PyTorch's name for a compiled graph, which contains a hash of its code."""


@dataclass(frozen=True)
class OperatorTime:
    """Calls and milliseconds per step of an operator, or of a kernel on a GPU."""

    name: str
    calls: float
    milliseconds: float


@dataclass
class Profile:
    """Result of profiling, as `profile.json` stores it."""

    steps: list[Shares]
    """Compute, overlapped, communication and idle time of each recorded step on the first rank."""
    operators: list[OperatorTime]
    """Operators, or the kernels on a GPU, longest first."""
    peak_bytes: int
    """Largest number of bytes that were held at one time during a step."""
    holders: dict[str, int]
    """Bytes of each holder of memory (a module and lines of code, see `memory_account`) at the peak of a step, largest
    first."""
    seconds_of_ranks: list[list[float]] = field(default_factory=list)
    """Seconds of each recorded step on each rank: one list per rank."""
    pipelines: list[dict[str, object]] = field(default_factory=list)
    """Shares of time (`PassShares`) of each recorded step on each rank of each pipeline; empty without a pipeline."""


class Profiler:
    """Profiler of a few steps after the warm-up. Every step of the run must run inside `around`."""

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        self.trainer, self.mesh, self.folder = trainer, trainer.mesh, folder / PROFILE_FOLDER
        self._first: int | None = None
        self._seconds: list[float] = []
        self._passes: list[RankPasses] = []
        self._recorder: torch.profiler.profile | None = None
        self._profile: Profile | None = None
        self._timer = PartTimer(trainer)

    @contextmanager
    def around(self, step: int, peak: PeakRate) -> Iterator[None]:
        """Context in which the caller runs step `step`. The first call starts the warm-up. `peak` is the peak rate of
        all ranks together.
        """
        self._first = step if self._first is None else self._first
        index = step - self._first - WARM_UP_STEPS
        if 0 <= index < RECORDED_STEPS:
            with self._recorded(step, last=index == RECORDED_STEPS - 1):
                yield
        elif index == RECORDED_STEPS:
            with self._accounted():
                yield
        elif RECORDED_STEPS < index <= RECORDED_STEPS + TIMED_STEPS:
            with self._timer.step():
                yield
            if index == RECORDED_STEPS + TIMED_STEPS:
                self._finish(peak)
        else:
            yield

    @contextmanager
    def _recorded(self, step: int, *, last: bool) -> Iterator[None]:
        if self.mesh.is_first_rank and self._recorder is None:
            # Only one cycle is recorded; `acc_events` stops PyTorch 2.11 from warning that it drops earlier cycles.
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise, PyTorch's recorder would print lines
            kinds = torch.profiler.ProfilerActivity
            activities = [kinds.CPU, kinds.CUDA] if self.mesh.device.type == "cuda" else [kinds.CPU]
            self._recorder = torch.profiler.profile(activities=activities, acc_events=True)
            self._recorder.start()
        with self._passes_recorded() if self.mesh.is_staged else nullcontext():
            synchronize(self.mesh.device)
            start = time.perf_counter()
            with torch.profiler.record_function(f"{STEP_NAME} {step + 1}"):
                yield
                synchronize(self.mesh.device)
            self._seconds.append(time.perf_counter() - start)
        if last and self._recorder is not None:
            self._recorder.stop()

    @contextmanager
    def _passes_recorded(self) -> Iterator[None]:
        """Record the passes of the step that the caller runs in the context."""
        self.trainer.observer = recorder = PassRecorder(self.mesh)
        try:
            with recorder.step():
                yield
        finally:
            self.trainer.observer = None
        self._passes.append(recorder.recorded())

    @contextmanager
    def _accounted(self) -> Iterator[None]:
        if not self.mesh.is_first_rank:
            yield
            return
        if self.mesh.device.type == "cpu" and self.trainer.compiler is not None:
            yield  # a dispatch mode does not see the memory of compiled code on the CPU
            self._profile = self._profile_with(Account())
            return
        optimizer = self.trainer.optimizer
        state = [v for values in optimizer.state.values() for v in values.values() if isinstance(v, torch.Tensor)]
        named: dict[str, Sequence[torch.Tensor]] = {"AdamW's moments": state, "parameters": self.trainer.parameters}
        if self.trainer.average is not None:
            named["average of the weights"] = list(self.trainer.average.tensors.values())
        with account_of(named, self.mesh.device) as account, self._before_the_update(account):
            yield
        self._profile = self._profile_with(account)

    def _profile_with(self, account: Account) -> Profile:
        assert self._recorder is not None
        events, operators = self._write_trace(self._recorder), _operators(self._recorder.events())
        peak, holders = account.peak()
        return Profile(steps=shares_of_steps(events), operators=operators, peak_bytes=peak, holders=holders)

    @contextmanager
    def _before_the_update(self, account: Account) -> Iterator[None]:
        """Inside the context, attribute the memory of gradients to a holder named "gradients" as soon as the optimizer
        runs. At the start and at the end of a step, no gradients exist.
        """

        def call_gradients(*_: object) -> None:
            account.call((p.grad for p in self.trainer.parameters if p.grad is not None), "gradients")

        handle = self.trainer.optimizer.register_step_pre_hook(call_gradients)
        try:
            yield
        finally:
            handle.remove()

    def _finish(self, peak: PeakRate) -> None:
        """Gather the seconds, the passes and the parts of all ranks, and write and print the profile on the first rank.
        All ranks must call this method in the same step.
        """
        parts = rank_parts(self.trainer, self._timer, peak)
        gathered = gather_to_first((self._seconds, self._passes, parts))
        self._recorder = None
        if self._profile is None or gathered is None:
            return
        self._profile.seconds_of_ranks = [seconds for seconds, _, _ in gathered]
        pipeline = self._joined([passes for _, passes, _ in gathered]) if self.mesh.is_staged else None
        if pipeline is not None:
            self._profile.pipelines = pipeline.rows()
            pipeline.write_passes(self.folder)
        told = {**asdict(self._profile), "steps": [shares._asdict() for shares in self._profile.steps]}
        write_json(self.folder / FIGURES_FILE, told)
        slowest = slowest_ranks([parts for _, _, parts in gathered])
        write_parts(slowest, peak, self.folder, len(gathered))
        console = new_console()
        print_parts(slowest, peak, console, len(gathered))
        print_profile(self._profile, self.folder, console, pipeline=pipeline)

    def _joined(self, passes: Sequence[Sequence[RankPasses]]) -> PipelineProfile:
        """Join the passes of all ranks. `passes` has one list per rank, with one entry for each recorded step."""
        schedule = schedule_of_run(self.trainer.run.config)
        assert self._profile is not None
        numbers = [shares.step for shares in self._profile.steps]
        return PipelineProfile(
            {number: pipeline_steps(schedule, of_ranks) for number, *of_ranks in zip(numbers, *passes, strict=True)}
        )

    def _write_trace(self, recorder: torch.profiler.profile) -> list[Event]:
        """Write the trace for Perfetto and return its events."""
        enter_folder(self.folder.parent, self.folder.name)
        with tempfile.TemporaryDirectory(dir=self.folder) as temporary:
            plain, packed = Path(temporary) / "trace.json", Path(temporary) / TRACE_FILE
            recorder.export_chrome_trace(str(plain))
            with plain.open("rb") as source, gzip.open(packed, "wb") as target:
                shutil.copyfileobj(source, target)
            replace_file(packed, self.folder / TRACE_FILE)
            events: list[Event] = json.loads(plain.read_text(encoding="utf-8"))["traceEvents"]
        return events


def require_steps(num_left: int) -> None:
    """Raise `ConfigError` if a run has fewer steps left than a profile needs."""
    needed = WARM_UP_STEPS + RECORDED_STEPS + 1 + TIMED_STEPS
    if num_left < needed:
        raise ConfigError(
            f"`training.steps` must leave at least {needed} steps for --profile, but leaves {num_left}. Train for more "
            "steps, or remove --profile."
        )


def _operators(events: Iterable[FunctionEvent]) -> list[OperatorTime]:
    """Return the operators inside the recorded steps, longest first; on a GPU, only the kernels."""
    steps = [e.time_range for e in events if e.name.startswith(STEP_NAME) and e.device_type == DeviceType.CPU]
    inside = [
        e
        for e in events
        if not e.name.startswith(STEP_NAME)
        and any(step.start <= e.time_range.start < step.end for step in steps)
        and not e.is_user_annotation
    ]
    kernels = [e for e in inside if e.device_type != DeviceType.CPU]
    microseconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for event in kernels or inside:
        name = _COMPILED_GRAPH.sub("compiled graph", event.name)
        calls[name] += 1
        microseconds[name] += event.time_range.elapsed_us() if kernels else event.self_cpu_time_total
    return [
        OperatorTime(name, calls[name] / len(steps), microseconds[name] / 1e3 / len(steps))
        for name in sorted(microseconds, key=microseconds.__getitem__, reverse=True)
    ]


def print_profile(profile: Profile, folder: Path, console: Console, *, pipeline: PipelineProfile | None = None) -> None:
    """Print how the time of each step is divided, the operators that take longest, and the tensors and modules that
    hold the most memory. With a pipeline, also print how the time of each of its ranks is divided.
    """
    shares = figures_table(folded("step"), "seconds", "compute", "overlapped", "communication", "idle")
    for step in profile.steps:
        parts = (step.compute, step.overlapped, step.communication, step.idle)
        shares.add_row(str(step.step), f"{step.seconds:.3f}", *(f"{part:.1%}" for part in parts))
    console.print(shares)
    if len(profile.seconds_of_ranks) > 1:
        means = [sum(seconds) / len(seconds) for seconds in profile.seconds_of_ranks]
        slowest = max(range(len(means)), key=means.__getitem__)
        console.print(
            f"seconds per step: {min(means):.3f} on the fastest rank, "
            f"{max(means):.3f} on the slowest rank (rank {slowest})\n"
        )
    if pipeline is not None:
        pipeline.print(figures_table(folded("rank"), "stages", "computing", "bubble", "waiting", "rest"), console)
    total = sum(operator.milliseconds for operator in profile.operators)
    longest = figures_table(folded("operator"), "calls", "ms", "share")
    for operator in profile.operators[:_TOLD]:
        ms = operator.milliseconds
        longest.add_row(Text(operator.name[:80]), f"{operator.calls:g}", f"{ms:,.2f}", f"{ms / total:.1%}")
    console.print(longest)
    if profile.holders:
        console.print(_holders(profile))
    else:
        console.print("holders of memory: unknown, because layers on the CPU are compiled. Set training.compile=off.\n")
    passes = "" if pipeline is None else f", {PASSES_FILE}"
    text = f"{folder}/: {TRACE_FILE} (open it at ui.perfetto.dev), {FIGURES_FILE}, parts.json{passes}"
    console.print(text, highlight=False, soft_wrap=True)


def _holders(profile: Profile) -> Table:
    held = figures_table(folded(f"holder at the peak of {profile.peak_bytes / 2**20:,.1f} MiB"), "MiB", "share")
    for holder, size in list(profile.holders.items())[:_TOLD]:
        held.add_row(Text(holder), f"{size / 2**20:,.1f}", f"{size / profile.peak_bytes:.1%}")
    return held
