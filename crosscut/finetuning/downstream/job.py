"""Fine-tune a model for a task: read and encode the examples, start or join the ranks, train a run for each seed, and
write the report.

Fine-tuning uses the training loop of `crosscut train`, with its checkpoints and metrics, so the folder of a seed is an
ordinary run. The checkpoint with the best score on the development examples is kept.
"""

import contextlib
import dataclasses
import gc
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from crosscut.checkpoint import Folder, checkpoint_folder, latest_good_checkpoint, list_checkpoints, load_model
from crosscut.checkpoint.format.manifest import current_versions
from crosscut.config import ConfigError, DataError, ModelConfig, ResolvedRun, RunConfig, write_toml, write_whole
from crosscut.config.conventions import CHECKPOINTS_FOLDER, CONFIG_FILE, TOKENS_FOLDER
from crosscut.config.published.folders import TOKENIZER_FILE
from crosscut.config.system.deletion import make_folder
from crosscut.config.system.files import copy_file
from crosscut.config.system.folder_lock import FolderLock
from crosscut.config.system.terminal import new_console
from crosscut.finetuning.downstream.batches import TaskBatches
from crosscut.finetuning.downstream.evaluations import DevScores, outputs_shown, predict_from
from crosscut.finetuning.downstream.folder import RESULT_FILE, TASK_FILE, Kept, keep_best, result_of, save_outputs
from crosscut.finetuning.downstream.predictions import scores_of
from crosscut.finetuning.downstream.report import print_results, write_report
from crosscut.finetuning.downstream.settings import TaskOrder, settings_of
from crosscut.finetuning.downstream.task import DEV, PARTS, TRAIN, Example, Task, files_of
from crosscut.finetuning.encoding import Rows, Special, TextEncoder
from crosscut.finetuning.runs import require_new_folder, run_stopped
from crosscut.launch import Done, Ranks, in_ranks
from crosscut.launch.processes import choose_device, is_first_started
from crosscut.launch.stopping import INTERRUPTIBLE, ignore_requests
from crosscut.parallel import ParallelMesh, make_mesh
from crosscut.parallel.collectives import share_from_first
from crosscut.pretrained import ModelSource, find_model, keep_labels, load_trunk
from crosscut.pretrained.companions import COMPANIONS
from crosscut.training.loop import Loop, Outcome
from crosscut.training.precision import resolve_on
from crosscut.training.requirements import require_capabilities, require_no_spikes, require_own_names
from crosscut.training.resuming import identity_of_settings, newest_checkpoint_told, require_resumable
from crosscut.training.step import Trainer
from crosscut.training.watching.banner import device_name, facts_panel, model_rows
from crosscut.training.watching.metrics import read_metrics
from crosscut.training.watching.run_report import plot_losses, typed_command


class _Job(NamedTuple):
    """Incomplete run of one seed."""

    run: ResolvedRun
    checkpoint: Folder | None
    """Checkpoint to resume from; None for a new run."""
    done: int
    """Number of steps that the run had done when the checkpoint was written."""


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """Values that every rank receives."""

    kept: Kept
    jobs: tuple[_Job, ...]
    identity: Mapping[str, Any]
    source: ModelSource | None
    """Model from which new runs start. None if no run is new."""
    lock: FolderLock


class _Stop(NamedTuple):
    """Early end of a run, after its checkpoint was written."""

    seed: int
    step: int
    interrupted: bool


def finetune_task(order: TaskOrder) -> None:
    """Fine-tune a model for a task, on the ranks of the layout.

    Files, model and settings are checked before any process starts. Raises `ConfigError`, `LayoutError`, `DataError`,
    `CheckpointError` or `TrainingError`. Raises `RunStopped` if a signal asked the run to stop and the run has written
    its checkpoint.
    """
    source = None if order.resume else find_model(order.model)
    asked = _asked(order, source)
    asked.layout.require_one_stage("finetune")
    resolved = resolve_on(asked, choose_device(asked.training.device))
    require_capabilities(resolved)
    require_no_spikes(asked)
    ranks = Ranks(layout=asked.layout, device=asked.training.device, signals=INTERRUPTIBLE)
    again = f"finetune {order.task.name} --resume --output {shlex.quote(order.output)}"
    checkpoints = Path(order.output).rglob(CHECKPOINTS_FOLDER)  # of each seed, and only after a failure
    told = newest_checkpoint_told(checkpoints, f"{typed_command()} {again}")
    with told, contextlib.ExitStack() as until_the_end:
        stop = in_ranks(ranks, _train_all, prepare=lambda: _prepare(order, resolved, source, until_the_end))
    if stop is not None:
        ignore_requests()
        raise run_stopped(stop.step, again, interrupted=stop.interrupted)
    if is_first_started():
        _finish(Path(order.output))


