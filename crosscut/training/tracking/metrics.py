"""Metrics of a training run: a progress bar, `metrics.jsonl`, `experts.jsonl` and trackers such as TensorBoard.

Only the first rank writes; on the other ranks, `Metrics` does nothing. A resumed run appends to the existing files,
after removing the rows of steps later than its checkpoint. The validation row of the checkpoint's step is kept and not
written again.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Self

from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from crosscut.config import OutputConfig, TrainingError
from crosscut.config.system.terminal import new_console
from crosscut.config.system.wording import RATES, short
from crosscut.evaluation import Score
from crosscut.evaluation.score_table import in_a_line
from crosscut.logbook.rows import Row, RowFile
from crosscut.logbook.schema import LOADS_FILE, MEASUREMENTS_FILE, METRICS_FILE, SAMPLES_FILE
from crosscut.training.loads.record import LoadsRecord
from crosscut.training.loads.step_loads import StepLoads
from crosscut.training.tracking.trackers import Trackers

_ROWS, _LOADS = f"Some rows of `{METRICS_FILE}`", f"Some rows of `{LOADS_FILE}`"
"""Part of the message about a disk error: the things that are lost."""
_SECONDS_BETWEEN_LINES = 10.0

Value = float | int | None


class Metrics:
    """Metrics of one run. Use the object as a context manager: leaving the context closes the files.

    `start` is the step from which the run continues. Rows of later steps, written by an earlier start of the run, are
    removed. `scored` says which weights the validation scores belong to, such as "of the averaged weights". If `scored`
    is empty, the scores belong to the weights of the last step. Raises `TrainingError` if the files cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        num_steps: int,
        start: int,
        active: bool,
        scored: str = "",
        trackers: Sequence[str] = OutputConfig.trackers,
    ) -> None:
        self.active = active
        self._scored = f"  ({scored})" if scored else ""
        self.num_steps = num_steps
        if not active:
            return
        early: list[str] = []
        try:
            self._rows = RowFile(folder / METRICS_FILE)
            self._validated = _validated_steps(self._rows.start(start))
            self._loads = LoadsRecord(folder, num_steps=num_steps, start=start)
            self._files = {_LOADS: self._loads.file}
            for name in (SAMPLES_FILE, MEASUREMENTS_FILE):
                self._files[f"Some rows of `{name}`"] = file = RowFile(folder / name, begin=start)
                if file.path.exists():  # with rows of an earlier start
                    file.start(start)
            self._trackers = Trackers(trackers, folder, start=start, told=early.append)
        except OSError as error:
            raise TrainingError(
                f"`{folder}` must be a writable folder, but is not: {error.strerror}. Free space or grant "
                "access, and start again with --resume auto."
            ) from None
        self._display = _TrainingDisplay(num_steps, start)
        for line in early:
            self._display.line(line)
        self._trackers.told = self._display.line
        self._told = set[str]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.active:
            self._display.close()
            with self._disk_errors_told(_ROWS):
                self._rows.close()
            for lost, file in self._files.items():
                with self._disk_errors_told(lost):
                    file.close()
            self._trackers.close()

    def step(self, step: int, values: Mapping[str, Value]) -> None:
        """Record the values of a training step. `step` is the number of steps done so far."""
        if self.active:
            self._write(step, values)
            self._display.step(step, values)

    def validation(self, step: int, score: Score) -> None:
        """Record the score of a validation pass after `step` steps."""
        if self.active:
            figures = {"loss": score.loss, "perplexity": score.perplexity, "bits_per_byte": score.bits_per_byte}
            if step not in self._validated:
                self._write(step, {f"validation_{name}": value for name, value in figures.items()})
            told = f"validation loss {score.loss:.4f}"
            told += "" if score.perplexity is None else f"  perplexity {score.perplexity:.2f}"
            bits = "" if score.bits_per_byte is None else f"  bits per byte {score.bits_per_byte:.4f}"
            self._display.line(f"step {step:>6}  {told}{bits}{self._scored}")

    def scores(self, step: int, figures: Mapping[str, float]) -> None:
        """Record the figures of an evaluation after `step` steps."""
        if self.active:
            self._write(step, figures)
            self._display.line(f"step {step:>6}  {in_a_line(figures)}{self._scored}")

    def loads(self, step: int, loads: StepLoads) -> None:
        """Record the loads of the experts in a training step."""
        if self.active:
            with self._disk_errors_told(_LOADS):
                self._loads.step(step, loads)

    def rows(self, name: str, rows: Iterable[Mapping[str, object]]) -> None:
        """Record rows in the file `name`: `samples.jsonl` or `measurements.jsonl`."""
        if self.active:
            lost = f"Some rows of `{name}`"
            with self._disk_errors_told(lost):
                for row in rows:
                    self._files[lost].append(row)

    def event(self, step: int, text: str, rows: Iterable[Mapping[str, Value]]) -> None:
        """Show a line about an event after `step` steps, and record its rows."""
        if self.active:
            for row in rows:
                self._write(step, row)
            self._display.line(text)

    def rewind(self, step: int) -> None:
        """Remove the rows of the steps after `step`, because the run has rolled back to this step."""
        if self.active:
            with self._disk_errors_told(_ROWS):
                self._validated = _validated_steps(self._rows.rewind(step))
            for lost, file in self._files.items():
                with self._disk_errors_told(lost):
                    file.rewind(step)
            self._trackers.restart(step + 1)

    def note(self, text: str) -> None:
        """Show a line above the progress bar."""
        if self.active:
            self._display.line(text)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Hide the progress bar inside the context, so that another progress bar can be shown."""
        if not self.active:
            yield
            return
        with self._display.aside():
            yield

    def _write(self, step: int, values: Mapping[str, Value]) -> None:
        with self._disk_errors_told(_ROWS):
            self._rows.append({"step": step, **{name: _as_json(v) for name, v in values.items()}})
        known = {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}
        self._trackers.figures(step, known)

    @contextmanager
    def _disk_errors_told(self, lost: str) -> Iterator[None]:
        """Print disk errors instead of raising them: the first one for each file. If
        the disk is full, metrics are lost, but the run continues. Only a failed checkpoint may stop the run.
        """
        try:
            yield
        except OSError as error:
            if lost not in self._told:
                self._told.add(lost)
                self._display.line(f"{lost} cannot be written: {error.strerror}. Training continues.")


def _as_json(value: Value) -> Value:
    """Replace NaN and infinity by None, because JSON cannot represent them."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _validated_steps(rows: Iterable[Row]) -> set[int]:
    return {row["step"] for row in rows if "validation_loss" in row}


