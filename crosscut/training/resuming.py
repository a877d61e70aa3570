"""Choice of the checkpoint from which a run resumes, conditions under which the run may resume, and messages about
changes in the resumed run: a jump in the learning rate, a different z-loss or teacher, and the beginning or end of a
moving average of the weights.
"""

import dataclasses
import hashlib
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from crosscut.checkpoint import (
    Folder,
    GoodCheckpoint,
    Manifest,
    Progress,
    holds_average,
    latest_good_checkpoint,
    list_checkpoints,
    require_identity,
)
from crosscut.checkpoint.storage import LocalFolder
from crosscut.config import CheckpointError, ConfigError, RankFailure, RunConfig
from crosscut.config.conventions import CHECKPOINTS_FOLDER
from crosscut.config.data import Objective
from crosscut.config.system.terminal import echo
from crosscut.data import Tokens, folders_of
from crosscut.logbook.contents import former_run, hang_steps, read_settings
from crosscut.training.in_memory import InMemory
from crosscut.training.optimization.schedule import describe_jump
from crosscut.training.spikes.record import drop_abandoned, is_abandoned
from crosscut.training.teachers.record import describe_other_teacher

Resume = bool | Literal["auto"]
"""Whether to resume: `True` requires a checkpoint, `"auto"` resumes if there is a checkpoint and starts a new run if
not.
"""

_BATCHES = ("batch_size", "initial_batch_size", "ramp_steps", "sequence_length", "seed", "document_mask")
"""Settings of `[training]` that determine the batches: the order of the data, and the tokens to which a token
attends."""

_MOST_HANGS = 3
"""Maximum number of hangs after which a run continues from the same checkpoint."""

_MASKED = ("pairs", "mask_fraction", "mask_words")
"""Settings of `[data]` that determine the samples of a masked language model."""


def identity_of(run: RunConfig, tokens: Tokens) -> dict[str, object]:
    """Return the values in which the run and a checkpoint must agree for the run to resume from the checkpoint. They
    are the model's settings except dropout and the padding of the vocabulary, the settings that determine the batches,
    the optimizer for matrices, the rank of their gradients, a hash of the tokens, a hash of the sentences if the
    samples are pairs of segments, and each token folder's share of a mixture.
    """
    folders = folders_of(tokens)
    manifests = [folder.manifest for folder in folders]
    files = [entry.tokens_sha256 for made in manifests for entry in (*made.train, made.validation)]
    data: dict[str, object] = {"data.tokens": hashlib.sha256("".join(files).encode()).hexdigest()[:16]}
    if run.data.objective is Objective.MASKED and run.data.pairs:
        ends = [entry.sentences_sha256 for made in manifests for entry in (*made.train, made.validation)]
        data["data.sentences"] = hashlib.sha256("".join(ends).encode()).hexdigest()[:16]
    data["data.mixture"] = list(folders.values()) if run.data.mixture else []
    return {**identity_of_settings(run), **data}


def identity_of_settings(run: RunConfig) -> dict[str, object]:
    """Return the part of `identity_of` that does not depend on the data."""
    settings = dataclasses.asdict(run.model).items()
    model = {f"model.{name}": value for name, value in settings if name not in ("dropout", "vocab_multiple")}
    batches = {f"training.{name}": getattr(run.training, name) for name in _BATCHES}
    is_masked = run.data.objective is Objective.MASKED
    masked = {f"data.{name}": getattr(run.data, name) for name in _MASKED} if is_masked else {}
    optimizer = {f"optimizer.{name}": getattr(run.optimizer, name) for name in ("matrices", "gradient_rank")}
    others = {"data.objective": run.data.objective, **optimizer}
    return {**model, **batches, **masked, **others}


def choose_checkpoint(
    run: RunConfig, resume: Resume, memory: InMemory, *, option: str = "output.folder"
) -> GoodCheckpoint | None:
    """Return the checkpoint from which the run resumes; None for a new run. Checkpoints that the run abandoned in a
    rollback are not used. If such checkpoints are on disk, they are removed. `option` names the setting of the run's
    folder in messages.

    Raises `CheckpointError` if all checkpoints are damaged, even with `resume="auto"`, because a new run would replace
    them. Raises `ConfigError` if a new run's checkpoint folder already holds checkpoints, or if its folder holds the
    record of a run whose checkpoints are in another folder.
    """
    if resume and (good := memory.good) and not is_abandoned(run, good.manifest.progress):
        return good
    found = list_checkpoints(run.checkpoints_folder)
    if found and not resume:
        mine = str(Path(run.output.folder))
        name, place = ("checkpoint.folder", run.checkpoint.folder) if run.checkpoint.folder else (option, mine)
        raise ConfigError(
            f"`{name}` must name a new folder, but `{place}` already holds checkpoints of a run. Pass --resume to "
            "continue that run, or choose another folder."
        )
    if not found:
        _require_record_elsewhere(run, option)
    if resume is not True and not found:
        return None
    for name in drop_abandoned(run):
        echo(
            f"The checkpoint `{name}` is removed, because the run has rolled back to an earlier step after a spike.",
            err=True,
        )
    return latest_good_checkpoint(run.checkpoints_folder)


