"""A whole run, from the config to the summary: prepares the data, starts or joins the ranks, trains, reports."""

import dataclasses
from pathlib import Path

from crosscut.checkpoint import latest_checkpoint, list_checkpoints
from crosscut.config import ConfigError, LayoutError, RunConfig, write_toml
from crosscut.data import Sampler, TokenFolder, prepare
from crosscut.parallel import launch, make_mesh, process_group
from crosscut.parallel.collectives import wait_for_all
from crosscut.parallel.mesh import world_size_message
from crosscut.parallel.processes import (
    choose_device,
    is_first_started,
    joined_rank,
    require_devices,
    started_world_size,
    was_started,
)
from crosscut.training.batches import Batches
from crosscut.training.loop import CHECKPOINT_FOLDER, Loop
from crosscut.training.report import write_report
from crosscut.training.step import Trainer

CONFIG_FILE = "config.toml"


def run_training(run: RunConfig, *, resume: bool = False) -> None:
    """Do a run in the ranks that its layout asks for, or in those that torchrun started.

    Whatever the user can get wrong is found before a process starts (under torchrun: before the first collective).
    Raises `ConfigError`, `LayoutError`, `DataError`, `CheckpointError` or `TrainingError`; `RankFailure` when a rank
    failed for another reason.
    """
    if was_started():
        if started_world_size() != run.layout.world_size:
            raise LayoutError(world_size_message(run.layout, started_world_size()))
        with joined_rank():
            _join(run, resume)
        return
    run = prepare_run(run, resume=resume)
    launch(_train_rank, (run, resume), num_ranks=run.layout.world_size)


def prepare_run(run: RunConfig, *, resume: bool) -> RunConfig:
    """Make what the ranks need: the run's folder, the tokens, and the run with its vocabulary filled in."""
    folder = Path(run.output.folder)
    checkpoints = folder / CHECKPOINT_FOLDER
    if resume:
        latest_checkpoint(checkpoints)
    elif list_checkpoints(checkpoints):
        raise ConfigError(
            f"`output.folder` must name a new folder, but `{folder}` holds checkpoints of a run. Pass --resume to go "
            "on with it, or choose another folder."
        )
    if not was_started():
        require_devices(run.training.device, run.layout.world_size)
    tokens = prepare(run.data, Path(run.tokens_folder), seed=run.training.seed)
    run = with_vocabulary(run, tokens)
    Sampler(tokens.train, sequence_length=run.training.sequence_length, seed=run.training.seed)  # raises if too short
    folder.mkdir(parents=True, exist_ok=True)
    write_toml(run, folder / CONFIG_FILE)
    return run


def with_vocabulary(run: RunConfig, tokens: TokenFolder) -> RunConfig:
    """The run with `model.vocab_size` taken from the tokens where it is 0. Raises `ConfigError` if it is too small."""
    size = run.model.vocab_size or tokens.vocab_size
    if size < tokens.vocab_size:
        raise ConfigError(
            f"`model.vocab_size` must hold the tokenizer's vocabulary ({tokens.vocab_size}), but is {size}. "
            "Leave it out to take the tokenizer's."
        )
    return dataclasses.replace(run, model=dataclasses.replace(run.model, vocab_size=size))


def _join(run: RunConfig, resume: bool) -> None:
    """The work of a rank that torchrun started: the first one prepares while the others wait."""
    with process_group(choose_device(run.training.device)):
        if is_first_started():
            prepare_run(run, resume=resume)
        wait_for_all()
        _train(run, resume)


def _train_rank(run: RunConfig, resume: bool) -> None:
    """The work of a rank that `launch` started."""
    with process_group(choose_device(run.training.device)):
        _train(run, resume)


def _train(run: RunConfig, resume: bool) -> None:
    mesh = make_mesh(run.layout, choose_device(run.training.device))
    tokens = TokenFolder.open(Path(run.tokens_folder), verify=False)  # `prepare_run` has compared the hashes
    run = with_vocabulary(run, tokens)
    trainer = Trainer(run, mesh)
    batches = Batches(run, tokens, mesh)
    checkpoint = latest_checkpoint(Path(run.output.folder) / CHECKPOINT_FOLDER) if resume else None
    outcome = Loop(run, trainer, batches, mesh).train(checkpoint)
    write_report(run, trainer.model, tokens, outcome)
