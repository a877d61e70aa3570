"""Use a fine-tuned run to predict the labels or answers for the examples in a file, on any layout."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

from crosscut.config import ConfigError, Layout
from crosscut.config.checks import require_at_least
from crosscut.config.model import HeadKind, require_tensor_axis
from crosscut.config.system.terminal import echo
from crosscut.evaluation.ranks import Machinery
from crosscut.finetuning.downstream.evaluations import outputs_shown
from crosscut.finetuning.downstream.folder import TASK_FILE, TaskRuns, best_seed, results_of
from crosscut.finetuning.downstream.predictions import Outputs, Prediction, predict, probabilities_of
from crosscut.finetuning.downstream.task import Example, TunedTask
from crosscut.finetuning.encoding.rows import EncodedRows
from crosscut.finetuning.encoding.tokens import TextEncoder
from crosscut.launch import in_ranks
from crosscut.launch.processes import is_first_started
from crosscut.parallel import make_mesh
from crosscut.pretrained import ModelSource, find_model


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PredictJob:
    """Encoded examples, and the model that makes the predictions. Every rank receives this object."""

    source: ModelSource
    task: TunedTask
    rows: EncodedRows
    examples: tuple[Example, ...]
    padding: int


def predict_file(place: str, file: Path, on: Machinery, *, batch_size: int = 32) -> tuple[TunedTask, list[Prediction]]:
    """Return the task of a fine-tuned run, and the run's prediction for each example in a file. `on` gives the ranks
    that compute the predictions.

    `place` is the folder of a run of `crosscut finetune TASK`, or of one of its seeds. If the run has several seeds,
    the model with the best development score is used. The file has the format of the task; labels are not needed.
    Raises `ConfigError` if `place` is another kind of folder. Also raises the errors of the readers and of
    `find_model`.
    """
    require_at_least("batch_size", batch_size, 1)
    found = in_ranks(on.ranks(), partial(_outputs, on, batch_size), prepare=lambda: _encoded(place, file, on))
    encoded, outputs = found
    task = encoded.task
    return task, predict(task, encoded.rows, encoded.examples, probabilities_of(task, encoded.rows, outputs))


def print_predictions(place: str, file: Path, *, batch_size: int, tensor: int, **choices: Any) -> None:
    """Print the prediction for each example in a file as a line of JSON. `place` is the folder of the run. `choices`
    are the fields of `Machinery` except the layout, such as the device and the precision. Raises the same errors as
    `predict_file`.
    """
    on = Machinery(layout=Layout(tensor=tensor), **choices)
    task, predictions = predict_file(place, file, on, batch_size=batch_size)
    name = "answer" if task.head is HeadKind.SPANS else "label"
    if is_first_started():
        for number, one in enumerate(predictions):
            row = {"index": number, name: one.text, "probability": one.probability}
            echo(json.dumps(row, ensure_ascii=False))


def _encoded(place: str, file: Path, on: Machinery) -> _PredictJob:
    """Find the model, and read and encode the examples."""
    folder = Path(place)
    kept = TaskRuns.load(folder if (folder / TASK_FILE).is_file() else folder.parent)
    source = find_model(_folder_of_seed(kept, folder), last_weights=on.last_weights, adapter=on.adapter)
    require_tensor_axis(source.model, on.layout.tensor)
    task, (_, examples, _) = kept.task, kept.task.read(file, has_labels=False)
    length = kept.run.training.sequence_length
    encoder = TextEncoder(source.tokenizer, source.model, task.special, length=length)
    rows = task.encode(encoder, examples, name=str(file), may_drop=False).rows
    return _PredictJob(source=source, task=task, rows=rows, examples=examples, padding=kept.padding)


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


def _outputs(on: Machinery, batch_size: int, encoded: _PredictJob, device: torch.device) -> tuple[_PredictJob, Outputs]:
    """Load the model on one rank, and compute the outputs of all examples."""
    model = encoded.source.load(make_mesh(on.layout, device), precision=on.precision)
    outputs = outputs_shown(model, encoded.rows, batch_size=batch_size, padding=encoded.padding, name="predict")
    return encoded, outputs
