"""A whole training run from config to summary: prepare the data, start or join the ranks, train, write the report."""

import contextlib
import dataclasses
import shlex
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from crosscut.checkpoint import (
    Folder,
    GoodCheckpoint,
    Saver,
    checkpoint_folder,
    find_damage,
    latest_good_checkpoint,
    list_checkpoints,
    mark_passed_over,
)
from crosscut.checkpoint.folders import require_replaceable
from crosscut.checkpoint.storage import LocalFolder, folder_at
from crosscut.config import (
    CheckpointError,
    ConfigError,
    ResolvedRun,
    RunConfig,
    RunHung,
    RunStopped,
    TrainingError,
    write_toml,
)
from crosscut.config.conventions import CONFIG_FILE, INITIAL_FOLDER
from crosscut.config.published.folders import TOKENIZER_FILE, is_published, reason_against_export
from crosscut.config.system.deletion import claim
from crosscut.config.system.files import parse_json, read_small
from crosscut.config.system.folder_lock import FolderLock
from crosscut.config.system.terminal import new_console
from crosscut.data import Tokenizer, Tokens, open_tokens, prepare
from crosscut.flight.reading import FOLDER as WATCH_FOLDER
from crosscut.launch import Done, Ranks, in_ranks
from crosscut.launch.processes import choose_device
from crosscut.launch.stopping import INTERRUPTIBLE, ignore_requests
from crosscut.parallel import make_mesh
from crosscut.parallel.collectives import share_from_first
from crosscut.planner.messages.traffic import reason_against_halves
from crosscut.planner.time import bubble_share
from crosscut.pretrained import keep_companions, load_weights, require_finite, require_weights
from crosscut.training.batches import RunSamples, batches_of, samples_of
from crosscut.training.elastic import Restart, for_started_ranks, is_elastic
from crosscut.training.evaluations import Evaluations
from crosscut.training.in_memory import InMemory, forget, key_for, memory_saver
from crosscut.training.loop import Loop
from crosscut.training.precision import resolve_on
from crosscut.training.requirements import (
    require_capabilities,
    require_no_conversations,
    require_objective,
    require_own_names,
)
from crosscut.training.resuming import (
    describe_new_average,
    describe_new_settings,
    identity_of,
    newest_checkpoint_told,
    require_resumable,
)
from crosscut.training.spikes.order import Skip
from crosscut.training.spikes.record import drop_abandoned, is_abandoned, new_record, resumed_record
from crosscut.training.step import Trainer
from crosscut.training.watching.banner import print_banner
from crosscut.training.watching.forecast import hardware_for
from crosscut.training.watching.profiling import Profiler, require_steps
from crosscut.training.watching.run_report import SUMMARY_FILE, typed_command, write_report


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """Input of every rank. All ranks receive the same input before training starts."""

    run: ResolvedRun
    """Settings of the run, including the vocabulary size."""
    checkpoint: Folder | None
    """Checkpoint to resume from; None for a new run."""
    identity: dict[str, Any]
    """Identity of the run (`identity_of`), which every checkpoint of the run records."""
    done: int
    """Number of steps done in the checkpoint; 0 for a new run."""
    profile: bool = False
    """Whether to profile a few steps (`profiling`)."""
    restart: Restart | None = None
    """Description of this start as a restart; None if the run is not elastic, or if this is the run's first start."""
    memory_key: str = ""
    """Key of the run's checkpoints in memory; empty if the run keeps no checkpoints in memory."""
    is_in_memory: bool = False
    """Whether `checkpoint` is in the memory of the machines. Each machine then has a folder of its own."""
    lock: FolderLock | None = None
    """Lock of the run's folders."""
    skips: tuple[Skip, ...] = ()
    """Sequences that the run leaves out."""


@dataclasses.dataclass(frozen=True)
class _Stop:
    """Early end of a run, after its checkpoint was written."""

    step: int
    """Number of steps done."""
    interrupted: bool
    """Whether a user ended the run with Ctrl-C. If false, a scheduler ended the run."""


Resume = bool | Literal["auto"]
"""Whether to resume: `True` requires a checkpoint, `"auto"` resumes if there is a checkpoint and starts a new run if
not.
"""


