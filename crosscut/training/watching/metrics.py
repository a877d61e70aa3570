"""Metrics of a running training: a progress bar, `metrics.jsonl` and TensorBoard.

Only the first rank writes; the other ranks hold a `Metrics` that does nothing. A run that resumes goes on in the same
file, without the rows after the checkpoint that it resumed from; a step that was validated before keeps that row.
"""

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from crosscut.config import write_whole
from crosscut.evaluation.score_table import in_a_line

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
_SECONDS_BETWEEN_LINES = 10.0

Value = float | int | str | None


class Metrics:
    """The metrics of one run; a context that closes its files.

    `start` is the step that the run goes on from: rows of later steps, left by a run that was stopped, are dropped.
    """

    def __init__(self, folder: Path, *, num_steps: int, start: int, active: bool) -> None:
        self.active = active
        self.num_steps = num_steps
        if not active:
            return
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import, so only on the rank that writes

        kept = _drop_after(folder / METRICS_FILE, start)
        self._validated = {row["step"] for row in kept if "validation_loss" in row}
        self._file: IO[str] = (folder / METRICS_FILE).open("a", encoding="utf-8")
        self._board = SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=start + 1 if start else 0)
        self._display = _Display(num_steps, start)
        self._told = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.active:
            self._display.close()
            with self._disk_errors_told():
                self._file.close()
                self._board.close()

    def step(self, step: int, values: Mapping[str, Value]) -> None:
        """Note the values of a training step; `step` counts the steps done."""
        if self.active:
            self._write(step, values)
            self._display.step(step, values)

    def validation(self, step: int, *, loss: float, perplexity: float) -> None:
        """Note a validation after `step` steps."""
        if self.active:
            if step not in self._validated:
                self._write(step, {"validation_loss": loss, "validation_perplexity": perplexity})
            self._display.line(f"step {step:>6}  validation loss {loss:.4f}  perplexity {perplexity:.2f}")

    def scores(self, step: int, figures: Mapping[str, float]) -> None:
        """Note the figures of an evaluation after `step` steps."""
        if self.active:
            self._write(step, figures)
            self._display.line(f"step {step:>6}  {in_a_line(figures)}")

    @contextmanager
    def aside(self) -> Iterator[None]:
        """The progress bar gives way to another one for as long as this lasts."""
        if not self.active:
            yield
            return
        with self._display.aside():
            yield

    def _write(self, step: int, values: Mapping[str, Value]) -> None:
        with self._disk_errors_told():
            self._file.write(json.dumps({"step": step, **{name: _as_json(v) for name, v in values.items()}}) + "\n")
            self._file.flush()
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(name, value, step)

    @contextmanager
    def _disk_errors_told(self) -> Iterator[None]:
        """A full disk costs rows of the metrics, not the run: whether that stops is for its checkpoints to decide."""
        try:
            yield
        except OSError as error:
            if not self._told:
                self._told = True
                self._display.line(f"metrics are no longer written: {error.strerror}")


def _as_json(value: Value) -> Value:
    """JSON has no infinities."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's `metrics.jsonl`."""
    with (folder / METRICS_FILE).open(encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


def _drop_after(path: Path, start: int) -> list[dict[str, Any]]:
    """Leave in the file only the whole rows of at most `start` steps, none where that is 0, and return them."""
    rows = read_metrics(path.parent) if start and path.exists() else []
    kept = [row for row in rows if row["step"] <= start]
    write_whole(path, "".join(json.dumps(row) + "\n" for row in kept))
    return kept


def _scale(value: Mapping[str, float]) -> str:
    """A loss scale, where one is in use, and whether its step was skipped."""
    if "loss_scale" not in value:
        return ""
    return f"scale {value['loss_scale']:g}{' (skipped)' if value['skipped'] else ''}  "


class _Display:
    """A progress bar on a terminal; elsewhere, such as in a log file, a line every ten seconds."""

    def __init__(self, num_steps: int, start: int) -> None:
        self.console = Console()
        self.num_steps = num_steps
        self._last_line = time.monotonic()
        self._start, self._began = start, time.monotonic()
        self._bar = Progress(
            # One text, so that on a narrow terminal its end gives way and neither the step nor the time left does.
            TextColumn("{task.fields[told]}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),
            console=self.console,
            expand=True,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=num_steps, completed=start, told="")
        self._bar.start()

    def step(self, step: int, values: Mapping[str, Value]) -> None:
        value = {name: float(v) for name, v in values.items() if isinstance(v, int | float)}
        seconds_a_step = (time.monotonic() - self._began) / (step - self._start)
        left = timedelta(seconds=round((self.num_steps - step) * seconds_a_step))
        told = (
            f"step {step}/{self.num_steps}  {left} left  loss {value['loss']:.4f}  norm {value['gradient_norm']:.2f}  "
            f"rate {value['learning_rate']:.1e}  {_scale(value)}{value['tokens_per_second']:,.0f} tokens/s  "
            f"{value['model_flops_per_second'] / 1e12:.2f} TFLOP/s ({value['utilisation']:.0%})"
        )
        self._bar.update(self._task, completed=step, told=told)
        if not self.console.is_terminal and time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self.line(told)

    def line(self, text: str) -> None:
        self.console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Two bars on one terminal would write over each other, so this one goes without a trace and comes back."""
        self._bar.live.transient = True
        self._bar.stop()
        self._bar.live.transient = False
        try:
            yield
        finally:
            self._bar.start()

    def close(self) -> None:
        self._bar.stop()
