"""Detect damage in a checkpoint, by comparing the size and SHA-256 of every file with the manifest.

Hashing releases the interpreter lock, so several threads read files in parallel. For each damaged file, one message
says what is wrong.
"""

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from crosscut.checkpoint.format.manifest import FileEntry, Manifest, read_manifest, step_of
from crosscut.checkpoint.storage import Folder, reason
from crosscut.config import CheckpointError, DamagedCheckpointError
from crosscut.config.conventions import MANIFEST_FILE
from crosscut.config.system.byte_progress import byte_progress

DATA_SUFFIX = ".safetensors"
_DATA_SUFFIXES = (DATA_SUFFIX, ".distcp")
"""Endings of files that hold tensors, in checkpoints of any format."""
_BLOCK = 1 << 20


def find_damage(folder: Folder, *, progress: bool = False) -> list[str]:
    """Return one message per damaged file of a checkpoint. The list is empty if the checkpoint is undamaged. If
    `progress` is true, long work shows its rate and the remaining time (`byte_progress`).
    """
    try:
        manifest = read_manifest(folder)
        present = folder.files()
    except CheckpointError as error:
        return [str(error)]
    except Exception as error:  # an error of the object store
        return [f"`{folder}` must be readable, but is not: {reason(error)}."]
    sizes = {name: _size_damage(folder, name, entry, present) for name, entry in manifest.files.items()}
    damage = [text for text in (_step_damage(folder, manifest), *sizes.values()) if text]
    damage += [
        f"`{folder}/{name}` must be listed in `{MANIFEST_FILE}`, but is not. Move this file to another folder."
        for name in present
        if name.endswith(_DATA_SUFFIXES) and name not in manifest.files
    ]
    readable = [name for name, text in sizes.items() if text is None]
    return damage + _hash_damage(folder, readable, manifest, progress)


def require_undamaged(folder: Folder, *, progress: bool = False) -> Manifest:
    """Check all files of a checkpoint and return the manifest. Raises `DamagedCheckpointError` for a damaged
    checkpoint, with all damage in the message, and `CheckpointError` for a folder that is not a checkpoint.
    """
    manifest = read_manifest(folder)
    if damage := find_damage(folder, progress=progress):
        raise DamagedCheckpointError(" ".join(damage))
    return manifest


def _step_damage(folder: Folder, manifest: Manifest) -> str | None:
    """Return a message if the step in the manifest differs from the step in the folder's name, for example because the
    manifest or all files were copied from another checkpoint.
    """
    named, step = step_of(folder.name), manifest.progress.step
    if named is None or named == step:
        return None
    return (
        f"`{folder}/{MANIFEST_FILE}` must belong to step {named:,}, the step in the folder's name, but belongs to step "
        f"{step:,}. Move the files to the folder of step {step:,}."
    )


def _size_damage(folder: Folder, name: str, entry: FileEntry, present: dict[str, int]) -> str | None:
    if name not in present:
        return f"`{folder}/{name}` must exist, but is missing."
    if present[name] != entry.size:
        return f"`{folder}/{name}` must have {entry.size:,} bytes, but has {present[name]:,}."
    return None


def _hash_damage(folder: Folder, names: list[str], manifest: Manifest, progress: bool) -> list[str]:
    total = sum(manifest.files[name].size for name in names)
    with byte_progress(f"check {folder.name}", total, shown=progress) as advance:

        def damage_of(name: str) -> str | None:
            try:
                digest = sha256_of(folder, name, advance)
            except Exception as error:  # an error of the disk or the object store
                return f"`{folder}/{name}` must be readable, but is not: {reason(error)}."
            if digest == manifest.files[name].sha256:
                return None
            twin = next((other for other, entry in manifest.files.items() if entry.sha256 == digest), None)
            known = f" The file now has the content of `{twin}`." if twin else ""
            return (
                f"`{folder}/{name}` must have the SHA-256 {manifest.files[name].sha256[:16]}..., but has "
                f"{digest[:16]}...: the content has changed.{known}"
            )

        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            return [text for text in pool.map(damage_of, names) if text]


def sha256_of(folder: Folder, name: str, advance: Callable[[int], None] = lambda _: None) -> str:
    """Return the SHA-256 of a file in hexadecimal digits. After each block is read, `advance` is called with the
    block's number of bytes.
    """
    digest = hashlib.sha256()
    with folder.open(name) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            advance(len(block))
    return digest.hexdigest()