def run_training(run: RunConfig, *, resume: Resume = False, profile: bool = False) -> None:
    """Train on the ranks of the layout. The function starts these ranks itself or, under torchrun, joins the ranks that
    torchrun started.

    With `resume="auto"`, the same call serves every start of a job. The call starts a new run, resumes an unfinished
    run, writes the final report if only the report is missing, and leaves a complete run unchanged. With `profile`, a
    few steps are recorded (`profiling`). User mistakes are found before any process starts (under torchrun: before the
    ranks build the model).

    Raises `ConfigError`, `LayoutError`, `DataError`, `CheckpointError` or `TrainingError`. Raises `RankFailure` if a
    rank failed for another reason. Raises `RunStopped` if SIGTERM, SIGUSR1 or Ctrl-C asked the run to stop and the run
    has written its checkpoint. From then on, SIGTERM and SIGUSR1 are ignored, so that a repeated signal cannot hide
    `RunStopped`.
    """
    if is_elastic(run):
        run, resume = for_started_ranks(run), resume or "auto"  # torchrun repeats the command after a failure
    ranks = Ranks(layout=run.layout, device=run.training.device, signals=INTERRUPTIBLE, may_idle=is_elastic(run))
    resolved = resolve_on(run, choose_device(run.training.device))
    require_objective(run)
    require_capabilities(resolved)
    stop = _trained(resolved, ranks, resume, profile)
    if stop is not None:
        ignore_requests()  # also in the process that started the ranks
        again = _again(run)
        advice = "Resume" if stop.interrupted else "Requeue the job, or resume"
        raise RunStopped(
            f"The run was {'interrupted' if stop.interrupted else 'asked to stop'} and has stopped after step "
            f"{stop.step} of {run.training.steps}. Its checkpoint is "
            f"`{checkpoint_folder(run.checkpoints_folder, stop.step)}`. "
            + (
                f"{advice} with `{again}`."
                if stop.step < run.training.steps
                else f"Only the report is missing: write it with `{again}`."
            ),
            interrupted=stop.interrupted,
        )


def _trained(run: ResolvedRun, ranks: Ranks, resume: Resume, profile: bool) -> _Stop | None:
    """Train on the ranks, and start them again after a hang if the run asks for this. Returns None if all steps are
    done.
    """
    while True:
        with contextlib.ExitStack() as until_the_end:
            memory = InMemory(run.config)
            prepare = partial(_prepare_unless_complete, run, resume, profile, until_the_end, memory)
            beforehand = memory.find if resume else lambda: None
            try:
                with newest_checkpoint_told([run.config.checkpoints_folder], _again(run.config)):
                    return in_ranks(ranks, partial(_train, memory=memory), prepare=prepare, beforehand=beforehand)
            except RunHung as hung:
                _require_restart(run.config, hung)
        resume = "auto"


def _again(run: RunConfig) -> str:
    """Return the command that resumes a run."""
    config = shlex.quote(str(Path(run.output.folder) / CONFIG_FILE))
    return f"{typed_command()} train {config} --resume auto"


def _require_restart(run: RunConfig, hung: RunHung) -> None:
    """Print a note if the ranks of the run are to start again after a hang. Otherwise, raise `RunStopped`."""
    newest = list_checkpoints(run.checkpoints_folder)[-1]
    if hung.may_restart:
        _note(f"The run hung. Its ranks start again from `{newest}`.")
        return
    ignore_requests()
    raise RunStopped(
        f"The run hung and has ended. The report above is also in `{run.output.folder}`. The last checkpoint is "
        f"`{newest}`. Requeue the job, or resume with `{_again(run)}`."
    ) from None


def is_complete(run: RunConfig) -> bool:
    """Whether the run's folder holds the final report and an undamaged checkpoint of the last step."""
    steps = run.training.steps
    try:
        summary = parse_json(read_small(Path(run.output.folder) / SUMMARY_FILE))
    except (OSError, ValueError):
        return False
    if not isinstance(summary, dict) or summary.get("steps") != steps:
        return False
    return not find_damage(checkpoint_folder(run.checkpoints_folder, steps), progress=True)


def _prepare_unless_complete(
    run: ResolvedRun, resume: Resume, profile: bool, until_the_end: contextlib.ExitStack, memory: InMemory
) -> _Prepared | Done[_Stop | None]:
    """Lock the folders of a run until the stack `until_the_end` is closed, and prepare the run for its ranks. If
    `resume="auto"` and the run is complete, say so and return `Done` instead.
    """
    if resume == "auto" and is_complete(run.config):
        text = f"The run in `{run.config.output.folder}` is complete: all {run.training.steps} steps are done."
        new_console().print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)
        return Done(None)
    lock = FolderLock(*_written_folders(run.config))
    until_the_end.enter_context(lock.held(_note))
    return dataclasses.replace(_prepare(run, resume, profile, memory), lock=lock)


