"""Trackers, to which a run sends the figures of `metrics.jsonl` (`output.trackers`).

A tracker is a class with the methods of `Tracker`. Code of your own adds one to `TRACKERS` under a new name. A tracker
that fails during a run is named in one line, and training continues.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from crosscut.config import ConfigError
from crosscut.config.conventions import CONFIG_FILE
from crosscut.config.system.extras import install_packages
from crosscut.config.system.files import parse_toml, read_small
from crosscut.logbook.schema import TENSORBOARD_FOLDER


class Tracker(Protocol):
    """Receiver of the figures of a run, on its first rank. Every method may raise any exception."""

    def figures(self, step: int, values: Mapping[str, float]) -> None:
        """Take figures after `step` steps. All of them are finite."""

    def restart(self, first_step: int) -> None:
        """Drop the figures of step `first_step` and of later steps, because the run has rolled back."""

    def close(self) -> None:
        """End."""


@dataclass(frozen=True)
class TrackerKind:
    """Kind of tracker."""

    package: str
    """Package that must be installed."""
    make: Callable[[Path, int], Tracker]
    """Function that makes a tracker for the run in a folder, which sends figures from a step on."""
    lost: str
    """Beginning of the message about a failure."""
    is_in_folder: bool = False
    """Whether the tracker writes to the run's folder, so that no run starts without it."""


def _tensorboard(folder: Path, first_step: int) -> Tracker:
    from crosscut.training.tracking.board import Board  # slow, so only on the rank that writes

    return Board(folder / TENSORBOARD_FOLDER, first_step=first_step)


class _Run(Protocol):
    """Part of the interface of a run that trackio and W&B share."""

    def log(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Record figures."""

    def finish(self) -> None:
        """End the run."""


class LoggedRun:
    """Run of W&B or of trackio, which have the same functions `init`, `log` and `finish`.

    The tests call this class with a module that records its calls, because neither package is needed to test Crosscut;
    the arguments are those of the two packages' documentation. Neither package can take figures back, so after a
    rollback, W&B ignores the repeated steps and trackio shows them twice.
    """

    def __init__(self, module: str, folder: Path, _first_step: int) -> None:
        settings: Mapping[str, object] = {}
        with suppress(OSError, ValueError):
            settings = parse_toml(read_small(folder / CONFIG_FILE))
        self._run: _Run = import_module(module).init(project="crosscut", name=folder.resolve().name, config=settings)

    def figures(self, step: int, values: Mapping[str, float]) -> None:
        """Send the figures."""
        self._run.log(dict(values), step=step)

    def restart(self, first_step: int) -> None:
        """Do nothing: sent figures cannot be taken back."""

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


_LOGGED = ("trackio", "wandb")

TRACKERS: dict[str, TrackerKind] = {
    "tensorboard": TrackerKind(
        "tensorboard", _tensorboard, f"Some scalars in `{TENSORBOARD_FOLDER}` cannot be written", is_in_folder=True
    ),
    **{name: TrackerKind(name, partial(LoggedRun, name), f"Some figures do not reach `{name}`") for name in _LOGGED},
}
"""Kinds of trackers by the name in `output.trackers`."""


def require_trackers(names: Sequence[str]) -> None:
    """Raise `ConfigError` for a tracker that is unknown or not installed."""
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(f"`output.trackers` must have names among {', '.join(TRACKERS)}, but has `{name}`.")
        package = TRACKERS[name].package
        if find_spec(package) is None:
            raise ConfigError(
                f"`output.trackers` must name installed packages, but `{package}` is not installed. Install it with "
                f"`{install_packages(package)}`, or remove `{name}`."
            )


class Trackers:
    """Trackers of a run that continues from the step `start`. `told` shows a line to the user, the first time that a
    tracker fails. Raises `OSError` if a tracker cannot write to the run's folder.
    """

    def __init__(self, names: Sequence[str], folder: Path, *, start: int, told: Callable[[str], None]) -> None:
        self.told = told
        self._failed = set[str]()
        self._trackers: dict[str, Tracker] = {}
        for name in names:
            first_step = start + 1 if start else 0
            try:
                self._trackers[name] = TRACKERS[name].make(folder, first_step)
            except Exception as error:
                if TRACKERS[name].is_in_folder and isinstance(error, OSError):
                    raise
                self._tell(name, error)

    def figures(self, step: int, values: Mapping[str, float]) -> None:
        """Send figures to all trackers."""
        self._each(lambda tracker: tracker.figures(step, values))

    def restart(self, first_step: int) -> None:
        """Tell all trackers that the run has rolled back."""
        self._each(lambda tracker: tracker.restart(first_step))

    def close(self) -> None:
        """End all trackers."""
        self._each(lambda tracker: tracker.close())

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in self._trackers.items():
            try:
                call(tracker)
            except Exception as error:
                self._tell(name, error)

    def _tell(self, name: str, error: Exception) -> None:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if name not in self._failed:
            self._failed.add(name)
            self.told(f"{TRACKERS[name].lost}: {reason}. Training continues.")
