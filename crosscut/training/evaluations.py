"""The paper's scores of the model that is trained, every so many steps and at the end."""

from collections.abc import Iterable, Mapping
from typing import Any

from crosscut.config import RunConfig
from crosscut.data import TokenFolder
from crosscut.evaluation import Task, evaluate, make_tasks
from crosscut.launch import StopRequest
from crosscut.model import GPT
from crosscut.pretrained import begin_of_run
from crosscut.training.speed.compilation import uncompiled

_PREFIXES = ("wikitext103_", "lambada_", "text_")
"""Prefixes of the names that the rows of the metrics give to the figures of each task."""


class Evaluations:
    """Evaluations that a run's `[evaluation]` section asks for; none where the section names no file."""

    def __init__(self, run: RunConfig, tokens: TokenFolder) -> None:
        """Reads the texts. Raises `ConfigError` or `DataError`."""
        self.run = run
        self.tasks: list[Task] = []
        if run.evaluation.has_tasks:
            # Positions beyond the sequences of the training are not trained, whatever the model has room for.
            sizes = {"longest": run.training.sequence_length, "vocab_size": run.model.vocab_size}
            begin = begin_of_run(run, tokens.path)
            self.tasks = make_tasks(run.evaluation, tokens.tokenizer(), begin_of_text=begin, **sizes)

    def is_due(self, step: int) -> bool:
        """Whether the model is to be scored after `step` steps."""
        every = self.run.evaluation.every
        return bool(self.tasks) and (step == self.run.training.steps or (every > 0 and step % every == 0))

    def figures(self, model: GPT, request: StopRequest | None = None, *, shown: bool = False) -> dict[str, float]:
        """All figures, by task and name, unless `request` raises `Stopped` before the end. Every rank calls it.

        With `shown` the first rank shows how far it is.
        """
        with uncompiled(model):  # windows have other shapes than the batches that layers are compiled for
            results = evaluate(
                model,
                self.tasks,
                batch_size=self.run.evaluation.batch_size,
                shown=shown,
                around=request.checked if request else iter,
            )
        return {f"{result.task}_{name}": value for result in results for name, value in result.found.figures.items()}


def last_figures(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of the last evaluation among the rows of a run's metrics; none where there was none."""
    found: dict[str, Any] = {}
    for row in rows:
        found = {name: value for name, value in row.items() if name.startswith(_PREFIXES)} or found
    return found
