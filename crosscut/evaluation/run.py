"""A whole evaluation: finds the model, reads the texts, starts or joins the ranks, writes what came out."""

import json
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from crosscut import __version__
from crosscut.config import ConfigError, EvaluationConfig, Layout, LayoutError, RunConfig, TrainingConfig, write_whole
from crosscut.data import Tokenizer
from crosscut.evaluation.evaluate import evaluate, make_tasks
from crosscut.evaluation.task import Result, Task
from crosscut.parallel import launch, make_mesh, process_group
from crosscut.parallel.mesh import world_size_message
from crosscut.parallel.processes import (
    choose_device,
    is_first_started,
    joined_rank,
    ranks_on_this_machine,
    require_devices,
    started_world_size,
    was_started,
)
from crosscut.planner import count_parameters
from crosscut.pretrained import ModelSource, find_model


@dataclass(frozen=True, kw_only=True)
class Machinery:
    """On what a model is scored; it changes no score but in the last digits."""

    layout: Layout = field(default_factory=Layout)
    device: str = "auto"
    precision: str = "float32"
    """Of weights and products."""


@dataclass(frozen=True)
class _Job:
    """What every rank is told."""

    source: ModelSource
    tasks: list[Task]
    config: EvaluationConfig
    on: Machinery
    shown: bool


def evaluate_place(
    place: str, config: EvaluationConfig, on: Machinery, *, output: Path | None = None, shown: bool = True
) -> dict[str, Any]:
    """Score the model at `place` on the tasks of `config`; gives the report, and writes it to `output` as JSON.

    Starts the ranks that the layout asks for, or joins those that torchrun started. Files, sizes and the model are
    looked at before a rank starts. Raises `ConfigError`, `LayoutError`, `DataError` or `CheckpointError`.
    """
    if was_started() and started_world_size() != on.layout.world_size:
        raise LayoutError(world_size_message(on.layout, started_world_size()))
    require_devices(on.device, ranks_on_this_machine(on.layout.world_size))
    if output is not None and not output.parent.is_dir():
        raise ConfigError(f"`--output` must be a file in a folder that is there, but `{output.parent}` is not.")
    job = _prepare(place, config, on, shown)
    if was_started():
        with joined_rank():
            results = _evaluate_rank(job)
    else:
        results = launch(_evaluate_rank, (job,), num_ranks=on.layout.world_size)
    report = _report(place, job, results)
    if output is not None and is_first_started():
        write_whole(output, json.dumps(report, indent=2) + "\n")
    return report


def _prepare(place: str, config: EvaluationConfig, on: Machinery, shown: bool) -> _Job:
    source = find_model(place)
    # A run's own checks tell whether the layout can cut the model.
    shape = TrainingConfig(batch_size=on.layout.data, sequence_length=on.layout.tensor)
    RunConfig(model=source.model, layout=on.layout, training=shape)
    tasks = make_tasks(
        config,
        Tokenizer.load(source.tokenizer),
        longest=source.model.max_sequence_length,
        vocab_size=source.model.vocab_size,
        begin_of_text=source.begin_of_text,
    )
    return _Job(source, tasks, config, on, shown)


def _evaluate_rank(job: _Job) -> list[Result]:
    device = choose_device(job.on.device)
    with process_group(device):
        model = job.source.load(make_mesh(job.on.layout, device), precision=job.on.precision)
        return evaluate(model, job.tasks, batch_size=job.config.batch_size, shown=job.shown)


def _report(place: str, job: _Job, results: list[Result]) -> dict[str, Any]:
    """The figures and all it takes to get them again."""
    return {
        "model": {
            "name": job.source.name,
            "place": place,
            "parameters": count_parameters(job.source.model),
            "vocab_size": job.source.model.vocab_size,
        },
        "layout": str(job.on.layout),
        "device": choose_device(job.on.device).type,
        "precision": job.on.precision,
        "batch_size": job.config.batch_size,
        "versions": {"crosscut": __version__, "torch": version("torch")},
        "tasks": {result.task: result.to_json() for result in results},
    }
