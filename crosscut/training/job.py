"""A whole training run from config to summary: prepare the data, start or join the ranks, train, write the report."""

import dataclasses
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from crosscut.checkpoint import checkpoint_folder, find_damage
from crosscut.checkpoint.folders import require_replaceable
from crosscut.config import ResolvedRun, RunConfig
from crosscut.config.conventions import CONFIG_FILE
from crosscut.config.system.terminal import echo, new_console, typed_command
from crosscut.data import Tokens, open_tokens
from crosscut.launch.processes import choose_device
from crosscut.logbook.contents import read_summary
from crosscut.logbook.skips import SampleSkip
from crosscut.training.batches import RunSamples, batches_of, samples_of
from crosscut.training.driving.driver import Driver, PreparedRun, RunParts, Stop, load_initial_weights
from crosscut.training.driving.preparation import (
    describe_settings,
    describe_vocabulary,
    fill_folder,
    require_initial_weights,
    tokens_of,
    with_vocabulary,
)
from crosscut.training.elastic import Restart, for_started_ranks, is_elastic, without_a_node
from crosscut.training.evaluations import Evaluations
from crosscut.training.in_memory import InMemory, key_for
from crosscut.training.loop import Loop, RunOutcome
from crosscut.training.precision import resolve_on
from crosscut.training.profiling.profiler import Profiler, require_steps
from crosscut.training.requirements import (
    require_capabilities,
    require_no_conversations,
    require_own_names,
)
from crosscut.training.resuming import (
    Resume,
    choose_checkpoint,
    describe_changes,
    identity_of,
    require_resumable,
)
from crosscut.training.spikes.record import new_record, resumed_record, write_new_record
from crosscut.training.step import Trainer
from crosscut.training.teachers.cache import record_of, teacher_of
from crosscut.training.watching.banner import print_banner
from crosscut.training.watching.forecast import hardware_for
from crosscut.training.watching.run_report import draw_samples, write_report


def run_training(run: RunConfig, *, resume: Resume = False, profile: bool = False) -> None:
    """Train on the ranks of the layout. The function starts these ranks itself or, under torchrun, joins the ranks that
    torchrun started.

    With `resume="auto"`, the same call serves every start of a job. The call starts a new run, resumes an unfinished
    run, writes the final report if only the report is missing, and leaves a complete run unchanged. With `profile`, a
    few steps are recorded (`profiling`). User mistakes are found before any process starts (under torchrun: before the
    ranks build the model).

    Raises `ConfigError`, `LayoutError`, `DataError`, `CheckpointError` or `TrainingError`, and the errors of
    `Driver.drive`.
    """
    if is_elastic(run):
        run, resume = for_started_ranks(run), resume or "auto"  # torchrun repeats the command after a failure
    resolved = resolve_on(run, choose_device(run.training.device))
    run.require_objective()
    require_capabilities(resolved)
    config = resolved.config
    again = f"{typed_command()} train {shlex.quote(str(Path(run.output.folder) / CONFIG_FILE))} --resume auto"
    Driver(
        run=config,
        checkpoints=lambda: [config.checkpoints_folder],
        again=again,
        prepare=partial(_prepare, resolved, profile),
        is_complete=partial(_may_skip, config),
        stopped=partial(_describe_stop, config, again),
    ).drive(resume)


def _describe_stop(run: RunConfig, again: str, stop: Stop) -> str:
    advice = "Resume" if stop.interrupted else "Requeue the job, or resume"
    return (
        f"The run was {'interrupted' if stop.interrupted else 'asked to stop'} and has stopped after step "
        f"{stop.step} of {run.training.steps}. Its checkpoint is "
        f"`{checkpoint_folder(run.checkpoints_folder, stop.step)}`. "
        + (
            f"{advice} with `{again}`."
            if stop.step < run.training.steps
            else f"Only the report is missing: write it with `{again}`."
        )
    )


def is_complete(run: RunConfig) -> bool:
    """Whether the run's folder holds the final report and an undamaged checkpoint of the last step."""
    steps = run.training.steps
    summary = read_summary(Path(run.output.folder))
    if summary is None or summary.get("steps") != steps:
        return False
    return not find_damage(checkpoint_folder(run.checkpoints_folder, steps), progress=True)


