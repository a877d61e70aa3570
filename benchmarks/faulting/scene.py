"""One run of a tiny model in processes of its own, from the outside: start, meet, watch, kill, and compare."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

from benchmarks.commands import environment_here
from benchmarks.faulting.command import fork
from benchmarks.faulting.inside import GO, MET, Place, to_environment
from benchmarks.faulting.shim import Shim
from benchmarks.processes import is_running, told_in, wait_until
from benchmarks.recovery.runs import LAYOUTS, TINY, checkpoints_of, digests, losses_of, steps_done

STEPS, EVERY = 12, 4
"""Steps of a run, and steps between two checkpoints."""
RUN = (
    *TINY, "training.micro_batch_size=1", "training.validate_every=6", f"training.steps={STEPS}",
    f"checkpoint.every={EVERY}", "checkpoint.keep=10", "output.sample_tokens=5",
)  # fmt: skip
SECONDS_TO_END = 10.0
"""Seconds within which all processes of a run must end after its first process has ended."""
COMMAND = (sys.executable, "-m", "benchmarks.faulting.command")
"""The `crosscut` command with places for faults."""


@dataclass
class Scene:
    """Folders of one run, and its processes."""

    root: Path
    layout: str
    forked: bool
    """Whether each start of the run is a fork (`command.start_forking`), and not a new process."""
    shim: Shim | None
    text: Path
    more: tuple[str, ...] = ()
    """Overrides of the run, after those of all runs."""
    base: tuple[str, ...] = RUN
    """Config file, or overrides, that all runs of the scene share."""
    run: Path = field(init=False)
    pid: int = 0
    status: int | None = None
    """Exit status of the command; None while it runs. Negative after a signal."""
    process: subprocess.Popen[bytes] | BaseProcess | None = None
    """Process of the latest start."""
    undo: list[Callable[[], object]] = field(default_factory=list)
    """Calls that take a fault away from the machine, such as an unmount, after the trial."""

    def __post_init__(self) -> None:
        self.run = self.root / "run"
        self.root.mkdir(parents=True)

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that load the library of faults, if there is one."""
        return self.shim.environment if self.shim else {}

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints."""
        return self.run / "checkpoints"

    @property
    def tokens(self) -> Path:
        """Folder of the run's tokens."""
        return self.root / "tokens"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of `crosscut` that start or resume the run."""
        own = (f"data.text={self.text}", f"data.tokens={self.tokens}", f"output.folder={self.run}")
        return "train", *self.base, *LAYOUTS.get(self.layout, ()), *own, *self.more, "--resume", "auto"

    def start(self, place: Place | None = None, prefix: tuple[str, ...] = ()) -> None:
        """Start or resume the run. With `prefix`, such as `unshare -m`, the run is no fork but a new process."""
        self.status = None
        (self.root / "meet").mkdir(exist_ok=True)
        for path in (self.root / "meet").iterdir():
            path.unlink()
        variables = to_environment(place, self.root / "meet")
        log = self.root / f"log-{len(self.logs())}"
        if self.forked and not prefix:
            self.process = fork(self.arguments, variables, log)
        else:
            with log.open("ab") as file:
                self.process = subprocess.Popen(
                    [*prefix, *COMMAND, *self.arguments], env=environment_here(**self.variables, **variables),
                    stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True,
                )  # fmt: skip
        self.pid = self.process.pid

    def start_beside(self, *more: str) -> None:
        """Start a new run with further overrides, in a folder of its own. This run is the run of the scene from now
        on.
        """
        self.run, self.more = self.root / "second run", (*self.more, *more)
        self.start()

    def logs(self) -> list[Path]:
        """List the outputs of all starts, oldest first."""
        return sorted(self.root.glob("log-*"))

    def told(self) -> str:
        """Return the output of the latest start."""
        logs = self.logs()
        return told_in(logs[-1], most=1 << 24) if logs else ""

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Whether the command ends within `seconds`. Sets `status`."""
        if self.status is None and isinstance(self.process, subprocess.Popen):
            with suppress(subprocess.TimeoutExpired):
                self.status = self.process.wait(max(seconds, 0.001))
        elif self.status is None and self.process is not None:
            self.process.join(seconds)
            self.status = self.process.exitcode
        return self.status is not None

    def has_met(self, seconds: float) -> bool:
        """Whether a process of the run reaches its place within `seconds`, before the command ends."""
        met = self.root / "meet" / MET
        wait_until(lambda: met.exists() or self.has_ended(), seconds)
        return met.exists()

    def go_on(self) -> None:
        """Let the process at its place go on."""
        (self.root / "meet" / GO).touch()

    def ranks(self) -> dict[int, psutil.Process]:
        """Return the processes of the ranks that have started and not ended."""
        found = {}
        for path in (self.root / "meet").glob("rank-*"):
            with suppress(psutil.Error, ValueError):
                process = psutil.Process(int(path.read_text(encoding="utf-8")))
                if is_running(process):
                    found[int(path.name.removeprefix("rank-"))] = process
        return found

    def launcher(self) -> int:
        """Return the number of the process that runs the command, which is a child of a `prefix`."""
        told = self.root / "meet" / "launcher"
        return int(told.read_text(encoding="utf-8")) if told.exists() else self.pid

    def kill(self, *targets: int | str) -> None:
        """SIGKILL ranks by number, and the process that started them by the name `launcher`."""
        ranks = self.ranks()
        for target in targets:
            with suppress(ProcessLookupError, psutil.Error):
                if target == "launcher":
                    os.kill(self.launcher(), signal.SIGKILL)
                elif isinstance(target, int) and target in ranks:
                    ranks[target].kill()

    def stop_all(self) -> None:
        """End everything that is left of a run."""
        self.kill("launcher", *self.ranks())
        self.has_ended(30)

    def outlives(self) -> bool:
        """Whether a rank outlives the command."""
        return not wait_until(lambda: not self.ranks(), SECONDS_TO_END, every=0.02)

    def steps_done(self) -> int:
        """Return the last step in `metrics.jsonl`."""
        return steps_done(self.run)

    def newest(self) -> Path:
        """Return the folder of the newest checkpoint."""
        return list(checkpoints_of(self.run).values())[-1]

    def first_step(self) -> int:
        """Return the step from which the latest start of a complete run continued."""
        summary = json.loads((self.run / "summary.json").read_text(encoding="utf-8"))
        return int(summary["first_step"])

    def end(self) -> dict[str, str]:
        """SHA-256 of each file of the last checkpoint, and the loss of each step, as texts."""
        return {**digests(self.newest()), **{f"step {step}": repr(loss) for step, loss in losses_of(self.run)}}

    def remove(self) -> None:
        """Take the fault away from the machine and remove all folders."""
        for call in self.undo:
            with suppress(OSError):
                call()
        shutil.rmtree(self.root, ignore_errors=True)
