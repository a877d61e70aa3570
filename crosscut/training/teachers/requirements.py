"""Checks of a run's teacher before any rank starts."""

import torch

from crosscut.config import ConfigError, ResolvedRun
from crosscut.config.system.machine import available_memory
from crosscut.config.teachers.matching import require_teachable
from crosscut.data import Tokenizer
from crosscut.launch.processes import choose_device, ranks_on_this_machine
from crosscut.planner.teacher import teacher_bytes
from crosscut.pretrained import ModelSource, find_model


def find_teacher(run: ResolvedRun, tokenizer: Tokenizer) -> ModelSource | None:
    """Return the teacher of a run whose vocabulary is known; None if the run computes no teacher. `tokenizer` is that
    of the run.

    Raises `ConfigError` for a teacher that is missing, that does not fit the run's model, tokenizer or layout, or that
    does not fit into memory, and `CheckpointError` or `DataError` for a teacher whose files cannot be read.
    """
    config = run.config
    if not config.teacher.is_computed:
        return None
    config.teacher_ranks.require_possible()
    require_teachable(config)
    source = find_model(config.teacher.folder)
    if not tokenizer.has_ids_of(source.load_tokenizer()):
        raise ConfigError(
            f"`teacher.folder` must hold a model with the tokenizer of the run, but the tokenizer "
            f"`{source.tokenizer}` has other tokens. Set `data.tokenizer` to this file, or choose another teacher."
        )
    _require_room(run)
    return source


def _require_room(run: ResolvedRun) -> None:
    """Raise `ConfigError` if the teacher's weights alone do not fit into the memory of a rank."""
    needed, device = teacher_bytes(run.config), choose_device(run.device)
    if device.type == "cuda":
        room = int(torch.cuda.get_device_properties(device).total_memory)
    else:
        room = available_memory() // ranks_on_this_machine(run.layout.world_size)
    if needed > room:
        raise ConfigError(
            f"`teacher.folder` must hold a model that fits into the memory of a rank ({room / 1e9:.1f} GB), but the "
            f"weights of `{run.config.teacher.folder}` take {needed / 1e9:.1f} GB on each of "
            f"{run.config.teacher_ranks.tensor} tensor ranks. Raise `teacher.tensor`, or choose a narrower "
            "`teacher.precision` or a smaller teacher."
        )
