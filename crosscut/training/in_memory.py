"""Checkpoints of a run in the memory of its machines. This module finds a checkpoint at the start, checks that the
machines have enough memory, makes the saver, and removes the checkpoints at the end.
"""

import secrets
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from crosscut.checkpoint import GoodCheckpoint, Saver, list_checkpoints, read_manifest
from crosscut.checkpoint.format.manifest import step_of
from crosscut.checkpoint.in_memory import (
    FOLDER_VARIABLE,
    KEY,
    Hosts,
    forget_all,
    free_bytes,
    make_memory_folder,
    memory_folder,
    remove_other_keys,
    restore,
    why_not_own,
)
from crosscut.checkpoint.storage import Folder, LocalFolder
from crosscut.config import CheckpointConfig, CheckpointError, ConfigError, RunConfig, write_whole
from crosscut.config.layouts.ranks import RankPlan
from crosscut.config.run import OnFailure
from crosscut.config.system.files import read_small
from crosscut.config.system.markers import MARKER_FILE, ForeignFolderError
from crosscut.config.system.terminal import echo
from crosscut.logbook.schema import KEY_FILE
from crosscut.parallel.collectives import gather_from_all, own_rank
from crosscut.parallel.state.parameters import local_part, plan_of
from crosscut.training.step import Trainer

_COPIES = 2
"""Number of checkpoints in memory at once, while a new checkpoint replaces an older one."""
_MOMENTS = 2
"""Number of tensors in AdamW's state for each parameter."""


@dataclass
class InMemory:
    """Checkpoint in memory from which a run may resume. `find` is called on every rank, before the run is prepared."""

    run: RunConfig
    checkpoint: Folder | None = None
    """Newest complete checkpoint in memory, if it is newer than the checkpoints on disk."""

    def find(self) -> None:
        """Look for the checkpoint on all machines. If files are missing on this machine, copy them from other
        machines.
        """
        if not self.run.checkpoint.in_memory:
            return
        folder = Path(self.run.output.folder)
        key, newest = _first_ranks_view(self.run, folder)
        if key:
            self.checkpoint = restore(memory_folder(folder, key), newer_than=newest)

    @property
    def good(self) -> GoodCheckpoint | None:
        """Checkpoint that `find` has found, with its manifest. `find` has compared the checkpoint's files with their
        hashes. None if there is no such checkpoint.
        """
        return None if self.checkpoint is None else GoodCheckpoint(self.checkpoint, read_manifest(self.checkpoint))


def _first_ranks_view(run: RunConfig, folder: Path) -> tuple[str, int]:
    """Return the key of the run's checkpoints in memory, and the step of the newest checkpoint on disk, as the first
    rank sees them. The key is empty for a new run.
    """
    key, newest = "", -1
    if own_rank() == 0:
        key = _stored_key(folder)
    if key:
        try:
            newest = max((step_of(c.name) or 0 for c in list_checkpoints(run.checkpoints_folder)), default=-1)
        except CheckpointError:  # the run reports the error when it looks for the checkpoint on disk
            newest = sys.maxsize
    views: list[tuple[str, int]] = gather_from_all((key, newest))
    return views[0]


def _stored_key(folder: Path, *, is_named: bool = True) -> str:
    """Read the key in a run's folder. Returns an empty text if there is none. A file without a valid key is named
    (unless `is_named` is false) and otherwise ignored.
    """
    path = folder / KEY_FILE
    if not path.is_file():
        return ""
    try:
        key = read_small(path).strip()
    except (OSError, ValueError):
        key = ""
    if KEY.fullmatch(key):
        return key
    if is_named:
        echo(
            f"crosscut: `{path}` must hold a key of 16 hexadecimal digits, but does not. The run does not look for "
            "checkpoints in memory.",
            err=True,
        )
    return ""


def key_for(run: RunConfig, *, is_resumed: bool) -> str:
    """Return the key of the run's checkpoints in memory. A new run gets a new key. The key is empty if the run keeps no
    checkpoints in memory.
    """
    if not run.checkpoint.in_memory:
        return ""
    path = Path(run.output.folder) / KEY_FILE
    if is_resumed and (key := _stored_key(path.parent, is_named=False)):
        return key
    key = secrets.token_hex(8)
    write_whole(path, key)
    return key


def memory_saver(run: RunConfig, key: str, trainer: Trainer) -> Saver:
    """Return a saver that writes to the memory of the machines. Every rank must call this function.

    Raises `ConfigError` on all ranks if a machine has too little memory, or no folder in memory that the user can
    write.
    """
    root = memory_folder(Path(run.output.folder), key)
    hosts = Hosts.of_run(root)
    if hosts.leads(own_rank()) and not why_not_own(root):
        remove_other_keys(root)
    _require_room(root, hosts, trainer)
    saver = Saver(
        LocalFolder(root),
        model=trainer.model,
        optimizer=trainer.optimizer,
        more=trainer.more_state,
        config=CheckpointConfig(on_failure=OnFailure.CONTINUE),
        is_first_rank=trainer.mesh.is_first_rank,
    )
    saver.keep_in_memory(hosts)
    return saver


def _require_room(root: Path, hosts: Hosts, trainer: Trainer) -> None:
    owned = why_not_own(root)
    try:
        if not owned:
            make_memory_folder(root)
    except OSError as error:
        owned = error.told if isinstance(error, ForeignFolderError) else f"{error.strerror}"
    sizes: list[int] = gather_from_all(bytes_of_state(trainer))
    here = hosts.of_ranks[own_rank()]
    holders = {here, (here - 1) % hosts.number}
    needed = _COPIES * sum(size for size, host in zip(sizes, hosts.of_ranks, strict=True) if host in holders)
    used = sum(path.stat().st_size for path in root.rglob("*") if path.is_file() and path.name != MARKER_FILE)
    room = free_bytes(root) + used
    message = (
        f"`checkpoint.in_memory` needs {needed / 1e9:.3g} GB in memory on each machine, but `{root.parents[1]}` has "
        f"room for {room / 1e9:.3g} GB. Enlarge this file system, name another file system in "
        f"{FOLDER_VARIABLE}, or set "
        "checkpoint.in_memory=0."
    )
    if owned:
        message = (
            f"`checkpoint.in_memory` needs a folder in memory to which this user, and nobody else, can write, but "
            f"`{root}` is not: {owned.removesuffix('.')}. Name another folder in {FOLDER_VARIABLE}, or set "
            "checkpoint.in_memory=0."
        )
    short = [text for text in gather_from_all(message if owned or needed > room else "") if text]
    if short:
        raise ConfigError(short[0])


def bytes_of_state(trainer: Trainer) -> int:
    """Return an upper bound on the bytes of this rank's file in a checkpoint. The optimizer need not have any state
    yet. A tensor that several tensor ranks hold is counted on each of these ranks.
    """
    parameters = [(parameter, 1 + _MOMENTS) for parameter in trainer.model.parameters()]
    more = [(tensor, 1) for tensors in trainer.more_state.values() for tensor in tensors.values()]
    held: Counter[RankPlan] = Counter()
    for tensor, number in (*parameters, *more):
        part = local_part(tensor)
        held[plan_of(tensor, trainer.mesh).ranks] += number * part.numel() * part.element_size()
    return sum(-(-size // ranks.copies.size) for ranks, size in held.items())


def forget(run: RunConfig, key: str) -> None:
    """Remove the run's checkpoints from this machine's memory. Call this when a newer checkpoint is on disk."""
    forget_all(memory_folder(Path(run.output.folder), key).parent)
