"""Scores on the development examples during training, and the step with the best score."""

from collections.abc import Iterable, Mapping, Sequence

from crosscut.config import RunConfig
from crosscut.evaluation.progress import Bar, rounds_shown
from crosscut.evaluation.scoring import Follow
from crosscut.finetuning.downstream.outputs import task_outputs
from crosscut.finetuning.downstream.predictions import Outputs, predict, probabilities_of, scores_of
from crosscut.finetuning.downstream.task import DEV, Example, TunedTask
from crosscut.finetuning.encoding.rows import EncodedRows
from crosscut.launch import StopRequest
from crosscut.model import GPT


class DevScores:
    """Scores on the development examples every `training.validate_every` steps and after the last step."""

    def __init__(
        self,
        task: TunedTask,
        run: RunConfig,
        rows: EncodedRows,
        examples: Sequence[Example],
        *,
        padding: int,
        rows_before: Iterable[Mapping[str, object]] = (),
    ) -> None:
        """`rows_before` are the rows of `metrics.jsonl` that a resumed run wrote before it was stopped."""
        self.task, self.run, self.padding = task, run, padding
        self.rows, self.examples = rows, examples
        self._best: tuple[int, float] | None = None
        self._scored: set[int] = set()
        name = f"{DEV}_{task.score_names[0]}"
        for row in rows_before:
            step, score = row["step"], row.get(name)
            if isinstance(step, int) and isinstance(score, int | float):
                self._note(step, float(score))

    @property
    def best_step(self) -> int | None:
        """Step with the best score so far. If scores are equal, the earliest step counts. None before the first
        score.
        """
        return self._best[0] if self._best else None

    def is_due(self, step: int) -> bool:
        """Whether the model must be scored after `step` steps."""
        every = self.run.training.validate_every
        return step == self.run.training.steps or (every > 0 and step % every == 0)

    def is_missing(self, step: int) -> bool:
        """Whether the run was stopped after `step` steps, before it scored the model as it should have."""
        return self.is_due(step) and step not in self._scored

    def figures(self, model: GPT, request: StopRequest | None = None, *, step: int) -> dict[str, float]:
        """Score the model after `step` steps. Returns the scores under the names `dev_<score>`."""
        around = request.checked if request else iter
        outputs = outputs_shown(
            model,
            self.rows,
            batch_size=self.run.micro_batch_size,
            padding=self.padding,
            name=DEV,
            around=around,
        )
        probabilities = probabilities_of(self.task, self.rows, outputs)
        found = scores_of(self.task, predict(self.task, self.rows, self.examples, probabilities), self.examples)
        self._note(step, found[self.task.score_names[0]])
        return {f"{DEV}_{name}": value for name, value in found.items()}

    def _note(self, step: int, score: float) -> None:
        self._scored.add(step)
        if self._best is None or score > self._best[1]:
            self._best = (step, score)


def outputs_shown(
    model: GPT,
    rows: EncodedRows,
    *,
    batch_size: int,
    padding: int,
    name: str = "",
    around: Follow = iter,
) -> Outputs:
    """Compute the outputs of a model with `task_outputs`, and show a progress bar with the label `name` on the first
    rank. If `name` is empty, no bar is shown. The generator function `around` receives the rounds of examples and
    yields them again.
    """
    lengths = rows.lengths.reshape(-1, rows.width).sum(1).tolist()
    bar = Bar(name, bool(name) and model.mesh.is_first_rank)
    with rounds_shown(bar, lengths, around, size=model.mesh.reader.size) as follow:
        return task_outputs(model, rows, batch_size=batch_size, padding=padding, follow=follow)