def _may_skip(run: RunConfig, resume: Resume) -> bool:
    """Whether the run is complete, so that `resume="auto"` has nothing to do. If it is, say so."""
    if resume != "auto" or not is_complete(run):
        return False
    echo(f"The run in `{run.output.folder}` is complete: all {run.training.steps} steps are done.")
    return True


def _prepare(resolved: ResolvedRun, profile: bool, resume: Resume, memory: InMemory) -> "Sequence[_TextRun]":
    """Create the run's folder, prepare its tokens and find the checkpoint to resume from."""
    run, folder = resolved.config, Path(resolved.config.output.folder)
    require_own_names(folder)  # also before the checkpoints are read
    require_no_conversations(folder)
    good = choose_checkpoint(run, resume, memory)
    is_new, is_in_memory = good is None, good is not None and good.folder is memory.checkpoint
    require_own_names(folder, is_new=is_new)
    tokens = tokens_of(run, is_resumed=not is_new)
    _note(*describe_vocabulary(run, tokens) if is_new else ())
    run = _fitting(run, tokens)
    identity = identity_of(run, tokens)
    # With "auto", an earlier start may have been killed just before it wrote the report.
    progress = require_resumable(run, good.folder, identity, may_be_all=resume == "auto") if good else None
    done = progress.step if progress else 0
    require_replaceable(run.checkpoints_folder, after=done)
    if profile:
        require_steps(run.training.steps - done)
    spikes = resumed_record(run, progress) if progress else new_record(run)
    teacher = teacher_of(resolved.with_config(run), tokens, spikes.skips)
    record = record_of(run, teacher)
    _note(*describe_changes(run, good.manifest, record) if good else ())
    _note(*require_initial_weights(run, tokens) if run.training.initialize_from and is_new else ())
    write_new_record(run, spikes, is_new=is_new)
    restart = Restart.of(run, progress, "memory" if is_in_memory else "disk")
    fill_folder(run, good)
    _note(*describe_settings(run, resolved.device, is_new=is_new), str(restart or ""), without_a_node(run))
    prepared = _TextRun(
        run=resolved.with_config(run),
        identity=identity | record,
        checkpoint=good.folder if good else None,
        done=done,
        teacher=teacher,
        is_in_memory=is_in_memory,
        memory_key=key_for(run, is_resumed=not is_new),
        restart=restart,
        profile=profile,
        skips=spikes.skips,
    )
    return [prepared]


def _fitting(run: RunConfig, tokens: Tokens) -> RunConfig:
    """Return the run with its vocabulary. Raises an error if the tokens do not fit, or if a text cannot be scored."""
    run = with_vocabulary(run, tokens)
    samples_of(run, tokens)
    Evaluations(run, tokens)
    return run


def _note(*texts: str) -> None:
    """Print the notes that are not empty."""
    for text in filter(None, texts):
        echo(text, err=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TextRun(PreparedRun):
    """Run of `crosscut train`, ready to train."""

    profile: bool
    """Whether to profile a few steps (`profiling`)."""
    skips: tuple[SampleSkip, ...]
    """Sequences that the run leaves out."""

    def initialize(self, trainer: Trainer) -> None:
        """Load the weights of `training.initialize_from`, if the setting names a folder."""
        load_initial_weights(trainer)

    def parts(self, trainer: Trainer) -> RunParts:
        """Open the tokens, and make the run's parts on this rank."""
        run = self.run.config
        tokens = open_tokens(run.data, Path(run.tokens_folder), verify=False)  # `_prepare` has checked the hashes
        samples = samples_of(run, tokens)
        batches = batches_of(run, samples, trainer.mesh)
        batches.order = dataclasses.replace(batches.order, skips=self.skips)
        return RunParts(
            batches=batches,
            evaluations=Evaluations(run, tokens),
            profiler=Profiler(trainer, Path(run.output.folder)) if self.profile else None,
            begin=partial(self._print_banner, samples),
            samples=partial(draw_samples, run, trainer.model, tokens),
            finish=partial(self._write_report, samples),
        )

    def _print_banner(self, samples: RunSamples, loop: Loop) -> None:
        hardware = hardware_for(loop.run, samples, loop.throughput.peak, loop.mesh, done=self.done)
        if loop.mesh.is_first_rank:
            print_banner(self.run, samples, hardware, loop.mesh.device, new_console(), done=self.done)

    def _write_report(self, samples: RunSamples, loop: Loop, outcome: RunOutcome) -> str:
        with loop.evaluated_weights():
            return write_report(loop.run, loop.trainer.model, samples, outcome)
