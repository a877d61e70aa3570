"""Evaluation of the model during training with the tasks of `[evaluation]`, every `evaluation.every` steps and after
the last step.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from crosscut.architecture import describe
from crosscut.config import RunConfig
from crosscut.data import Tokens
from crosscut.evaluation import Task, evaluate, make_tasks
from crosscut.launch import StopRequest
from crosscut.logbook.contents import read_metrics
from crosscut.model import GPT
from crosscut.pretrained import speech_of_run
from crosscut.training.speed.compilation import uncompiled

_PREFIXES = ("wikitext103_", "lambada_", "text_", "masked_text_")
"""Prefixes of figure names in the rows of `metrics.jsonl`, one per task."""


class ModelScores(Protocol):
    """Interface through which the training loop scores the model during training."""

    @property
    def best_step(self) -> int | None:
        """Step with the best score so far, whose checkpoint is kept permanently. None if the scores choose no
        checkpoint.
        """

    def is_due(self, step: int) -> bool:
        """Whether the model must be scored after `step` steps."""

    def is_missing(self, step: int) -> bool:
        """Whether the run was stopped after `step` steps, before it scored the model as it should have."""

    def figures(self, model: GPT, request: StopRequest | None = None, *, step: int) -> dict[str, float]:
        """Score the model after `step` steps, and return the figures by name. Every rank must call this method. The
        first rank shows a progress bar. With `request`, the method raises `Stopped` if the ranks agree to stop while
        they score.
        """


class Evaluations:
    """Evaluation tasks of a run's `[evaluation]` section. `tasks` is empty if the section names no file."""

    best_step = None
    """Always None, because the scores of evaluation tasks select no checkpoint."""

    def __init__(self, run: RunConfig, tokens: Tokens) -> None:
        """Read the texts of all tasks. Raises `ConfigError` or `DataError`."""
        self.run = run
        self.tasks: list[Task] = []
        if run.evaluation.has_tasks:
            # Training uses only the positions up to its sequence length, even if the model has more positions.
            sizes = {"longest": run.training.sequence_length, "vocab_size": run.model.vocab_size}
            spoken, abilities = speech_of_run(run, tokens.path), describe(run.model).head.abilities
            begin = spoken.begin_of_text if spoken else None
            self.tasks = make_tasks(
                run.evaluation, tokens.tokenizer(), begin_of_text=begin, abilities=abilities, **sizes
            )

    def is_due(self, step: int) -> bool:
        """Whether the model must be scored after `step` steps."""
        every = self.run.evaluation.every
        return bool(self.tasks) and (step == self.run.training.steps or (every > 0 and step % every == 0))

    def is_missing(self, step: int) -> bool:
        """Whether the run was stopped after `step` steps, before it scored the model as it should have."""
        rows = read_metrics(Path(self.run.output.folder)) if self.is_due(step) else []
        return self.is_due(step) and not last_figures(row for row in rows if row["step"] == step)

    def figures(
        self,
        model: GPT,
        request: StopRequest | None = None,
        *,
        step: int = 0,  # noqa: ARG002 - see `ModelScores`
    ) -> dict[str, float]:
        """Score the model on all tasks. Returns the figures under the names `<task>_<figure>`."""
        with uncompiled(model):  # windows have other shapes than training batches
            results = evaluate(
                model,
                self.tasks,
                batch_size=self.run.evaluation.batch_size,
                shown=True,
                around=request.checked if request else iter,
            )
        return {f"{result.task}_{name}": value for result in results for name, value in result.found.figures.items()}


def last_figures(rows: Iterable[Mapping[str, object]]) -> dict[str, object]:
    """Return the figures of the last evaluation in the rows of `metrics.jsonl`. Empty if there was no evaluation."""
    found: dict[str, object] = {}
    for row in rows:
        found = {name: value for name, value in row.items() if name.startswith(_PREFIXES)} or found
    return found
