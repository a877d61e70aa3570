"""Reader of a run's folder that follows the run: each look reads only what was added since the last one.

The reader changes nothing in the folder, and takes no lock. It shows a figure of a step once: rows that a resume or a
rollback has undone disappear with the file that held them.
"""

import time
from bisect import insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import accumulate, pairwise
from math import nan
from pathlib import Path
from typing import NamedTuple

from crosscut.config import ConfigError
from crosscut.config.conventions import CHECKPOINTS_FOLDER, CONFIG_FILE
from crosscut.config.system.files import parse_json, parse_toml
from crosscut.config.system.folder_lock import STALE, last_renewal
from crosscut.config.system.records import from_json
from crosscut.logbook.columns import Columns, read_columns
from crosscut.logbook.rows import RULES, Row, is_header
from crosscut.logbook.schema import (
    LOADS_FILE,
    MEASUREMENTS_FILE,
    METRICS_FILE,
    PLAN_FILE,
    RESTARTS_FILE,
    SAMPLES_FILE,
    SKIPS_FILE,
    SPIKES_FOLDER,
    SUMMARY_FILE,
    VERSION,
)
from crosscut.logbook.series import Series
from crosscut.logbook.skips import SkipRecord
from crosscut.logbook.tail import Tail, Whole

ELAPSED = "elapsed_seconds"
"""Series that the reader adds to the figures: time of all steps so far, in seconds."""
_MOST_ROWS = 2000
"""Maximum number of rows of each kind, apart from figures, that are kept: the newest ones."""
_SKIPS = f"{SPIKES_FOLDER}/{SKIPS_FILE}"