def _asked(order: TaskOrder, source: ModelSource | None) -> RunConfig:
    """Return the settings of the runs, before the files are read. For a new run, only the layout and the device are
    final.
    """
    if source is None:
        return Kept.load(Path(order.output), order.overrides).run
    return settings_of(order, _model_for(order.task, source))


def _model_for(task: Task, source: ModelSource) -> ModelConfig:
    """Return the model's config with the head of a task. If the labels are not known yet, the head has two classes."""
    classes = max(2, task.num_classes) if task.head == "classes" else 0
    return source.model.with_head(task.head, num_classes=classes)


def _prepare(
    order: TaskOrder, resolved: ResolvedRun, source: ModelSource | None, until_the_end: contextlib.ExitStack
) -> "_Prepared | Done[_Stop | None]":
    """Lock the folder, encode the examples of a new run, and find the checkpoints of a resumed run. Returns `Done` if
    the runs of all seeds are complete.
    """
    folder = Path(order.output)
    lock = FolderLock(folder)
    until_the_end.enter_context(lock.held(_note))
    require_own_names(folder)
    kept = _resumed(order) if source is None else _new(order, resolved.config, source)
    kept = dataclasses.replace(kept, run=resolved.with_config(kept.run).config)
    identity = _identity(kept)
    jobs = []
    for seed in kept.seeds:
        run = kept.run_of(seed)
        if result_of(run) is None:
            jobs.append(_job(resolved.with_config(run), identity))
    if jobs and source is None and any(job.checkpoint is None for job in jobs):
        source = find_model(kept.model)
    for job in jobs:
        if job.checkpoint is None and source is not None:
            _fill_folder(job.run.config, source, kept.task.labels)
    kept.save()  # last: the file says that the folder is complete
    _print_banner(kept, len(jobs))
    if not jobs:
        return Done(None)
    return _Prepared(kept, tuple(jobs), identity, source, lock)


def _resumed(order: TaskOrder) -> Kept:
    """Read the description of a resumed run. A run that is resumed with `--ensemble` gets an ensemble. Raises
    `ConfigError` if a setting that determines the seeds or the batches differs from that of the original run.
    """
    before, kept = Kept.load(Path(order.output)), Kept.load(Path(order.output), order.overrides)
    if kept.task.name != order.task.name:
        raise ConfigError(
            f"`--output` must name the folder of a run of the task {order.task.name!r}, but `{order.output}` holds a "
            f"run of {kept.task.name!r}. Resume with `{typed_command()} finetune {kept.task.name}`."
        )
    theirs, ours = identity_of_settings(before.run), identity_of_settings(kept.run)
    if changed := next((name for name in theirs if theirs[name] != ours[name]), ""):
        raise ConfigError(
            f"`{changed}` must be {theirs[changed]!r} as in `{order.output}`, but is {ours[changed]!r}. Remove "
            f"`{changed}`, or start a new run in another folder."
        )
    if order.ensemble and kept.num_seeds < 2:
        raise ConfigError(
            f"`--seeds` must be at least 2 with `--ensemble`, but the run in `{order.output}` has {kept.num_seeds}. "
            "Start a run with more seeds."
        )
    return dataclasses.replace(kept, ensemble=kept.ensemble or order.ensemble)


def _job(run: ResolvedRun, identity: Mapping[str, Any]) -> _Job:
    place = run.config.checkpoints_folder
    if not list_checkpoints(place):
        return _Job(run, None, 0)
    good = latest_good_checkpoint(place)
    done = require_resumable(run.config, good.folder, {**identity, "training.seed": run.training.seed}, may_be_all=True)
    return _Job(run, good.folder, done.step)


def _identity(kept: Kept) -> dict[str, Any]:
    """Return the hashes of the examples, and all settings except the seed. A run can resume from a checkpoint only if
    all of these values are the same.
    """
    fingerprints = [kept.rows(part).fingerprint for part in (TRAIN, DEV)]
    return {**identity_of_settings(kept.run), "data.task": [kept.task.name, *fingerprints]}


