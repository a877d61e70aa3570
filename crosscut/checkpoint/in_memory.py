"""Checkpoints in the memory of a run's machines. They survive when the run's processes die.

Each machine has a folder in memory (a tmpfs such as /dev/shm) with one subfolder per checkpoint, in the format of a
checkpoint on disk. A subfolder holds the files of the machine's own ranks and the files of a neighbour, the previous
machine. If one machine is lost, the other machines therefore still hold all files. When the run starts again, it looks
for the newest step for which an undamaged copy of every file is on some machine. It then sends each machine the files
that this machine lacks.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from crosscut.checkpoint.damage import sha256_of
from crosscut.checkpoint.folders import list_checkpoints, remove_checkpoint
from crosscut.checkpoint.format.manifest import read_manifest, step_of
from crosscut.checkpoint.storage import Folder, LocalFolder
from crosscut.config import CheckpointError
from crosscut.config.conventions import MANIFEST_FILE
from crosscut.config.system import deletion
from crosscut.config.system.machine import machine_identity
from crosscut.config.system.markers import ForeignFolderError
from crosscut.config.system.private_folders import why_not_private
from crosscut.config.system.terminal import echo
from crosscut.parallel.collectives import gather_from_all, own_rank
from crosscut.parallel.state.files import Transfer, share_sizes, transfer_files

FOLDER_VARIABLE = "CROSSCUT_MEMORY_FOLDER"
"""Environment variable that sets the folder for checkpoints in memory. The default folder is /dev/shm."""


KEY = re.compile("[0-9a-f]{16}")
"""Form of a key. The file `KEY_FILE` comes from a folder that others may have written, so a key of another form is
never used as a part of a path."""


def memory_folder(run_folder: Path, key: str = "") -> Path:
    """Return the folder in this machine's memory for the run in `run_folder`. If `key` is given, return the subfolder
    for the checkpoints with this key.

    Each new run has a new key, so checkpoints of an earlier run in the same `run_folder` are never loaded. Raises
    `ValueError` if the key has another form than `KEY`.
    """
    if key and not KEY.fullmatch(key):
        raise ValueError(f"a key must have 16 hexadecimal digits, but is {key!r:.60}")
    place = hashlib.sha256(str(run_folder.resolve()).encode()).hexdigest()[:16]
    return memory_root() / f"crosscut-{os.getuid()}" / place / key


def memory_root() -> Path:
    """Return this machine's folder in memory, which other programs use, too."""
    return Path(os.environ.get(FOLDER_VARIABLE) or "/dev/shm")  # noqa: S108 - the owner of the user's folder is checked


def why_not_own(root: Path) -> str:
    """Return why the folder `root` in memory (see `memory_folder`) is not safe from other users, who may also create
    folders in /dev/shm and can predict the names. Empty if it is safe. The user's own folder is made if it is missing.
    """
    base, names = root.parents[2], root.parts[-3:]
    try:
        return why_not_private(base, *names)
    except OSError as error:
        return error.strerror or "unknown error"


def free_bytes(path: Path) -> int:
    """Return the number of bytes that this user can still write at `path`. The last folders of the path need not
    exist.
    """
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


@dataclass(frozen=True)
class Hosts:
    """Machines of a run. `of_ranks` holds, for each rank, the number of the rank's machine."""

    of_ranks: tuple[int, ...]

    @classmethod
    def of_run(cls, root: Path) -> "Hosts":
        """Find the machine of each rank. Two ranks count as being on the same machine if they see the same folder in
        memory. Every rank must call this function.
        """
        places = gather_from_all((machine_identity(), str(root)))
        numbers = {place: number for number, place in enumerate(dict.fromkeys(places))}
        return cls(tuple(numbers[place] for place in places))

    @property
    def number(self) -> int:
        """Number of machines."""
        return max(self.of_ranks) + 1

    def ranks(self, host: int) -> list[int]:
        """Return the ranks on the machine `host`. The first of them writes the files that the machine's ranks share."""
        return [rank for rank, other in enumerate(self.of_ranks) if other == host]

    def leads(self, rank: int) -> bool:
        """Whether `rank` is the first rank on its machine."""
        return self.ranks(self.of_ranks[rank])[0] == rank

    def copies(self, sizes: Sequence[int], names: Sequence[str]) -> list[Transfer]:
        """Return the transfers that send each rank's file to a rank on the next machine. `sizes` and `names` give the
        size in bytes and the name of each rank's file; a negative size means that the rank has no file. Transfers from
        machines with even numbers come first, so that a chain of transfers that wait for each other has at most three
        members.
        """
        if self.number == 1:
            return []
        found = []
        for rank, (size, name) in enumerate(zip(sizes, names, strict=True)):
            host = self.of_ranks[rank]
            targets = self.ranks((host + 1) % self.number)
            target = targets[self.ranks(host).index(rank) % len(targets)]
            if size >= 0:
                found.append((host % 2, Transfer(name, size, rank, target)))
        return [transfer for _, transfer in sorted(found, key=lambda pair: pair[0])]


@dataclass(frozen=True)
class Held:
    """Undamaged files of one checkpoint on one machine."""

    manifest: str
    """SHA-256 of the manifest."""
    needed: Mapping[str, int]
    """Sizes in bytes of all files of the checkpoint, by name."""
    files: frozenset[str]


@dataclass(frozen=True)
class Found:
    """A checkpoint of which every file is in the memory of at least one machine."""

    step: int
    needed: Mapping[str, int]
    """Sizes in bytes of all files, by name."""
    holders: Mapping[str, int]
    """For each file name, the first rank of a machine that holds the file."""


