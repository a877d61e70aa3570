"""A whole evaluation: find the model, read the texts, score on all ranks and write the results."""

from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TypedDict, final

from crosscut import __version__
from crosscut.architecture import Ability
from crosscut.config import EvaluationConfig, write_json
from crosscut.config.system.files import require_writable_file
from crosscut.evaluation.evaluate import evaluate, make_tasks
from crosscut.evaluation.ranks import Machinery, find_scored, with_model
from crosscut.evaluation.scoring import require_numbers
from crosscut.evaluation.task import Result, Task, TaskReport
from crosscut.launch.processes import choose_device, is_first_started
from crosscut.model import GPT
from crosscut.planner import count_parameters
from crosscut.pretrained import ModelSource


class ModelReport(TypedDict):
    """Model, layout, device and package versions of a report."""

    model: Mapping[str, str | int]
    layout: str
    device: str
    precision: str
    versions: Mapping[str, str]


@final
class EvaluationReport(ModelReport):
    """Report of an evaluation, as values for JSON."""

    batch_size: int
    tasks: Mapping[str, TaskReport]


def evaluate_place(
    place: str, config: EvaluationConfig, on: Machinery, *, output: Path | None = None, shown: bool = True
) -> EvaluationReport:
    """Score the model at `place` on the tasks of `config`. Returns the report and writes the report to `output` as
    JSON, unless `output` is None.

    `place` is a run's folder, a checkpoint or a Hugging Face folder. Files, sizes and the model are checked before a
    rank starts. If `shown` is true, the size and the expected time of each task and a progress bar are printed.
    Raises `ConfigError`, `LayoutError`, `DataError` or `CheckpointError`, and `GenerationError` if a figure is NaN.
    """
    require_writable(output)

    def prepare() -> tuple[ModelSource, list[Task]]:
        source = find_scored(place, on, Ability.FILL)
        return source, make_tasks(
            config,
            source.load_tokenizer(),
            longest=source.model.max_sequence_length,
            vocab_size=source.model.vocab_size,
            begin_of_text=source.begin_of_text,
            abilities=source.abilities,
        )

    score = partial(_score, batch_size=config.batch_size, shown=shown)
    source, results = with_model(on, prepare, score)
    tasks = {result.task: result.to_json() for result in results}
    report: EvaluationReport = {**described(place, source, on), "batch_size": config.batch_size, "tasks": tasks}
    write_report(report, output)
    return report


def _score(model: GPT, _source: ModelSource, tasks: list[Task], *, batch_size: int, shown: bool) -> list[Result]:
    results = evaluate(model, tasks, batch_size=batch_size, shown=shown, forecast=shown)
    for result in results:
        require_numbers(result.task, result.found.figures.values())
    return results


def described(place: str, source: ModelSource, on: Machinery) -> ModelReport:
    """Describe the model, the layout, the device and the package versions for a report. With this description and the
    protocol of each task, the scores can be reproduced.
    """
    return {
        "model": {
            "name": source.name,
            "place": place,
            "averaged_weights": source.is_averaged,
            "adapter": source.adapter,
            "parameters": count_parameters(source.model),
            "vocab_size": source.model.vocab_size,
        },
        "layout": str(on.layout),
        "device": choose_device(on.device).type,
        "precision": on.precision,
        "versions": {"crosscut": __version__, "torch": version("torch")},
    }


def require_writable(output: Path | None) -> None:
    """Raise `ConfigError` if the file `output` cannot be written. Call this before the scoring, which may take hours.
    If `output` is None, nothing is checked.
    """
    if output is not None:
        require_writable_file("--output", output)


def write_report(report: Mapping[str, object], output: Path | None) -> None:
    """Write the report atomically to `output` on the first rank. Do nothing if `output` is None."""
    if output is not None and is_first_started():
        write_json(output, report)
