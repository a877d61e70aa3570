"""Use a fine-tuned run to predict the labels or answers for the examples in a file, on any layout."""

import dataclasses
from functools import partial
from pathlib import Path

from crosscut.config import ConfigError
from crosscut.config.checks import require_at_least
from crosscut.config.layouts.limits import require_tensor_axis
from crosscut.evaluation.ranks import Machinery, with_model
from crosscut.finetuning.downstream.evaluations import outputs_shown
from crosscut.finetuning.downstream.folder import TASK_FILE, TaskRuns, best_seed, results_of
from crosscut.finetuning.downstream.predictions import Outputs, Prediction, predict, probabilities_of
from crosscut.finetuning.downstream.task import Example, TunedTask
from crosscut.finetuning.encoding.rows import EncodedRows
from crosscut.finetuning.encoding.tokens import TextEncoder
from crosscut.model import GPT
from crosscut.pretrained import ModelSource


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PredictJob:
    """Examples of a task in encoded form. Every rank receives this object."""

    task: TunedTask
    rows: EncodedRows
    examples: tuple[Example, ...]
    padding: int


def predict_file(place: str, file: Path, on: Machinery, *, batch_size: int = 32) -> tuple[TunedTask, list[Prediction]]:
    """Return the task of a fine-tuned run, and the run's prediction for each example in a file. `on` gives the ranks
    that compute the predictions.

    `place` is the folder of a run of `crosscut finetune TASK`, or of one of its seeds. If the run has several seeds,
    the model with the best development score is used. The file has the format of the task; labels of texts are not
    read. Raises `ConfigError` if `place` is another kind of folder. Also raises the errors of the readers and of
    `find_model`.
    """
    require_at_least("batch_size", batch_size, 1)
    _, found = with_model(on, partial(_encoded, place, file, on), partial(_outputs, batch_size))
    encoded, outputs = found
    task = encoded.task
    return task, predict(task, encoded.rows, encoded.examples, probabilities_of(task, encoded.rows, outputs))


def _encoded(place: str, file: Path, on: Machinery) -> tuple[ModelSource, _PredictJob]:
    """Find the model, and read and encode the examples."""
    folder = Path(place)
    kept = TaskRuns.load(folder if (folder / TASK_FILE).is_file() else folder.parent)
    source = on.find(_folder_of_seed(kept, folder))
    require_tensor_axis(source.model, on.layout.tensor)
    task, (_, examples, _) = kept.task, kept.task.read(file, has_labels=False)
    length = kept.run.training.sequence_length
    encoder = TextEncoder(source.tokenizer, source.model, task.special, length=length)
    rows = task.encode(encoder, examples, name=str(file), may_drop=False).rows
    return source, _PredictJob(task=task, rows=rows, examples=examples, padding=kept.padding)


def _folder_of_seed(kept: TaskRuns, folder: Path) -> Path:
    """Return the folder of the run whose model makes the predictions: `folder` itself if it belongs to one seed,
    otherwise the folder of the seed with the best development score.
    """
    if folder.resolve() != kept.folder.resolve():
        return folder
    if not (complete := results_of(kept)):
        raise ConfigError(
            f"`{folder}` must hold a complete run, but its training has not ended. Continue the run with --resume."
        )
    return Path(kept.run_of(best_seed(kept, complete)).output.folder)


def _outputs(batch_size: int, model: GPT, _source: ModelSource, encoded: _PredictJob) -> tuple[_PredictJob, Outputs]:
    """Compute the outputs of all examples on one rank."""
    outputs = outputs_shown(model, encoded.rows, batch_size=batch_size, padding=encoded.padding, name="predict")
    return encoded, outputs
