"""Checkpoints of a run in the memory of its machines. This module finds a checkpoint at the start, checks that the
machines have enough memory, makes the saver, and removes the checkpoints at the end.
"""

import secrets
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from crosscut.checkpoint import GoodCheckpoint, Saver, list_checkpoints, read_manifest
from crosscut.checkpoint.format.manifest import step_of
from crosscut.checkpoint.in_memory import FOLDER_VARIABLE, KEY_FILE, Hosts, free_bytes, is_own, memory_folder, restore
from crosscut.checkpoint.storage import Folder, LocalFolder
from crosscut.config import CheckpointConfig, CheckpointError, ConfigError, RunConfig
from crosscut.config.run import OnFailure
from crosscut.parallel.collectives import gather_from_all, own_rank
from crosscut.parallel.state.parameters import local_part
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
    if own_rank() == 0 and (folder / KEY_FILE).is_file():
        key = (folder / KEY_FILE).read_text(encoding="utf-8").strip()
        try:
            newest = max((step_of(c.name) or 0 for c in list_checkpoints(run.checkpoints_folder)), default=-1)
        except CheckpointError:  # the run reports the error when it looks for the checkpoint on disk
            newest = sys.maxsize
    views: list[tuple[str, int]] = gather_from_all((key, newest))
    return views[0]


def key_for(run: RunConfig, *, is_resumed: bool) -> str:
    """Return the key of the run's checkpoints in memory. A new run gets a new key. The key is empty if the run keeps no
    checkpoints in memory.
    """
    if not run.checkpoint.in_memory:
        return ""
    path = Path(run.output.folder) / KEY_FILE
    if is_resumed and path.is_file():
        return path.read_text(encoding="utf-8").strip()
    key = secrets.token_hex(8)
    path.write_text(key, encoding="utf-8")
    return key


def memory_saver(run: RunConfig, key: str, trainer: Trainer) -> Saver:
    """Return a saver that writes to the memory of the machines. Every rank must call this function.

    Raises `ConfigError` on all ranks if a machine has too little memory, or no folder in memory that the user can
    write.
    """
    root = memory_folder(Path(run.output.folder), key)
    hosts = Hosts.of_run(root)
    for place in root.parent.iterdir() if hosts.leads(own_rank()) and root.parent.exists() else ():
        if place != root:  # an earlier run in the same folder
            shutil.rmtree(place, ignore_errors=True)
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
    top, owned = root.parents[1], ""
    try:
        top.mkdir(mode=0o700, parents=True, exist_ok=True)
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        owned = f"{error.strerror}"
    if not owned and not (is_own(top) and is_own(root)):
        owned = "another user owns it"
    sizes: list[int] = gather_from_all(bytes_of_state(trainer))
    here = hosts.of_ranks[own_rank()]
    holders = {here, (here - 1) % hosts.number}
    needed = _COPIES * sum(size for size, host in zip(sizes, hosts.of_ranks, strict=True) if host in holders)
    used = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    room = free_bytes(root) + used
    message = (
        f"`checkpoint.in_memory` needs {needed / 1e9:.3g} GB in memory on each machine, but `{root.parents[1]}` has "
        f"room for {room / 1e9:.3g} GB. Enlarge this file system, name another file system in "
        f"{FOLDER_VARIABLE}, or set "
        "checkpoint.in_memory=0."
    )
    if owned:
        message = (
            f"`checkpoint.in_memory` needs a folder in memory that this user can write to, but this user cannot write "
            f"to `{root}`: {owned}. Name another file system in {FOLDER_VARIABLE}, or set checkpoint.in_memory=0."
        )
    short = [text for text in gather_from_all(message if owned or needed > room else "") if text]
    if short:
        raise ConfigError(short[0])


def bytes_of_state(trainer: Trainer) -> int:
    """Return an upper bound on the bytes of this rank's file in a checkpoint. The optimizer need not have any state
    yet. A tensor that several tensor ranks hold is counted on each of these ranks.
    """
    layout = trainer.run.config.layout
    parameters = [local_part(p) for p in trainer.model.parameters()]
    more = [local_part(t) for tensors in trainer.more_state.values() for t in tensors.values()]
    held = sum(t.numel() * t.element_size() for t in more)
    held += sum(t.numel() * t.element_size() * (1 + _MOMENTS) for t in parameters)
    return -(-held // layout.num_replicas)


def forget(run: RunConfig, key: str) -> None:
    """Remove the run's checkpoints from this machine's memory. Call this when a newer checkpoint is on disk."""
    shutil.rmtree(memory_folder(Path(run.output.folder), key).parent, ignore_errors=True)