def _written_folders(run: RunConfig) -> list[Path]:
    """Return the local folders that a run writes to. A folder inside another folder of the list is left out."""
    folders = [Path(run.output.folder)]
    checkpoints = folder_at(run.checkpoints_folder)
    if isinstance(checkpoints, LocalFolder) and not checkpoints.path.is_relative_to(folders[0]):
        folders.append(checkpoints.path)
    return folders


def _prepare(resolved: ResolvedRun, resume: Resume, profile: bool = False, memory: InMemory | None = None) -> _Prepared:
    """Create the run's folder, prepare its tokens and find the checkpoint to resume from."""
    run = resolved.config
    folder = Path(run.output.folder)
    require_own_names(folder)  # also before the checkpoints are read
    require_no_conversations(folder)
    may_be_done = resume == "auto"  # an earlier start may have been killed just before it wrote the report
    good, source = _checkpoint_of(run, resume, memory)
    resume = good is not None
    require_own_names(folder, is_new=not resume)
    tokens = _tokens(run, resume)
    if not resume:
        _note_smaller_vocabulary(run, tokens)
        _note_unused_vocabulary(run, tokens)
    run = with_vocabulary(run, tokens)
    samples_of(run, tokens)  # raises if the tokens do not fit
    Evaluations(run, tokens)  # raises if a text cannot be scored
    identity = identity_of(run, tokens)
    progress = None if good is None else require_resumable(run, good.folder, identity, may_be_all=may_be_done)
    done = progress.step if progress else 0
    require_replaceable(run.checkpoints_folder, after=done)
    if profile:
        require_steps(run.training.steps - done)
    if good is not None and progress:
        for text in filter(None, (*describe_new_settings(run, progress), describe_new_average(run, good.manifest))):
            _note(text)
    if run.training.initialize_from and good is None:
        _check_initial_weights(run, tokens)
    skips = (resumed_record(run, progress) if progress else new_record(run)).skips
    _fill_folder(run, folder, good)
    _note_waits(run, resolved.device)
    if restart := Restart.of(run, progress, source):
        _note(str(restart))
    key, checkpoint = key_for(run, is_resumed=resume), good.folder if good else None
    resolved, is_in_memory = resolved.with_config(run), source == "memory"
    return _Prepared(resolved, checkpoint, identity, done, profile, restart, key, is_in_memory, skips=skips)


def _note_waits(run: RunConfig, device: str) -> None:
    """Print notes about settings that make ranks wait."""
    if run.layout.pipeline > 1 and (text := _few_micro_batches(run)):
        _note(text)
    if device == "cuda" and (reason := reason_against_halves(run)):
        _note(f"Under sequence parallelism, the forward messages of this run overlap with no matrix product: {reason}.")


def _checkpoint_of(run: RunConfig, resume: Resume, memory: InMemory | None) -> tuple[GoodCheckpoint | None, str]:
    """Return the checkpoint from which the run resumes, and its place, `memory` or `disk`. For a new run, return None
    and an empty place. Checkpoints that the run abandoned in a rollback are not used. If such checkpoints are on disk,
    they are removed.

    Raises `CheckpointError` if all checkpoints are damaged, even with `resume="auto"`, because a new run would replace
    them.
    """
    if memory and resume and (good := memory.good) and not is_abandoned(run, good.manifest.progress):
        return good, "memory"
    if resume == "auto":
        resume = bool(list_checkpoints(run.checkpoints_folder))
    if not resume:
        _require_no_checkpoints(run)
        return None, ""
    for name in drop_abandoned(run):
        _note(f"The checkpoint `{name}` is removed, because the run has rolled back to an earlier step after a spike.")
    return latest_good_checkpoint(run.checkpoints_folder), "disk"


def _require_no_checkpoints(run: RunConfig) -> None:
    """Raise `ConfigError` if a new run's checkpoint folder already holds checkpoints."""
    if list_checkpoints(run.checkpoints_folder):
        mine = str(Path(run.output.folder))
        name, place = ("checkpoint", run.checkpoint.folder) if run.checkpoint.folder else ("output", mine)
        raise ConfigError(
            f"`{name}.folder` must name a new folder, but `{place}` already holds checkpoints of a run. Pass --resume "
            "to continue that run, or choose another folder."
        )