def _scale(value: Mapping[str, float]) -> str:
    """Return text with the loss scale of a step, and with "(skipped)" if the step was skipped. The text is empty
    without a loss scale.
    """
    if "loss_scale" not in value:
        return ""
    return f"scale {value['loss_scale']:g}{' (skipped)' if value['skipped'] else ''}  "


class _TrainingDisplay:
    """Display of the progress: a bar on a terminal, and one line every ten seconds elsewhere, such as in a log file."""

    def __init__(self, num_steps: int, start: int) -> None:
        self.console = new_console()
        self.num_steps = num_steps
        self._last_line = time.monotonic()
        self._first = start + 1
        self._first_ended = 0.0
        self._bar = Progress(
            # One column: a narrow terminal cuts off the end, but shows the step and the remaining time.
            TextColumn("{task.fields[told]}", markup=False, table_column=Column(no_wrap=True)),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),
            console=self.console,
            expand=True,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=num_steps, completed=start, told="Training")
        self._bar.start()

    def _left(self, step: int) -> str:
        """Return text with the remaining time of the run. The text is empty after the first step, which takes longer
        than other steps and is not counted.
        """
        if step == self._first:
            self._first_ended = time.monotonic()
            return ""
        seconds_a_step = (time.monotonic() - self._first_ended) / (step - self._first)
        return f"{timedelta(seconds=round((self.num_steps - step) * seconds_a_step))} left  "

    def step(self, step: int, values: Mapping[str, Value]) -> None:
        value = {name: float(v) for name, v in values.items() if isinstance(v, int | float)}
        told = (
            f"Training  step {step}/{self.num_steps}  {self._left(step)}loss {value['loss']:.4f}  "
            f"norm {value['gradient_norm']:.2f}  rate {value['learning_rate']:.1e}  {_scale(value)}"
            f"{value['tokens_per_second']:,.0f} tokens/s  {short(value['model_flops_per_second'], RATES)}FLOP/s"
        )
        told += f" ({value['utilisation']:.0%})" if "utilisation" in value else ""
        self._bar.update(self._task, completed=step, told=told)
        if not self.console.is_terminal and time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self.line(told)

    def line(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Hide this progress bar inside the context, so that another bar can be shown. Two bars on one terminal would
        overwrite each other.
        """
        self._bar.live.transient = True
        self._bar.stop()
        self._bar.live.transient = False
        try:
            yield
        finally:
            self._bar.start()

    def close(self) -> None:
        self._bar.stop()