def look_into(root: Path) -> dict[int, Held]:
    """Return the checkpoints in a folder in memory, keyed by step. Damaged files count as missing."""
    found = {}
    try:
        folders = [] if why_not_own(root) else list_checkpoints(root)
    except CheckpointError:
        return {}
    for folder in folders:
        step = step_of(folder.name)
        try:
            manifest = read_manifest(folder)
            digest = hashlib.sha256(folder.read(MANIFEST_FILE)).hexdigest()
            present = folder.files()
            files = {
                name
                for name, entry in manifest.files.items()
                if present.get(name) == entry.size and sha256_of(folder, name) == entry.sha256
            }
        except (CheckpointError, OSError):
            continue
        if step is None or manifest.progress.step != step:
            continue
        sizes = {name: entry.size for name, entry in manifest.files.items()} | {MANIFEST_FILE: present[MANIFEST_FILE]}
        found[step] = Held(digest, sizes, frozenset(files | {MANIFEST_FILE}))
    return found


def newest_complete(held: Sequence[Mapping[int, Held]]) -> Found | None:
    """Find the newest step for which every file is held by at least one rank. The files must all belong to the same
    manifest. Return None if there is no such step. `held` has one entry per rank.
    """
    for step in sorted({step for of_rank in held for step in of_rank}, reverse=True):
        for digest in dict.fromkeys(of_rank[step].manifest for of_rank in held if step in of_rank):
            having = {r: of[step] for r, of in enumerate(held) if step in of and of[step].manifest == digest}
            needed = next(iter(having.values())).needed
            holders = {name: rank for rank, files in reversed(having.items()) for name in files.files}
            if set(needed) <= set(holders):
                return Found(step, needed, holders)
    return None


def restore(root: Path, *, newer_than: int) -> Folder | None:
    """Find the newest complete checkpoint in memory, send each machine the files that it lacks, and remove all other
    checkpoints under `root`. Returns the checkpoint's folder. Returns None if no complete checkpoint is newer than step
    `newer_than`, or if a machine has no room for the checkpoint. Every rank must call this function.
    """
    hosts = Hosts.of_run(root)
    rank = own_rank()
    leads = hosts.leads(rank)
    held = look_into(root) if leads else {}
    everywhere: list[Mapping[int, Held]] = gather_from_all(held)
    found = newest_complete(everywhere)
    if found and (found.step <= newer_than or not _complete(found, root, hosts, everywhere)):
        found = None
    if leads:
        _remove_others(root, found.step if found else None)
    return LocalFolder(root) / f"step-{found.step:08d}" if found else None


def _complete(found: Found, root: Path, hosts: Hosts, held: Sequence[Mapping[int, Held]]) -> bool:
    """Send the files of a checkpoint to all machines that lack them. Returns False on all ranks if a machine has no
    room or a transfer fails.
    """
    rank = own_rank()
    folder = root / f"step-{found.step:08d}"
    missing = {}
    for host in range(hosts.number):
        leader = hosts.ranks(host)[0]
        mine = held[leader].get(found.step)
        source = next(iter(found.holders.values()))
        same = mine is not None and mine.manifest == held[source][found.step].manifest
        missing[leader] = [name for name in found.needed if not same or mine is None or name not in mine.files]
    is_well = 1
    if names := missing.get(rank, []):
        try:
            make_memory_folder(root)
            LocalFolder(folder).make()
            is_well = int(sum(found.needed[name] for name in names) <= free_bytes(root))
        except (OSError, CheckpointError):
            is_well = 0
    if not all(share_sizes(is_well)):
        return False
    transfers = [
        Transfer(name, found.needed[name], found.holders[name], leader)
        for leader, names in missing.items()
        for name in names
    ]
    try:
        transfer_files(transfers, folder)
    except OSError:
        is_well = 0
    return all(share_sizes(is_well))


def make_memory_folder(root: Path) -> None:
    """Make the folder `root` in memory. Raises `OSError` if that is not possible, or not safe (see `why_not_own`)."""
    if why := why_not_own(root):
        raise ForeignFolderError(root, why)
    place = root.parent
    deletion.make_folder(place.parent, place.name, id=place.name)
    deletion.make_folder(place, root.name)


def _remove_others(root: Path, step: int | None) -> None:
    """Remove the run's checkpoints from this machine's memory, except the checkpoint of `step`. If `step` is None, none
    is kept.
    """
    if why_not_own(root):
        return
    remove_other_keys(root)
    kept = None if step is None else f"step-{step:08d}"
    place = LocalFolder(root)
    for name in place.folders():
        if name != kept:
            _remove(place / name)
    if kept is None:
        deletion.remove_if_empty(root.parent, root.name)


def remove_other_keys(root: Path) -> None:
    """Remove the checkpoints of earlier runs in the same folder from this machine's memory. The folder `root` of this
    run stays. Call this function only if `why_not_own` says nothing against `root`.
    """
    for name in LocalFolder(root.parent).folders():
        if name != root.name and KEY.fullmatch(name):
            _remove_key(root.parent, name)


def forget_all(place: Path) -> None:
    """Remove all checkpoints from the folder `place` in memory, which is the folder of a run (see `memory_folder`)."""
    if why_not_own(place / "none"):
        return
    for name in LocalFolder(place).folders():
        if KEY.fullmatch(name):
            _remove_key(place, name)
    deletion.remove_if_empty(place.parent, place.name, id=place.name)


def _remove_key(place: Path, key: str) -> None:
    if why_not_own(place / key):  # a link, for example
        return
    of_key = LocalFolder(place / key)
    for name in of_key.folders():
        _remove(of_key / name)
    deletion.remove_if_empty(place, key)


def _remove(checkpoint: LocalFolder) -> None:
    """Remove a checkpoint from memory. A folder that stays is named. An error of the system is ignored."""
    with suppress(OSError):
        if left := remove_checkpoint(checkpoint):
            echo(f"crosscut: {left}", err=True)
