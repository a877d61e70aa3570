"""One run of a tiny model in processes of its own, from the outside: start, meet, watch, kill, and compare."""

import hashlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil

from benchmarks.faulting.inside import GO, MET, Place
from benchmarks.faulting.shim import Shim
from benchmarks.recovery.damages import files_of
from crosscut.checkpoint import list_checkpoints
from crosscut.checkpoint.format.manifest import MANIFEST_FILE

STEPS, EVERY = 12, 4
"""Steps of a run, and steps between two checkpoints."""
LAYOUTS = {
    "tensor 2": ("layout.tensor=2",),
    "data 2": ("layout.tensor=1", "layout.data=2"),
    "pipeline 2": ("layout.tensor=1", "layout.pipeline=2"),
    "context 2": ("layout.tensor=1", "layout.context=2"),
}
RUN = (
    "recipe=small", "model.num_layers=2", "model.hidden_size=32", "model.num_heads=4", "model.max_sequence_length=64",
    "data.vocab_size=300", "training.batch_size=4", "training.micro_batch_size=1", "training.sequence_length=32",
    "training.validation_sequences=8", "training.validate_every=6", f"training.steps={STEPS}", "training.device=cpu",
    f"checkpoint.every={EVERY}", "checkpoint.keep=10", "optimizer.warmup_steps=1", "output.sample_tokens=5",
)  # fmt: skip
SECONDS_TO_END = 10.0
"""Seconds within which all processes of a run must end after its first process has ended."""
_REPOSITORY = Path(__file__).parents[2]


class Nursery:
    """Process that forks the `crosscut` commands (`command.py`), with the library of faults in each of them."""

    def __init__(self, shim: Shim) -> None:
        path = os.pathsep.join([str(_REPOSITORY), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        self.environment = {**os.environ, **shim.environment, "PYTHONPATH": path}
        self.command = [sys.executable, "-m", "benchmarks.faulting.command"]
        self._process = subprocess.Popen(
            [*self.command, "--serve"],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self._rest = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.terminate()
        self._process.wait()

    def begin(self, job: Mapping[str, Any]) -> int:
        """Start a job and return the number of its process."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        line = self.answer(120)
        if line is None:
            raise SystemExit("faults: the process that forks the runs must answer, but does not.")
        return int(line)

    def answer(self, seconds: float) -> str | None:
        """Return the next line of an answer; None if there is none within the time."""
        assert self._process.stdout is not None
        until = time.monotonic() + seconds
        while b"\n" not in self._rest:
            left = max(0.0, until - time.monotonic())
            if not select.select([self._process.stdout], [], [], left)[0]:
                return None
            more = os.read(self._process.stdout.fileno(), 4096)
            if not more:
                raise SystemExit("faults: the process that forks the runs has ended.")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()


@dataclass
class Scene:
    """Folders of one run, and its processes."""

    root: Path
    layout: str
    nursery: Nursery
    shim: Shim
    text: Path
    more: tuple[str, ...] = ()
    """Overrides of the run, after those of all runs."""
    base: tuple[str, ...] = RUN
    """Config file, or overrides, that all runs of the scene share."""
    run: Path = field(init=False)
    pid: int = 0
    status: int | None = None
    """Exit status of the command; None while it runs. Negative after a signal."""
    fresh: subprocess.Popen[bytes] | None = None
    """Process of a command that is not a fork."""
    undo: list[Callable[[], object]] = field(default_factory=list)
    """Calls that take a fault away from the machine, such as an unmount, after the trial."""

    def __post_init__(self) -> None:
        self.run = self.root / "run"
        self.root.mkdir(parents=True)

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
        variables = place.to_environment(self.root / "meet") if place else {}
        log = self.root / f"log-{len(self.logs())}"
        if prefix:
            command = [*prefix, *self.nursery.command, *self.arguments]
            with log.open("ab") as file:
                self.fresh = subprocess.Popen(
                    command, env={**self.nursery.environment, **variables}, stdout=file, stderr=file,
                    stdin=subprocess.DEVNULL, start_new_session=True,
                )  # fmt: skip
            self.pid = self.fresh.pid
        else:
            self.fresh = None
            job = {"arguments": self.arguments, "environment": {**variables}, "log": str(log)}
            self.pid = self.nursery.begin(job)

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
        return logs[-1].read_text(encoding="utf-8", errors="replace") if logs else ""

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Whether the command ends within `seconds`. Sets `status`."""
        if self.status is not None:
            return True
        if self.fresh is not None:
            with suppress(subprocess.TimeoutExpired):
                self.status = self.fresh.wait(max(seconds, 0.001))
        elif (line := self.nursery.answer(seconds)) is not None:
            self.status = int(line.split()[1])
        return self.status is not None

    def has_met(self, seconds: float) -> bool:
        """Whether a process of the run reaches its place within `seconds`, before the command ends."""
        until = time.monotonic() + seconds
        while not (self.root / "meet" / MET).exists():
            if self.has_ended(0.005) or time.monotonic() > until:
                return (self.root / "meet" / MET).exists()
        return True

    def go_on(self) -> None:
        """Let the process at its place go on."""
        (self.root / "meet" / GO).touch()

    def ranks(self) -> dict[int, psutil.Process]:
        """Return the processes of the ranks that have started and not ended."""
        found = {}
        for path in (self.root / "meet").glob("rank-*"):
            with suppress(psutil.Error, ValueError):
                process = psutil.Process(int(path.read_text(encoding="utf-8")))
                if process.status() != psutil.STATUS_ZOMBIE:
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
        until = time.monotonic() + SECONDS_TO_END
        while self.ranks():
            if time.monotonic() > until:
                return True
            time.sleep(0.02)
        return False

    def rows(self) -> list[dict[str, Any]]:
        """Rows of the run's `metrics.jsonl`."""
        try:
            lines = (self.run / "metrics.jsonl").read_bytes().split(b"\n")
        except OSError:
            return []
        rows = []
        for line in lines[:-1]:
            with suppress(ValueError):
                rows.append(json.loads(line))
        return rows

    def steps_done(self) -> int:
        """Return the last step in `metrics.jsonl`."""
        return max((row["step"] for row in self.rows()), default=0)

    def newest(self) -> Path:
        """Return the folder of the newest checkpoint."""
        return self.checkpoints / list_checkpoints(self.checkpoints)[-1].name

    def first_step(self) -> int:
        """Return the step from which the latest start of a complete run continued."""
        summary = json.loads((self.run / "summary.json").read_text(encoding="utf-8"))
        return int(summary["first_step"])

    def end(self) -> dict[str, str]:
        """SHA-256 of each file of the last checkpoint, and the loss of each step, as texts."""
        hashes = {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in files_of(self.newest())
            if path.name != MANIFEST_FILE
        }
        losses = {f"step {row['step']}": repr(row["loss"]) for row in self.rows() if "loss" in row}
        return {**hashes, **losses}

    def remove(self) -> None:
        """Take the fault away from the machine and remove all folders."""
        for call in self.undo:
            with suppress(OSError):
                call()
        shutil.rmtree(self.root, ignore_errors=True)