def _new(order: TaskOrder, asked: RunConfig, source: ModelSource) -> Kept:
    """Read and encode the examples of a new run, and write them to the folder."""
    require_new_folder(Path(order.output), (TASK_FILE, CONFIG_FILE))
    require_own_names(Path(order.output), is_new=True)
    files = files_of(order.task.name, order.data, order.files)
    special = Special(source.begin_of_text, source.end_of_text)
    task, examples = _read(dataclasses.replace(order.task, special=special, is_causal=source.model.is_causal), files)
    model = _model_for(task, source)
    encoder = TextEncoder(source.tokenizer, model, special, length=asked.training.sequence_length)
    rows = {part: _encode(task, encoder, part, examples[part], files[part]) for part in examples}
    run = settings_of(order, model, rows[TRAIN].steps_per_epoch(asked.training.batch_size))
    kept = Kept(
        task=task,
        run=run,
        model=order.model,
        files={part: str(path) for part, path in files.items()},
        padding=encoder.padding,
        num_seeds=order.seeds,
        ensemble=order.ensemble,
    )
    kept.folder.mkdir(parents=True, exist_ok=True)
    for part in rows:
        kept.save_part(part, rows[part], examples[part], is_predicted=part != TRAIN)
    return kept


def _read(task: Task, files: Mapping[str, Path]) -> tuple[Task, dict[str, tuple[Example, ...]]]:
    """Read the examples of all parts. The training examples determine the labels of all parts."""
    examples: dict[str, tuple[Example, ...]] = {}
    for part in PARTS:
        if part in files:
            task, examples[part], skipped = task.read(files[part], has_labels=part in (TRAIN, DEV))
            if skipped:
                _note(f"{skipped:,} lines of `{files[part]}` have too few columns and are left out.")
        if part == TRAIN and task.head == "classes" and task.num_classes < 2:
            raise DataError(
                f"`{files[TRAIN]}` must have at least 2 different labels, but has {task.num_classes}. Add examples, or "
                "name the labels with --labels."
            )
    return task, examples


def _encode(task: Task, encoder: TextEncoder, part: str, examples: tuple[Example, ...], path: Path) -> Rows:
    rows, num_long = task.encode(encoder, examples, name=str(path), may_drop=part == TRAIN)
    if num_long:
        what = "left out" if task.long == "drop" and part == TRAIN else "cut"
        _note(
            f"{num_long:,} of {len(examples):,} examples of `{path}` are longer than {encoder.length} tokens and are "
            f"{what}."
        )
    return rows


def _fill_folder(run: RunConfig, source: ModelSource, labels: Sequence[str]) -> None:
    """Write the config, the tokenizer and the names of the labels of a new run."""
    tokens = Path(run.output.folder) / TOKENS_FOLDER
    make_folder(tokens.parent, tokens.name)
    copy_file(source.tokenizer, tokens / TOKENIZER_FILE)
    for name in COMPANIONS:
        if (beside := source.tokenizer.with_name(name)).is_file():
            copy_file(beside, tokens / name)
    if run.model.num_classes:
        keep_labels(Path(run.output.folder), labels)
    write_toml(run, Path(run.output.folder) / CONFIG_FILE)


def _note(text: str) -> None:
    new_console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)


def _print_banner(kept: Kept, num_jobs: int) -> None:
    run, training = kept.run, kept.run.training
    counts = {part: kept.rows(part).num_examples for part in kept.files}
    told = ", ".join(f"{count:,} ({part}: {kept.files[part]})" for part, count in counts.items())
    done = kept.num_seeds - num_jobs
    rows = [
        *model_rows(run),
        ("examples", told),
        ("training", f"{training.steps:,} steps of {training.batch_size:,} examples"),
        ("seeds", f"{', '.join(map(str, kept.seeds))}{f'; {done} of them complete' if done else ''}"),
        ("folder", run.output.folder),
    ]
    new_console().print(facts_panel(f"finetune {kept.task.name}", rows))


