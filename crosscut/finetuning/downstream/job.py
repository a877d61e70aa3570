"""Fine-tune a model for a task: read and encode the examples, start or join the ranks, train a run for each seed, and
write the report.

Fine-tuning uses the training loop of `crosscut train`, with its checkpoints and metrics, so the folder of a seed is an
ordinary run. The checkpoint with the best score on the development examples is kept.
"""

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from crosscut.checkpoint import checkpoint_folder, load_model, mark_passed_over
from crosscut.checkpoint.format.manifest import current_versions
from crosscut.config import ConfigError, DataError, ModelConfig, ResolvedRun, RunConfig, write_toml
from crosscut.config.conventions import CHECKPOINTS_FOLDER, CONFIG_FILE, TOKENS_FOLDER
from crosscut.config.parts.head import HeadKind
from crosscut.config.published.folders import TOKENIZER_FILE
from crosscut.config.system.console import facts_panel
from crosscut.config.system.deletion import make_folder
from crosscut.config.system.files import copy_file
from crosscut.config.system.records import to_json
from crosscut.config.system.terminal import echo, new_console, typed_command
from crosscut.finetuning.downstream.batches import TaskBatches
from crosscut.finetuning.downstream.constant import constant_prediction
from crosscut.finetuning.downstream.evaluations import DevScores, outputs_shown
from crosscut.finetuning.downstream.folder import (
    TASK_FILE,
    SeedResult,
    TaskRuns,
    keep_best,
    result_of,
    results_of,
    save_outputs,
)
from crosscut.finetuning.downstream.predictions import predict, probabilities_of, scores_of
from crosscut.finetuning.downstream.report import print_results, write_report
from crosscut.finetuning.downstream.settings import TaskOrder, settings_of
from crosscut.finetuning.downstream.task import DEV, PARTS, TABLE, TEST, TRAIN, Example, TunedTask, files_of, of_kind
from crosscut.finetuning.downstream.teacher import teacher_for
from crosscut.finetuning.encoding.rows import EncodedRows
from crosscut.finetuning.encoding.texts import Long
from crosscut.finetuning.encoding.tokens import TextEncoder
from crosscut.finetuning.tasks import TextExample
from crosscut.launch.processes import choose_device, is_first_started
from crosscut.logbook.contents import read_metrics
from crosscut.logbook.objects import write_object
from crosscut.logbook.schema import SUMMARY_FILE
from crosscut.pretrained import ModelSource, find_model, keep_labels, load_trunk, notice_of_classes
from crosscut.pretrained.companions import KEPT, keep_special
from crosscut.training.driving.driver import Driver, PreparedRun, RunParts
from crosscut.training.in_memory import InMemory
from crosscut.training.loads.picture import plot_loads
from crosscut.training.loop import Loop, RunOutcome
from crosscut.training.precision import resolve_on
from crosscut.training.requirements import require_capabilities, require_for_tuning, require_own_names
from crosscut.training.resuming import (
    Resume,
    choose_checkpoint,
    describe_changes,
    identity_of_settings,
    require_resumable,
)
from crosscut.training.step import Trainer
from crosscut.training.teachers.record import teacher_record
from crosscut.training.watching.banner import device_name, model_rows
from crosscut.training.watching.run_report import plot_losses


def finetune_task(order: TaskOrder) -> None:
    """Fine-tune a model for a task, on the ranks of the layout.

    Files, model and settings are checked before any process starts. Raises `ConfigError`, `LayoutError`, `DataError`,
    `CheckpointError` or `TrainingError`, and the errors of `Driver.drive`.
    """
    source = None if order.resume else find_model(order.model)
    asked = _asked(order, source)
    asked.layout.require_one_stage("finetune")
    resolved = resolve_on(asked, choose_device(asked.training.device))
    require_capabilities(resolved)
    require_for_tuning(asked)
    Driver(
        run=resolved.config,
        checkpoints=lambda: Path(order.output).rglob(CHECKPOINTS_FOLDER),  # of each seed
        again=f"{typed_command()} finetune {order.task.name} --resume --output {shlex.quote(order.output)}",
        prepare=partial(_prepare, order, resolved, source),
    ).drive(order.resume)
    if is_first_started():
        _finish(Path(order.output))


