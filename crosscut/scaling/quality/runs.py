"""Training runs of a study, each a `crosscut train` in a process of its own.

A run has its file, its folder and its log beside each other: `large-seed-1.toml`, `large-seed-1/` and
`large-seed-1.log`. The file holds all settings. A later start of the study keeps a run that has ended, and continues
any other run from its last checkpoint, but only if the file has the same settings. Nothing is removed.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from crosscut.config import ConfigError, Layout, RunConfig, RunStopped, TrainingError, load_run, write_toml, write_whole
from crosscut.config.checks import shown
from crosscut.config.system.files import open_own, read_small
from crosscut.config.system.machine import available_cores
from crosscut.config.system.terminal import echo
from crosscut.config.system.wording import counted
from crosscut.data import Tokens, prepare
from crosscut.evaluation.progress import Bar, progress
from crosscut.logbook.contents import read_metrics, read_summary
from crosscut.planner.compute import flops_per_step
from crosscut.planner.muon import muon_flops
from crosscut.serving.processes import importing_crosscut
from crosscut.training.driving.preparation import with_vocabulary
from crosscut.training.resuming import identity_of

_TOKENS_FILE = "tokens.sha256"
"""File of a study's output with the hash of the tokens of its runs."""

_SECONDS_BETWEEN_LOOKS = 1.0

_SECONDS_TO_STOP = 120.0
"""Time in which a run that was asked to stop must have written its checkpoint."""

_DIVERGED = ("must be finite", "The loss scale must stay at or above")
"""Words of the errors with which a run ends whose loss or gradient is not finite."""

_LAST_LINES = 5
"""Number of lines of a log that the error about a failed run repeats."""


def prepare_tokens(run: RunConfig, output: Path) -> Tokens:
    """Prepare the tokens that all runs of a study share, by default in the folder `tokens` of the output. Raises
    `ConfigError` if an earlier start had other tokens, and the errors of `data.prepare`.
    """
    tokens = prepare(run.data, output / "tokens", seed=run.training.seed)
    own = str(identity_of(run, tokens)["data.tokens"])

    def told(known: str) -> str:
        return (
            f"`--output` must be of runs on the same tokens (sha256 {own}), but those in `{output}` were trained on "
            f"others ({shown(known)}). Choose another `--output`."
        )

    require_same(output / _TOKENS_FILE, own, told)
    return tokens


def require_same(file: Path, own: str, told: Callable[[str], str]) -> None:
    """Write a value to a file of a study's output. Raises `ConfigError` if an earlier start wrote another one. `told`
    makes the message from that value.
    """
    if file.is_file() and (known := read_small(file).strip()) != own:
        raise ConfigError(told(known))
    write_whole(file, f"{own}\n")


def run_in(output: Path, name: str, run: RunConfig, tokens: Tokens) -> RunConfig:
    """Return the run with the study's tokens and a folder in the study's output, which also holds its checkpoints.
    Raises `ConfigError` if the model's vocabulary is too small for the tokens.
    """
    data = run.data if run.data.mixture else replace(run.data, text=(), tokens=str(tokens.path))
    folder = replace(run.output, folder=str(output / "runs" / name))
    return with_vocabulary(
        replace(run, data=data, output=folder, checkpoint=replace(run.checkpoint, folder="")), tokens
    )


def step_flops(run: RunConfig) -> int:
    """FLOPs of one step over all ranks. Muon's products count once, although several ranks may repeat them."""
    return flops_per_step(run) + muon_flops(replace(run, layout=Layout()))


def has_diverged(run: RunConfig) -> bool:
    """Whether the run has ended because its loss or its gradient was not finite."""
    end = _end_of_log(run)
    return any(words in end for words in _DIVERGED)


def train_all(runs: Sequence[RunConfig], *, at_once: int, may_diverge: bool = False) -> None:
    """Train runs, `at_once` at a time, in their order. Runs that have ended in an earlier start are kept. With
    `may_diverge`, a run whose loss is not finite has ended, too.

    On Ctrl-C or SIGTERM, the runs write checkpoints, and `RunStopped` is raised. Raises `ConfigError` if the folder of
    a run holds something else, before a run starts, and `TrainingError` if a run fails.
    """
    record_runs(runs)
    waiting = [run for run in runs if not _has_ended(run, may_diverge=may_diverge)]
    kept = len(runs) - len(waiting)
    if kept:
        echo(f"Kept from an earlier start: {kept} of {counted(len(runs), 'run')}.", err=True)
    if not waiting:
        return
    work = {run.output.folder: _Work(run) for run in waiting}
    total = sum(one.left for one in work.values())
    size = f"{counted(len(waiting), 'run')}, {total / 1e3:,.2f} TFLOP in all, {at_once} at a time"
    with (
        progress(Bar("training", True, size, unit="GFLOP"), max(1, total)) as advance,
        _Processes(at_once, may_diverge=may_diverge) as processes,
    ):
        done = 0
        while waiting or processes.running:
            while waiting and len(processes.running) < at_once:
                processes.start(waiting.pop(0))
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            made = sum(one.made() for one in work.values())
            advance(made - done)
            done = made
            for run in processes.ended():
                echo(f"{Path(run.output.folder).name}: {_told(run)}", err=True)


def record_runs(runs: Sequence[RunConfig]) -> None:
    """Write the file of each run. Raises `ConfigError`, before a file is written, if a run's folder holds something
    else, such as a run with other settings.
    """
    new = [run for run in runs if _is_new(run)]
    for run in new:
        _file(run).parent.mkdir(parents=True, exist_ok=True)
        write_toml(run, _file(run))