def _fill_folder(run: RunConfig, folder: Path, good: GoodCheckpoint | None) -> None:
    """Create the run's folder. For a new run, also write its config. For a resumed run, mark the damaged checkpoints
    that the run skips.
    """
    folder.mkdir(parents=True, exist_ok=True)
    claim(folder, WATCH_FOLDER)
    if good is not None:  # the old config stays until this run has written its first checkpoint
        mark_passed_over(good)
        return
    if run.training.initialize_from:
        keep_companions(Path(run.training.initialize_from), folder / INITIAL_FOLDER)
    write_toml(run, folder / CONFIG_FILE)
    if reason := reason_against_export(run.model):
        _note(f"The model cannot be exported to the Hugging Face format: {reason}.")


def _few_micro_batches(run: RunConfig) -> str:
    """Return a warning if a step has fewer micro-batches than the pipeline has ranks. Otherwise, the text is empty."""
    number, stages = run.num_micro_batches, run.layout.pipeline
    if number >= stages:
        return ""
    waiting = bubble_share(stages, number)
    return (
        f"A step has {number} micro-batch{'es' if number > 1 else ''} and the pipeline has {stages} ranks, so each "
        f"rank waits {waiting:.1f} times as long as it computes. Lower `training.micro_batch_size` "
        f"({run.micro_batch_size}) or raise `training.batch_size`. With {4 * stages} micro-batches, a rank would wait "
        f"{bubble_share(stages, 4 * stages):.2f} times as long as it computes."
    )


def _note(text: str) -> None:
    """Print a note to stderr."""
    new_console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)


def _tokens(run: RunConfig, resume: bool) -> Tokens:
    folder = Path(run.tokens_folder)
    if resume and folder.exists():  # the raw text may be gone by now
        return open_tokens(run.data, folder, verify=run.data.verify)
    return prepare(run.data, folder, seed=run.training.seed)


def _note_smaller_vocabulary(run: RunConfig, tokens: Tokens) -> None:
    """Print a note if the trained tokenizer has fewer entries than `data.vocab_size`, so that the model is smaller than
    planned.
    """
    asked = tokens.manifest.settings.trained_vocab_size
    if run.data.text and asked and tokens.vocab_size < asked and not run.model.vocab_size:
        _note(
            f"The tokenizer has {tokens.vocab_size:,} entries instead of the {asked:,} of `data.vocab_size`, because "
            "no further pair of tokens occurs more than once in the text. The model gets the smaller vocabulary. To "
            f"keep the planned size, set model.vocab_size={asked}."
        )


def _note_unused_vocabulary(run: RunConfig, tokens: Tokens) -> None:
    """Print a note if `model.vocab_size` is more than twice the size of the tokenizer's vocabulary, and more than twice
    the size that was requested for a trained tokenizer.
    """
    size = run.model.vocab_size
    if size > 2 * max(tokens.vocab_size, tokens.manifest.settings.trained_vocab_size):
        is_ready = run.data.tokens or run.data.mixture
        remedy = "Prepare the tokens with" if is_ready else "Set `data.tokenizer` to"
        _note(
            f"`model.vocab_size` is {size:,}, but the tokenizer has only {tokens.vocab_size:,} entries. The other "
            f"{size - tokens.vocab_size:,} rows of the embedding and of the output projection cost memory and time, "
            f"but no text uses them. {remedy} the tokenizer of the model, or set model.vocab_size=0 to use the "
            "tokenizer's size."
        )


def with_vocabulary(run: RunConfig, tokens: Tokens) -> RunConfig:
    """Return the run with `model.vocab_size` filled in: 0 is replaced by the vocabulary size of the tokens. Raises
    `ConfigError` if `model.vocab_size` is smaller than the vocabulary of the tokens.
    """
    size = run.model.vocab_size or tokens.vocab_size
    if size < tokens.vocab_size:
        raise ConfigError(
            f"`model.vocab_size` must be at least the size of the tokenizer's vocabulary ({tokens.vocab_size}), but is "
            f"{size}. Remove `model.vocab_size` to use the tokenizer's size."
        )
    return dataclasses.replace(run, model=dataclasses.replace(run.model, vocab_size=size))