def _asked(order: TaskOrder, source: ModelSource | None) -> RunConfig:
    """Return the settings of the runs, before the files are read. For a new run, only the layout and the device are
    final.
    """
    if source is None:
        return TaskRuns.load(Path(order.output), order.overrides).run
    return settings_of(order, _model_for(order.task, source))


def _model_for(task: TunedTask, source: ModelSource) -> ModelConfig:
    """Return the model's config with the head of a task. If the labels are not known yet, the head has two classes."""
    classes = max(2, task.num_classes) if task.head is HeadKind.CLASSES else 0
    return source.model.with_head(task.head, num_classes=classes)


def _prepare(
    order: TaskOrder, resolved: ResolvedRun, source: ModelSource | None, resume: Resume, memory: InMemory
) -> "list[_SeedRun]":
    """Encode the examples of a new run, and find the checkpoints of a resumed run. Returns the runs of the seeds that
    are not complete.
    """
    require_own_names(Path(order.output))
    is_new = source is not None and not resume  # if not, the folder holds the runs, as after a hang
    kept = _new(order, resolved.config, source) if source is not None and is_new else _resumed(order)
    kept = dataclasses.replace(kept, run=resolved.with_config(kept.run).config)
    runs = [run for run in map(kept.run_of, kept.seeds) if result_of(run) is None]
    own = Path(kept.run_of(kept.seeds[0]).output.folder) / TOKENS_FOLDER / TOKENIZER_FILE
    tokenizer = source.tokenizer if source is not None and is_new else own
    teacher = teacher_for(kept, resolved.with_config(kept.run), tokenizer) if runs else None
    identity = _identity(kept)
    prepared = [_seed_run(kept, resolved.with_config(run), identity, memory, teacher) for run in runs]
    if any(each.checkpoint is None for each in prepared):
        source = source or find_model(kept.model)
        prepared = [dataclasses.replace(each, source=source) for each in prepared]
        notice = notice_of_classes(source, kept.task.labels, may_name=kept.task.name == TABLE)
        if notice and kept.run.model.num_classes:
            echo(notice, err=True)
        for each in prepared:
            if each.checkpoint is None:
                _fill_folder(each.run.config, source, kept.task)
    kept.save()  # last: the file says that the folder is complete
    _print_banner(kept, len(prepared))
    return prepared


def _resumed(order: TaskOrder) -> TaskRuns:
    """Read the description of a resumed run. A run that is resumed with `--ensemble` gets an ensemble. Raises
    `ConfigError` if a setting that determines the seeds or the batches differs from that of the original run.
    """
    before, kept = TaskRuns.load(Path(order.output)), TaskRuns.load(Path(order.output), order.overrides)
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


def _seed_run(
    kept: TaskRuns, run: ResolvedRun, identity: Mapping[str, object], memory: InMemory, teacher: ModelSource | None
) -> "_SeedRun":
    seed = run.training.seed
    identity, record = {**identity, "training.seed": seed}, teacher_record(teacher)
    prepared = _SeedRun(
        run=run,
        identity=identity | record,
        checkpoint=None,
        teacher=teacher,
        kept=kept,
        title=f"seed {seed}" if kept.num_seeds > 1 else "",
    )
    good = choose_checkpoint(run.config, "auto", memory)
    if good is None:
        return prepared
    done = require_resumable(run.config, good.folder, identity, may_be_all=True).step
    mark_passed_over(good)
    for text in describe_changes(run.config, good.manifest, record):
        echo(text, err=True)
    return dataclasses.replace(prepared, checkpoint=good.folder, done=done)


