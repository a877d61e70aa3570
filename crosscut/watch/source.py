"""One run of the page: the reader of its files, and its content in the form in which the page shows it."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from crosscut.config.conventions import CONFIG_FILE
from crosscut.logbook.following import RunReader, RunState
from crosscut.logbook.rows import Row
from crosscut.logbook.schema import METRICS_FILE
from crosscut.watch.ranks import told_ranks, told_rates

_MOST_COLUMNS = 240
"""Maximum number of steps at which the loads of the experts are shown."""

_MOST_SAMPLES = 300
"""Maximum number of samples that are shown: the newest ones."""

_WORDS = {
    RunState.KILLED: "no sign of life",
    RunState.STOPPED: "before the end",
    RunState.GONE: "the last figures",
}


def is_run(folder: Path) -> bool:
    """Whether a folder has the files of a run."""
    return (folder / METRICS_FILE).is_file() or (folder / CONFIG_FILE).is_file()


@dataclass
class Points:
    """Points of one figure, and how often points that were there before have changed."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    generation: int = 0

    def become(self, steps: array[int], values: array[float]) -> None:
        """Take over the points of a series, which the reader may have thinned or undone."""
        count = len(self.steps)
        if steps[:count] != self.steps or values[:count].tobytes() != self.values.tobytes():
            self.generation += 1
        self.steps, self.values = steps[:], values[:]


class Source:
    """Content of a run's folder. `refresh` reads what is new."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.series: dict[str, Points] = {}
        """Points of all figures that the run has ever had, by name."""
        self.parts: dict[str, object] = {}
        """Other contents: `config`, `marks`, `samples`, `ranks`, `rates`, `loads`, `summary` and `notes`. A part that
        has not changed stays the same object.
        """
        self.state = RunState.STOPPED
        self._reader = RunReader(folder)

    def refresh(self) -> None:
        """Read what is new. After the folder has disappeared, the last content stays. An error becomes a note on the
        run, because the other runs of the page can be shown.
        """
        try:
            self._read()
        except Exception as error:  # the files may hold anything
            told = f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace").decode()
            self._set("notes", [f"The files in this folder cannot be read ({told}). The figures are the last ones."])

    def _read(self) -> None:
        if self._reader.state is RunState.GONE:
            self.state = RunState.GONE
            return
        changed = self._reader.poll()
        self.state = self._reader.state
        if changed:
            for name in dict.fromkeys((*self.series, *self._reader.series)):
                self._take(name)
            self._set("config", self._reader.config)
            self._set("samples", [_sample(row) for row in self._reader.samples[-_MOST_SAMPLES:]])
            self._set("ranks", told_ranks(self._reader.plan, self._reader.measurements))
            self._set("rates", told_rates(self._reader.measurements))
            self._set("loads", _loads(self._reader.loads))
            self._set("summary", self._reader.summary)
            self._set("notes", list(self._reader.notes.values()))
        self._set("marks", [mark._asdict() for mark in self._reader.marks()])  # a checkpoint changes no file of rows

    def listed(self) -> dict[str, object]:
        """Entry of the list of runs, without its name."""
        config = self.parts.get("config")
        training = config.get("training") if isinstance(config, dict) else None
        training = training if isinstance(training, dict) else {}
        return {
            "folder": str(self.folder),
            "state": self.state.value,
            "state_words": _WORDS.get(self.state, ""),
            "step": self._reader.step,
            "steps": training.get("steps"),
            "tokens_per_sample": training.get("sequence_length"),
        }

    def _take(self, name: str) -> None:
        found = self._reader.series.get(name)
        points = self.series.setdefault(name, Points())
        if found is None:
            points.become(array("q"), array("d"))
        else:
            points.become(found.steps, found.values)

    def _set(self, name: str, content: object) -> None:
        content = _plain(content)
        if self.parts.get(name) != content:
            self.parts[name] = content


def _plain(value: object) -> object:
    """Return a value of JSON: numbers that are not finite become null, and other types texts."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _sample(row: Row) -> dict[str, object]:
    return {name: row[name] for name in ("step", "prompt", "text")}


def _loads(rows: list[Row]) -> dict[str, object] | None:
    """Loads of the experts as multiples of their mean, at some steps evenly spaced. None if the run has no experts."""
    if not rows:
        return None
    rows = [row for row in rows if row["loads"].keys() == rows[-1]["loads"].keys()]
    every = math.ceil(len(rows) / _MOST_COLUMNS)
    chosen = rows[::-1][::every][::-1]
    layers = {layer: [_shares(row["loads"][layer]) for row in chosen] for layer in rows[-1]["loads"]}
    return {"steps": [row["step"] for row in chosen], "layers": layers}


def _shares(loads: list[int]) -> list[float]:
    mean = sum(loads) / len(loads) or 1.0
    return [round(load / mean, 3) for load in loads]