def _check_initial_weights(run: RunConfig, tokens: Tokens) -> None:
    """Check `training.initialize_from`: it must be a Hugging Face folder with weights of this model and, if it has a
    tokenizer, the same token ids as `tokens`. Raises `ConfigError` or `CheckpointError`.
    """
    folder = Path(run.training.initialize_from)
    if not is_published(folder):
        raise ConfigError(
            f"`training.initialize_from` must name a Hugging Face folder, but `{folder}` has no `config.json`. Check "
            "the path."
        )
    require_weights(run.model, folder)
    theirs = folder / TOKENIZER_FILE
    if theirs.is_file() and not tokens.tokenizer().has_ids_of(Tokenizer.load(theirs)):
        raise ConfigError(
            f"`data.tokens` must be made with the tokenizer of `training.initialize_from` (`{theirs}`), but "
            f"`{tokens.path}` was made with another tokenizer. Prepare the tokens again with data.tokenizer={theirs}."
        )


def _train(prepared: _Prepared, device: torch.device, memory: InMemory | None = None) -> _Stop | None:
    """Train on one rank. Returns None if all steps are done. If the checkpoint of `prepared` is in memory, each machine
    reads the checkpoint from its own folder, which `memory` names.
    """
    run = prepared.run.config
    mesh = make_mesh(run.layout, device)
    tokens = open_tokens(run.data, Path(run.tokens_folder), verify=False)  # `_prepare` has checked the hashes
    lock = prepared.lock if mesh.is_first_rank else None
    trainer = Trainer(prepared.run, mesh)
    if run.training.initialize_from and prepared.checkpoint is None:
        load_weights(trainer.model, run.model, Path(run.training.initialize_from))
        require_finite(trainer.model, run.training.initialize_from, is_published=True)
    samples = samples_of(run, tokens)
    loop = _loop_of(prepared, trainer, samples)
    hardware = hardware_for(run, samples, loop.throughput.peak, mesh, done=prepared.done)
    if mesh.is_first_rank:
        print_banner(prepared.run, samples, hardware, device, new_console(), done=prepared.done)
    unwritten = ""
    renewed = contextlib.nullcontext() if lock is None else lock.renewed()
    with renewed, loop.saver, loop.memory_saver or contextlib.nullcontext():
        outcome = loop.train(memory.checkpoint if memory and prepared.is_in_memory else prepared.checkpoint)
        if not outcome.stopped:
            loop.require_folder()
            # The ranks wait for the report: a rank that exits early would kill the rank that writes it.
            with loop.evaluated_weights():
                unwritten = share_from_first(write_report(run, trainer.model, samples, outcome))
        _require_written(run, loop.saver, unwritten)
        if prepared.memory_key:
            forget(run, prepared.memory_key)
    return _Stop(outcome.last_step, outcome.interrupted) if outcome.stopped else None


def _loop_of(prepared: _Prepared, trainer: Trainer, samples: RunSamples) -> Loop:
    """Return the training loop of a run on this rank, with its savers."""
    run, is_first = prepared.run.config, trainer.mesh.is_first_rank
    batches = batches_of(run, samples, trainer.mesh)
    batches.order = dataclasses.replace(batches.order, skips=prepared.skips)
    loop = Loop(
        trainer,
        batches,
        identity=prepared.identity,
        profiler=Profiler(trainer, Path(run.output.folder)) if prepared.profile else None,
        evaluations=Evaluations(run, samples.tokens),
        lock=prepared.lock if is_first else None,
    )
    loop.restart = prepared.restart if is_first else None
    if prepared.memory_key:
        loop.keep_in_memory(memory_saver(run, prepared.memory_key, trainer))
    return loop


def _require_written(run: RunConfig, saver: Saver, unwritten: str) -> None:
    """Raise an error unless the last checkpoint and the report are written. `unwritten` is the reason why a file of the
    report is missing; it is empty if no file is missing. If the checkpoint is missing, the error is a
    `CheckpointError`, which also gives this reason. If only the report is missing, the error is a `TrainingError`.
    """
    try:
        saver.require_saved()
    except CheckpointError as error:
        if not unwritten:
            raise
        raise CheckpointError(
            f"{error} The report of the run is not complete either, because a file could not be written: {unwritten}."
        ) from None
    if unwritten:
        raise TrainingError(
            f"The report of the run must be written to `{run.output.folder}`, but is not: {unwritten}. All steps are "
            "done, and their checkpoint is written. Free space or grant access, and start again with --resume auto to "
            "write the report."
        )