def _identity(kept: TaskRuns) -> dict[str, object]:
    """Return the hashes of the examples, and all settings except the seed. A run can resume from a checkpoint only if
    all of these values are the same.
    """
    fingerprints = [kept.rows(part).fingerprint for part in (TRAIN, DEV)]
    return {**identity_of_settings(kept.run), "data.task": [kept.task.name, *fingerprints]}


def _new(order: TaskOrder, asked: RunConfig, source: ModelSource) -> TaskRuns:
    """Read and encode the examples of a new run, and write them to the folder."""
    folder = Path(order.output)
    if held := [name for name in (TASK_FILE, CONFIG_FILE) if (folder / name).exists()]:
        raise ConfigError(
            f"`--output` must name a new folder, but `{folder}` already holds `{held[0]}` of a run. Pass --resume to "
            "continue that run, or choose another folder."
        )
    require_own_names(folder, is_new=True)
    files = files_of(order.task.name, order.data, order.files)
    special = source.special
    task, examples = _read(dataclasses.replace(order.task, special=special, is_causal=source.model.is_causal), files)
    model = _model_for(task, source)
    encoder = TextEncoder(source.tokenizer, model, special, length=asked.training.sequence_length)
    rows = {part: _encode(task, encoder, part, examples[part], files[part]) for part in examples}
    run = settings_of(order, model, rows[TRAIN].steps_per_epoch(asked.training.batch_size))
    kept = TaskRuns(
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


def _read(task: TunedTask, files: Mapping[str, Path]) -> tuple[TunedTask, dict[str, tuple[Example, ...]]]:
    """Read the examples of all parts. The training examples determine the labels of all parts."""
    examples: dict[str, tuple[Example, ...]] = {}
    for part in PARTS:
        if part in files:
            task, examples[part], skipped = task.read(files[part], has_labels=None if part == TEST else True)
            if skipped:
                echo(f"{skipped:,} lines of `{files[part]}` have too few columns and are left out.", err=True)
        if part == TRAIN:
            _require_difference(task, examples[TRAIN], files[TRAIN])
    return task, examples


def _require_difference(task: TunedTask, examples: Sequence[Example], path: Path) -> None:
    """Raise `DataError` for training examples with a single class, or whose numbers are all equal."""
    if task.head is HeadKind.CLASSES and task.num_classes < 2:
        raise DataError(
            f"`{path}` must have at least 2 different labels, but has {task.num_classes}. Add examples, or name the "
            "labels with --labels."
        )
    numbers = {example.number for example in of_kind(TextExample, examples)}
    if task.head is HeadKind.NUMBER and len(numbers) < 2:
        raise DataError(f"`{path}` must have at least 2 different numbers, but has {len(numbers)}. Add examples.")


def _encode(task: TunedTask, encoder: TextEncoder, part: str, examples: tuple[Example, ...], path: Path) -> EncodedRows:
    rows, num_long, notice = task.encode(encoder, examples, name=str(path), may_drop=part == TRAIN)
    if notice:
        echo(notice, err=True)
    if num_long:
        what = "left out" if task.long is Long.DROP and part == TRAIN else "cut"
        echo(
            f"{num_long:,} of {len(examples):,} examples of `{path}` are longer than {encoder.length} tokens and are "
            f"{what}.",
            err=True,
        )
    return rows


def _fill_folder(run: RunConfig, source: ModelSource, task: TunedTask) -> None:
    """Write the config, the tokenizer, the names of the labels and the special token ids of a new run."""
    tokens = Path(run.output.folder) / TOKENS_FOLDER
    make_folder(tokens.parent, tokens.name)
    copy_file(source.tokenizer, tokens / TOKENIZER_FILE)
    for name in KEPT:
        if (beside := source.tokenizer.with_name(name)).is_file():
            copy_file(beside, tokens / name)
    if run.model.num_classes:
        keep_labels(Path(run.output.folder), task.labels)
    if task.is_causal:
        keep_special(Path(run.output.folder), task.special)
    write_toml(run, Path(run.output.folder) / CONFIG_FILE)


def _print_banner(kept: TaskRuns, num_jobs: int) -> None:
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SeedRun(PreparedRun):
    """Fine-tuning run of one seed, ready to train."""

    kept: TaskRuns
    source: ModelSource | None = None
    """Model from which a new run starts."""

    def initialize(self, trainer: Trainer) -> None:
        """Load the weights of the model from which fine-tuning starts."""
        assert self.source is not None
        labels = self.kept.task.labels if self.run.model.num_classes else ()
        fresh = load_trunk(trainer.model, self.source, labels)
        if fresh and trainer.mesh.is_first_rank and self.run.training.seed == self.kept.seeds[0]:
            echo(f"New weights, drawn from the seed: {', '.join(fresh)}.", err=True)

    def parts(self, trainer: Trainer) -> RunParts:
        """Read the encoded examples, and make the run's parts on this rank."""
        kept, run = self.kept, self.run.config
        rows = {part: kept.rows(part) for part in kept.files}
        before = [row for row in read_metrics(Path(run.output.folder)) if row["step"] <= self.done]
        return RunParts(
            batches=TaskBatches(run, rows[TRAIN], rows[DEV], trainer.mesh, padding=kept.padding),
            evaluations=DevScores(
                kept.task, run, rows[DEV], kept.examples(DEV), padding=kept.padding, rows_before=before
            ),
            finish=partial(_score_best, kept, rows),
        )


def _score_best(kept: TaskRuns, rows: Mapping[str, EncodedRows], loop: Loop, outcome: RunOutcome) -> str:
    """Pick the checkpoint with the best development score, score it on all parts but training, and write the result.
    Raises `CheckpointError` if the last checkpoint is not written.
    """
    run, model = loop.run, loop.trainer.model
    loop.checkpoints.saver.require_saved()
    assert loop.evaluations is not None
    best = loop.evaluations.best_step or outcome.last_step  # a resumed run whose metrics are lost has no scores
    if best != outcome.last_step:
        folder = checkpoint_folder(run.checkpoints_folder, best)
        load_model(folder, model=model, padded=model.padded_rows)
    scores, constant = {}, {}
    for part in (part for part in kept.files if part != TRAIN):
        outputs = outputs_shown(
            model, rows[part], batch_size=run.micro_batch_size, padding=kept.padding, name=f"{part} at step {best}"
        )
        if loop.mesh.is_first_rank:
            save_outputs(run, part, outputs)
            examples, probabilities = kept.examples(part), probabilities_of(kept.task, rows[part], outputs)
            predictions = predict(kept.task, rows[part], examples, probabilities)
            scores[part] = scores_of(kept.task, predictions, examples)
            if same := constant_prediction(kept.task, predictions, examples):
                constant[part] = same
    if loop.mesh.is_first_rank:
        _write_result(run, best, _Scored(scores, constant), outcome, loop.mesh.device)
    return ""


class _Scored(NamedTuple):
    """Scores and constant predictions of a run's best checkpoint, by part (`SeedResult`)."""

    scores: Mapping[str, Mapping[str, float]]
    constant: Mapping[str, str]


def _write_result(run: RunConfig, best: int, scored: _Scored, outcome: RunOutcome, device: torch.device) -> None:
    folder = Path(run.output.folder)
    plot_losses(folder, per="example")
    plot_loads(folder)
    result = SeedResult(
        seed=run.training.seed,
        steps=run.training.steps,
        best_step=best,
        scores=scored.scores,
        constant=scored.constant,
        layout=str(run.layout),
        device=device_name(device),
        versions=current_versions(),
        training_seconds=outcome.seconds,
    )
    losses = {"dev_loss_before": outcome.before.loss, "dev_loss_after": outcome.after.loss}
    write_object(folder / SUMMARY_FILE, {**to_json(result), **losses})  # last: it marks a complete run


def _finish(folder: Path) -> None:
    """Keep the best checkpoint of each seed, write the report, and print the scores."""
    kept = TaskRuns.load(folder)
    for seed, result in results_of(kept).items():
        keep_best(kept.run_of(seed), result.best_step)
    print_results(write_report(kept), new_console())
