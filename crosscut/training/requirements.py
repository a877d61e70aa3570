"""Checks of this machine and of the output folder, which run before the ranks start."""

import shlex
from dataclasses import replace
from pathlib import Path

from crosscut.architecture import describe
from crosscut.architecture.optimizers.low_rank import require_low_rank
from crosscut.config import ConfigError, LayoutError, ResolvedRun, RunConfig
from crosscut.config.checks import shown
from crosscut.config.conventions import CHAT_FOLDER, CHECKPOINTS_FOLDER
from crosscut.config.system.machine import available_memory
from crosscut.config.system.markers import MARKER_FILE, marker_of
from crosscut.config.system.wording import counted
from crosscut.config.training import Device
from crosscut.launch.processes import choose_device, was_started
from crosscut.logbook.contents import require_known_versions
from crosscut.logbook.schema import RUN_FILES, Form
from crosscut.parallel import require_symmetric_memory
from crosscut.planner import Candidate, forecast_memory
from crosscut.training.precision import require_imitable_precision, require_precision
from crosscut.training.speed.compilation import require_compilation
from crosscut.training.tracking.trackers import require_trackers


def require_capabilities(run: ResolvedRun, *, only_to_verify: bool = False) -> None:
    """Check that this machine supports the precision, the compilation, the symmetric memory and the trackers that the
    run asks for, and that the model has gradients of the rank that the run asks for.

    With `only_to_verify`, a precision is also accepted if PyTorch emulates its 8-bit matrix products in software, and
    the rank may be that of the whole model. Raises `ConfigError`, or `LayoutError` if symmetric memory is not there.
    """
    device = choose_device(run.device)
    (require_imitable_precision if only_to_verify else require_precision)(run.precision, device)
    require_compilation(run, device)
    require_symmetric_memory(run.layout, device)
    require_trackers(run.config.output.trackers)
    if not only_to_verify:
        require_low_rank(describe(run.config.with_vocabulary().model).parameters(), run.optimizer.gradient_rank)


def require_memory(run: RunConfig) -> None:
    """Raise `LayoutError` if the ranks are about to start on the CPU of this machine, and its memory cannot hold their
    weights and moments.
    """
    if choose_device(run.training.device).type != "cpu" or was_started():
        return
    run = replace(run.with_vocabulary(), training=replace(run.training, device=Device.CPU))
    held, ranks, stages = 0, run.layout.world_size, run.layout.ranks.sizes["pipeline"]
    for stage in range(stages):
        memory = forecast_memory(Candidate.at(run, stage), device="cpu")
        held += (memory.weights + memory.master_weights + memory.optimizer) * (ranks // stages)
    if held > (there := available_memory()):
        raise LayoutError(
            f"The weights and moments of the model must fit into this machine's memory ({there / 1e9:,.0f} GB), but "
            f"{counted(ranks, 'rank needs', 'ranks need')} {held / 1e9:,.0f} GB. Choose a smaller model or fewer data "
            "ranks, or start the run on several machines with torchrun (docs/cluster.md)."
        )


def require_no_conversations(folder: Path) -> None:
    """Raise `ConfigError` if a run's output folder belongs to a `crosscut finetune chat` run, which reads conversations
    instead of a corpus.
    """
    if (folder / CHAT_FOLDER).is_dir():
        raise ConfigError(
            f"`output.folder` must be the folder of a run of `crosscut train`, but `{folder}` holds a run of `crosscut "
            f"finetune chat`. Resume that run with `crosscut finetune chat --resume --output "
            f"{shlex.quote(str(folder))}`, or choose another folder."
        )


def require_own_names(folder: Path, *, is_new: bool = False) -> None:
    """Raise `ConfigError` if something in the output folder has the name of a file or folder of the run, but is of
    another kind. For example, a folder in place of a file would end the run at its first step, and a FIFO would block
    the run. A link would lead the run to another folder of the user.

    Raises `NewerFileError` if a newer Crosscut wrote a file of the run.

    If `is_new`, also raise `ConfigError` if the folder has no marker of Crosscut, but holds something with a name of
    the run: the new run would replace a file of the user.
    """
    is_foreign = is_new and marker_of(folder) is None
    for file in (file for file in RUN_FILES if file.is_own):
        path, name, is_file = folder / file.name, file.name, file.form is not Form.FOLDER
        remedy = "Move whatever has this name now, or set `output.folder` to another folder."
        if path.exists() and not (path.is_file() if is_file else path.is_dir()):
            kind = "regular file" if is_file else "folder"
            raise ConfigError(f"`{path}` must be a {kind}, but is not. The run needs this name. {remedy}")
        if path.is_symlink():
            raise ConfigError(
                f"`{path}` must not be a link, but is one. A run follows no links in its folder. {_instead(name)}"
            )
        if is_foreign and path.exists():
            raise ConfigError(
                f"`{path}` must not exist, because a new run writes something of this name, and the folder has no "
                f"marker `{MARKER_FILE}` of an earlier run. {remedy}"
            )
    require_known_versions(folder)


def _instead(name: str) -> str:
    """Return the remedy for a link in a run's folder."""
    if name == CHECKPOINTS_FOLDER:
        return "Remove the link, and set `checkpoint.folder` to the folder that it names."
    return "Remove the link, or set `output.folder` to another folder."


def require_for_tuning(run: RunConfig) -> None:
    """Raise `ConfigError` if a fine-tuning run is asked to look for loss spikes, to leave out sequences or to write
    samples.
    """
    settings = (
        ("training.on_spike", str(run.training.on_spike), "off"),
        ("training.skips", run.training.skips, ""),
        ("output.sample_every", run.output.sample_every, 0),
    )
    for name, value, expected in settings:
        if value != expected:
            raise ConfigError(
                f"`{name}` must be {shown(expected)} in fine-tuning, but is {shown(value)}. Only `crosscut train` "
                f"looks for spikes, leaves out sequences and writes samples during a run. Remove `{name}`."
            )