def _train_all(prepared: _Prepared, device: torch.device) -> _Stop | None:
    """Train the runs of all seeds on one rank. Returns how the first unfinished run was stopped, or None if all runs
    are complete.
    """
    mesh = make_mesh(prepared.kept.run.layout, device)
    lock = prepared.lock if mesh.is_first_rank else None
    rows = {part: prepared.kept.rows(part) for part in prepared.kept.files}
    with contextlib.nullcontext() if lock is None else lock.renewed():
        for job in prepared.jobs:
            if mesh.is_first_rank and prepared.kept.num_seeds > 1:
                new_console().print(f"seed {job.run.training.seed}")
            stop = _train(prepared, job, rows, mesh)
            if stop is not None:
                return stop
            gc.collect()  # frees the model and the optimizer of this seed
    return None


def _train(prepared: _Prepared, job: _Job, rows: Mapping[str, Rows], mesh: ParallelMesh) -> _Stop | None:
    """Train the run of one seed, and score its best checkpoint."""
    kept, run = prepared.kept, job.run.config
    trainer = Trainer(job.run, mesh)
    if job.checkpoint is None:
        assert prepared.source is not None
        fresh = load_trunk(trainer.model, prepared.source)
        if fresh and mesh.is_first_rank and run.training.seed == kept.seeds[0]:
            _note(f"New weights, drawn from the seed: {', '.join(fresh)}.")
    before = [row for row in read_metrics(Path(run.output.folder)) if row["step"] <= job.done]
    dev = DevScores(kept.task, run, rows[DEV], kept.examples(DEV), padding=kept.padding, rows_before=before)
    loop = Loop(
        trainer,
        TaskBatches(run, rows[TRAIN], rows[DEV], mesh, padding=kept.padding),
        identity={**prepared.identity, "training.seed": run.training.seed},
        evaluations=dev,
        lock=prepared.lock if mesh.is_first_rank else None,
    )
    with loop.saver:
        outcome = loop.train(job.checkpoint)
        loop.saver.require_saved()
        if outcome.stopped:
            return _Stop(run.training.seed, outcome.last_step, outcome.interrupted)
        _score_best(prepared, loop, rows, outcome)
    share_from_first(None)  # a rank that exits early would kill the rank that writes the result
    return None


def _score_best(prepared: _Prepared, loop: Loop, rows: Mapping[str, Rows], outcome: Outcome) -> None:
    """Pick the checkpoint with the best development score, score it on all parts but training, and write the result."""
    kept, run, model = prepared.kept, loop.run, loop.trainer.model
    assert loop.evaluations is not None
    best = loop.evaluations.best_step or outcome.last_step  # a resumed run whose metrics are lost has no scores
    if best != outcome.last_step:
        folder = checkpoint_folder(run.checkpoints_folder, best)
        load_model(folder, model=model, padded=model.padded_rows)
    scores = {}
    for part in (part for part in kept.files if part != TRAIN):
        outputs = outputs_shown(
            model, rows[part], batch_size=run.micro_batch_size, padding=kept.padding, name=f"{part} at step {best}"
        )
        if loop.mesh.is_first_rank:
            save_outputs(run, part, outputs)
            examples = kept.examples(part)
            scores[part] = scores_of(kept.task, predict_from(kept.task, rows[part], examples, outputs), examples)
    if loop.mesh.is_first_rank:
        _write_result(run, best, scores, outcome, loop.mesh.device)


def _write_result(run: RunConfig, best: int, scores: Mapping[str, Any], outcome: Outcome, device: torch.device) -> None:
    folder = Path(run.output.folder)
    plot_losses(folder, per="example")
    result = {
        "seed": run.training.seed,
        "steps": run.training.steps,
        "best_step": best,
        "scores": scores,
        "layout": str(run.layout),
        "device": device_name(device),
        "versions": current_versions(),
        "training_seconds": outcome.seconds,
        "dev_loss_before": outcome.before.loss,
        "dev_loss_after": outcome.after.loss,
    }
    write_whole(folder / RESULT_FILE, json.dumps(result, indent=2) + "\n")  # last: it marks a complete run


def _finish(folder: Path) -> None:
    """Keep the best checkpoint of each seed, write the report, and print the scores."""
    kept = Kept.load(folder)
    for seed in kept.seeds:
        result = result_of(kept.run_of(seed))
        assert result is not None, "all runs are complete"
        keep_best(kept.run_of(seed), result["best_step"])
    print_results(write_report(kept), new_console())