def _is_new(run: RunConfig) -> bool:
    """Whether nothing is known of a run. Raises `ConfigError` for something else in the place of the run."""
    file, folder = _file(run), Path(run.output.folder)
    if not os.path.lexists(file):
        if os.path.lexists(folder) and not (folder.is_dir() and not any(folder.iterdir())):
            raise ConfigError(
                f"`--output` must be a new folder or that of an earlier start, but `{folder}` exists without the file "
                f"`{file.name}` of a run. Choose another `--output`."
            )
        return True
    for name, value, kept in _differences(run, load_run(file)):
        raise ConfigError(
            f"`{name}` must be {shown(kept)}, as in the run in `{folder}` of an earlier start, but is {shown(value)}. "
            "Choose another `--output` for other settings."
        )
    return False


def _differences(run: RunConfig, kept: RunConfig) -> Iterator[tuple[str, object, object]]:
    """Yield the settings in which a run differs from an earlier start, with both values. The folders may differ: the
    output may have been moved.
    """
    moved = replace(
        kept,
        output=replace(kept.output, folder=run.output.folder),
        data=replace(kept.data, tokens=run.data.tokens),
    )
    ours, theirs = (dict(_flat(asdict(one))) for one in (run, replace(moved, recipe=run.recipe)))
    yield from (
        (name, ours.get(name), theirs.get(name)) for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)
    )


def _flat(table: Mapping[str, object], before: str = "") -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _file(run: RunConfig) -> Path:
    folder = Path(run.output.folder)
    return folder.with_name(f"{folder.name}.toml")


def _log(run: RunConfig) -> Path:
    folder = Path(run.output.folder)
    return folder.with_name(f"{folder.name}.log")


def _end_of_log(run: RunConfig) -> str:
    """Return the last lines of a run's log, without the frames of progress bars. Empty if there is no log."""
    with suppress(OSError, UnicodeDecodeError):
        lines = [line.rpartition("\r")[2].strip() for line in read_small(_log(run)).splitlines()]
        return "\n".join([line for line in lines if line][-_LAST_LINES:])
    return ""


def _has_ended(run: RunConfig, *, may_diverge: bool) -> bool:
    summary = read_summary(Path(run.output.folder)) or {}
    return summary.get("steps") == run.training.steps or (may_diverge and has_diverged(run))


def _told(run: RunConfig) -> str:
    """Describe the end of a run."""
    summary = read_summary(Path(run.output.folder))
    return "diverged" if summary is None else f"validation loss {summary['validation_loss_after']:.4f}"


class _Work:
    """Work of a run, in billions of FLOPs."""

    def __init__(self, run: RunConfig) -> None:
        self._folder = Path(run.output.folder)
        self._each = step_flops(run) / 1e9
        self._before = self._steps()
        self.left = round((run.training.steps - self._before) * self._each)
        """Work that is left at this start."""

    def made(self) -> int:
        """Work that this start has done."""
        return min(self.left, max(0, round((self._steps() - self._before) * self._each)))

    def _steps(self) -> int:
        rows = read_metrics(self._folder)
        return int(rows[-1]["step"]) if rows else 0


class _Processes:
    """Processes of runs. At the end of the context, those that still train stop with a checkpoint."""

    def __init__(self, at_once: int, *, may_diverge: bool) -> None:
        self.running: list[tuple[RunConfig, subprocess.Popen[bytes]]] = []
        self._at_once = at_once
        self._may_diverge = may_diverge

    def start(self, run: RunConfig) -> None:
        """Start a run, or continue it from its last checkpoint."""
        threads = max(1, available_cores() // (self._at_once * run.layout.world_size))
        where = (f"output.folder={run.output.folder}", f"data.tokens={run.data.tokens}")  # the output may have moved
        command = [sys.executable, "-P", "-m", "crosscut", "train", str(_file(run)), "--resume", "auto", *where]
        with open_own(_log(run), "wb") as log:
            process = subprocess.Popen(  # noqa: S603 - this Python with our own program
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={"OMP_NUM_THREADS": str(threads), **os.environ, **importing_crosscut()},
            )
        self.running.append((run, process))

    def ended(self) -> list[RunConfig]:
        """Return the runs that have ended since the last call. Raises `TrainingError` if one has failed."""
        ended = [(run, process) for run, process in self.running if process.poll() is not None]
        self.running = [one for one in self.running if one not in ended]
        for run, process in ended:
            if process.returncode and not (self._may_diverge and has_diverged(run)):
                raise TrainingError(
                    f"Each run must end well, but `{run.output.folder}` ended with status {process.returncode}. The "
                    "other runs are stopped with checkpoints. Start the same command again to continue. The log "
                    f"`{_log(run)}` ends with:\n{_end_of_log(run)}"
                )
        return [run for run, _ in ended]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.running:
            return
        echo("The runs write checkpoints and stop.", err=True)
        try:
            for _, process in self.running:
                process.send_signal(signal.SIGTERM)
            end = time.monotonic() + _SECONDS_TO_STOP
            for _, process in self.running:
                process.wait(max(0.0, end - time.monotonic()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt, SystemExit):
            for _, process in self.running:
                process.kill()
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise RunStopped(
                "The study has stopped. Start the same command again to continue: finished runs are kept, and the "
                "others continue from their last checkpoints.",
                interrupted=isinstance(error, KeyboardInterrupt),
            ) from None