class RunState(Enum):
    """State of a run, as its folder shows it."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    """The run has ended before its last step, and has released its folder."""
    KILLED = "killed"
    """The run has not released its folder, and no longer renews its lock."""
    GONE = "gone"
    """There is no such folder."""


class Mark(NamedTuple):
    """Event at a step of a run."""

    step: int
    kind: str
    """`spike`, `rollback`, `hang`, `collapse`, `restart`, `layout` or `checkpoint`."""
    text: str


class RunReader:
    """Content of a run's folder at the last call of `poll`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.series: dict[str, Series] = {}
        """Figures of `metrics.jsonl` by their keys."""
        self.loads: list[Row] = []
        """Rows of `experts.jsonl`."""
        self.samples: list[Row] = []
        self.measurements: list[Row] = []
        """Rows of `measurements.jsonl`: measured figures of each rank."""
        self.plan: Mapping[str, object] = {}
        """Content of `plan.json`: planned figures of each rank. Empty if there is none."""
        self.summary: Mapping[str, object] = {}
        self.config: Mapping[str, object] = {}
        """Settings, by section. Empty if the file cannot be read."""
        self.notes: dict[str, str] = {}
        """Sentence for the user about each file that cannot be read, by its name."""
        self._events: list[Mark] = []
        self._restarts: list[Row] = []
        self._skips = SkipRecord()
        self._trained = 0
        self._lock: tuple[float, float] | None = None
        self._tails = {name: Tail(folder / name, longest=rule.longest) for name, rule in RULES.items()}
        self._wholes = {name: Whole(folder / name) for name in (PLAN_FILE, SUMMARY_FILE, CONFIG_FILE, _SKIPS)}

    @property
    def bytes_read(self) -> int:
        """Number of bytes read so far."""
        tails, wholes = self._tails.values(), self._wholes.values()
        return sum(one.bytes_read for one in tails) + sum(one.bytes_read for one in wholes)

    @property
    def step(self) -> int:
        """Last step with a row of training."""
        return self._trained

    def poll(self) -> bool:
        """Read what was added since the last call. Returns whether anything has changed."""
        changed = self._read_metrics()
        kept = {
            LOADS_FILE: self.loads, SAMPLES_FILE: self.samples, MEASUREMENTS_FILE: self.measurements,
            RESTARTS_FILE: self._restarts,
        }  # fmt: skip
        for name, rows in kept.items():
            changed |= self._read_rows(name, rows)
        for name, whole in self._wholes.items():
            content = whole.changed()
            if content is not None:
                changed = True
                self._read_whole(name, content)
        return changed

    @property
    def state(self) -> RunState:
        """State of the run now."""
        if not self.folder.is_dir():
            return RunState.GONE
        renewed = last_renewal(self.folder)
        if renewed is None:
            return RunState.FINISHED if self._is_complete() else RunState.STOPPED
        now = time.monotonic()
        if self._lock is None or self._lock[0] != renewed.at:
            age = abs(time.time() - renewed.at) if self._lock is None else 0.0
            self._lock = renewed.at, now - age
        is_alive = renewed.runs is not False and now - self._lock[1] < STALE
        return RunState.RUNNING if is_alive else RunState.KILLED

    def marks(self) -> list[Mark]:
        """Return the events of the run, in the order of their steps."""
        restarts = (Mark(row["step"], "restart", f"continued on {row['after']}") for row in self._restarts)
        return sorted([*self._events, *self._spikes(), *self._layouts(), *self._checkpoints(), *restarts])

    def _is_complete(self) -> bool:
        training = self.config.get("training")
        steps = training.get("steps") if isinstance(training, dict) else None
        is_done = not isinstance(steps, int) or not self._trained or self._trained >= steps
        return bool(self.summary) and steps in (None, self.summary.get("steps")) and is_done

    def _spikes(self) -> Iterator[Mark]:
        for event in self._skips.events:
            yield Mark(event.spike_step, "spike", event.reason)
            yield Mark(event.back_to, "rollback", f"rollback from step {event.spike_step}: {event.reason}")

    def _layouts(self) -> Iterator[Mark]:
        for before, after in pairwise(self.measurements):
            if before["layout"] != after["layout"]:
                yield Mark(after["step"], "layout", f"{before['layout']} before, {after['layout']} from here")

    def _checkpoints(self) -> Iterator[Mark]:
        try:
            names = [path.name for path in (self.folder / CHECKPOINTS_FOLDER).iterdir()]
        except OSError:
            return
        for name in names:
            number = name.removeprefix("step-")
            if name.startswith("step-") and number.isascii() and number.isdecimal():
                yield Mark(int(number), "checkpoint", name)

    def _read_rows(self, name: str, rows: list[Row]) -> bool:
        """Add the new rows of a file to `rows`. Returns whether there are any, or the file is another one."""
        changed = False
        for chunk in self._tails[name].chunks():
            changed = True
            if chunk.is_first:
                rows.clear()
            parsed = (RULES[name].parse(line) for line in chunk.text.splitlines(keepends=True))
            found = [row for row in parsed if row is not None]
            if not self._is_newer(name, found):
                rows += [row for row in found if not is_header(row)]
            del rows[:-_MOST_ROWS]
        return changed

    def _read_metrics(self) -> bool:
        changed = False
        for chunk in self._tails[METRICS_FILE].chunks():
            changed = True
            if chunk.is_first:
                self.series.clear()
                self._events.clear()
                self._trained = 0
            for columns in read_columns(chunk.text):
                if self._is_newer(METRICS_FILE, columns.rows[:1]):
                    continue
                self._add_columns(columns)
        return changed

    def _add_columns(self, columns: Columns) -> None:
        if columns.steps:
            self._undo(columns.steps[0])
            self._trained = columns.steps[-1]
        for name, values in columns.watched.items():
            self._of(name).extend(columns.steps, values)
        if "seconds" in columns.watched:
            self._elapse(columns.steps, columns.watched["seconds"])
        for row in columns.rows:
            self._add_row(row, but=columns.watched)

    def _elapse(self, steps: Sequence[int], seconds: Iterable[float]) -> None:
        series = self._of(ELAPSED)
        before = series.values[-1] if series.values else 0.0
        series.extend(steps, list(accumulate(seconds, initial=before))[1:])

    def _add_row(self, row: Row, *, but: Mapping[str, object]) -> None:
        step = row["step"]
        if is_header(row):
            return
        if "hang_seconds" in row:
            text = f"no progress for {row['hang_seconds']} s; the ranks wait for rank {row.get('hang_rank')}"
            insort(self._events, Mark(step, "hang", text))
        elif "idle_expert" in row:
            text = f"expert {row['idle_expert']} of layer {row.get('idle_layer')} gets no tokens"
            insort(self._events, Mark(step, "collapse", text))
        else:
            if "loss" in row and not but:
                self._undo(step)
                self._trained = step
                self._elapse((step,), (row.get("seconds") or 0.0,))
            for name, value in row.items():
                if name != "step" and name not in but:
                    series = self._of(name)
                    if not series.steps or series.steps[-1] < step:
                        series.extend((step,), (nan if value is None else float(value),))

    def _of(self, name: str) -> Series:
        return self.series.setdefault(name, Series())

    def _undo(self, step: int) -> None:
        """Remove the figures of a training step that has been done again, and of all later steps."""
        if step <= self._trained:
            for series in self.series.values():
                series.undo(step)
            self._events = [event for event in self._events if event.step < step]

    def _is_newer(self, name: str, rows: Sequence[Row]) -> bool:
        """Whether a newer Crosscut wrote the file, which its first row says. If so, a note says so."""
        if rows and is_header(rows[0]):
            self._note_version(name, rows[0].get("version"))
        return name in self.notes

    def _note_version(self, name: str, version: object) -> None:
        self.notes.pop(name, None)
        if isinstance(version, int | float) and version > VERSION:
            self.notes[name] = (
                f"`{name}` is not shown: a newer Crosscut wrote it (version {version:g}; this one reads version "
                f"{VERSION}). Use that Crosscut."
            )

    def _read_whole(self, name: str, content: bytes) -> None:
        parse = parse_toml if name == CONFIG_FILE else parse_json
        table: Mapping[str, object] = {}
        self.notes.pop(name, None)
        if content:
            try:
                found = parse(content.decode("utf-8"))
                if not isinstance(found, dict):
                    raise ValueError("it is not an object")
                table = found
            except ValueError as error:
                self.notes[name] = f"`{name}` cannot be read: {error}."
        self._note_or_keep(name, table)

    def _note_or_keep(self, name: str, table: Mapping[str, object]) -> None:
        if name not in self.notes and name != CONFIG_FILE:
            self._note_version(name, table.get("version"))
        table = {} if name in self.notes else table
        if name == PLAN_FILE:
            self.plan = table
        elif name == SUMMARY_FILE:
            self.summary = table
        elif name == CONFIG_FILE:
            self.config = table
        else:
            try:
                self._skips = from_json(SkipRecord, table)
            except (ValueError, ConfigError) as error:
                self._skips = SkipRecord()
                self.notes[name] = f"`{name}` cannot be read: {error}."