def _require_record_elsewhere(run: RunConfig, option: str) -> None:
    """Raise `ConfigError` if the run's folder holds the record of a run whose checkpoints are not in the checkpoint
    folder of this run: a new run would replace the record. `option` names the setting of the run's folder.
    """
    folder = Path(run.output.folder)
    section = read_settings(folder).get("checkpoint")
    named = str(section.get("folder") or "") if isinstance(section, dict) else ""
    place = named or str(folder / CHECKPOINTS_FOLDER)
    try:
        if not list_checkpoints(place):
            return
    except CheckpointError:  # an object store that cannot be reached may hold checkpoints
        pass
    remedy = f"set checkpoint.folder={shlex.quote(named)}" if named else "remove `checkpoint.folder`"
    raise ConfigError(
        f"`{option}` must name a new folder, but `{folder}` holds the record of a run whose checkpoints are in "
        f"`{place}`. To continue that run, {remedy} and pass --resume. For a new run, choose another folder."
    )


def require_resumable(
    run: RunConfig, checkpoint: Folder, identity: Mapping[str, object], *, may_be_all: bool
) -> Progress:
    """Return the progress of a checkpoint from which the run resumes. With `may_be_all`, the checkpoint may be the one
    of the last step.

    Raises `CheckpointError` if the checkpoint belongs to another run, and `ConfigError` if no steps are left.
    """
    progress = require_identity(checkpoint, identity)
    done = progress.step
    if run.training.steps < done or (run.training.steps == done and not may_be_all):
        raise ConfigError(
            f"`training.steps` must be above the step of the checkpoint ({done}), but is {run.training.steps}. "
            f"Try training.steps={2 * done}."
        )
    return progress


@contextmanager
def naming_newest_checkpoint(checkpoints: Iterable[str | Path], again: str) -> Iterator[None]:
    """Add to a `RankFailure` inside the context that the run has checkpoints, and how it continues from the newest one.
    `checkpoints` are the folders of the checkpoints, and `again` is the command that resumes the run.
    """
    try:
        yield
    except RankFailure as failure:
        newest = newest_checkpoint(checkpoints)
        if newest is None:
            raise
        step = int(newest.name.removeprefix("step-"))
        raise RankFailure(
            f"{failure}\nThe newest checkpoint is that of step {step:,}, `{newest}`. Continue from it with `{again}`."
        ) from None


def newest_checkpoint(checkpoints: Iterable[str | Path]) -> Folder | None:
    """Return the newest checkpoint in several folders, by the time at which it was written. None if there is none."""
    found = [each[-1] for each in map(list_checkpoints, checkpoints) if each]
    return max(found, key=lambda one: one.path.stat().st_mtime if isinstance(one, LocalFolder) else 0.0, default=None)


def can_resume_after_hang(folder: Path, checkpoints: str | Path) -> bool:
    """Whether a run that hangs can continue from a checkpoint. The run must have a checkpoint, and must have hung at
    most `_MOST_HANGS` times since the newest one. Hangs are counted by their reports in the run's folder.
    """
    found = list_checkpoints(checkpoints)
    if not found:
        return False
    newest = int(found[-1].name.removeprefix("step-"))
    return sum(step > newest for step in hang_steps(folder)) <= _MOST_HANGS


def describe_changes(run: RunConfig, manifest: Manifest, teacher: Mapping[str, object]) -> list[str]:
    """Describe how new settings change the learning rate, the loss or the average of a run that resumes from the
    checkpoint with this manifest. Return one message for each change. `teacher` is the record of the run's teacher
    (`teachers.record`).
    """
    told = [*_describe_new_settings(run, manifest.progress, teacher), _describe_new_average(run, manifest)]
    return [text for text in told if text]


def _describe_new_settings(run: RunConfig, progress: Progress, teacher: Mapping[str, object]) -> list[str]:
    """Describe how new settings change the learning rate or the loss. `progress` holds the settings in the checkpoint.
    The list is empty if nothing changes at the next step, or if the checkpoint has no readable config.
    """
    saved = former_run(progress.config)
    if saved is None or progress.step == run.training.steps:
        return []
    told = [describe_jump(progress.step, saved=saved, run=run)]
    if (now := run.training.z_loss) != (before := saved.training.z_loss):
        told.append(
            f"The z-loss changes at step {progress.step + 1}: `training.z_loss` is {now:g} instead of {before:g}."
        )
    other = describe_other_teacher(progress, teacher)
    is_other = saved.teacher.folder != run.teacher.folder if other is None else bool(other)
    if is_other or saved.teacher.loss_settings != run.teacher.loss_settings:
        where = f"at step {progress.step + 1} (`teacher`)."
        told.append(f"The teacher or its share of the loss changes {where}{other or ''}")
    return told


def _describe_new_average(run: RunConfig, manifest: Manifest) -> str:
    """Return a message about the moving average of the weights (`optimizer.ema_decay`) if only the resumed run or only
    the checkpoint has an average. Otherwise, the message is empty.
    """
    step, is_kept, is_there = manifest.progress.step, bool(run.optimizer.ema_decay), holds_average(manifest)
    if is_kept and not is_there:
        return (
            f"The checkpoint of step {step} holds no moving average of the weights. With `optimizer.ema_decay`, the "
            "average begins with the weights of this checkpoint."
        )
    if is_there and not is_kept:
        return (
            f"The checkpoint of step {step} holds a moving average of the weights, but `optimizer.ema_decay` is 0. "
            "The run drops the average, and uses the weights of the last step for scores, samples and checkpoints. To "
            "continue the average, set `optimizer.ema_decay`."
        )
    return ""
