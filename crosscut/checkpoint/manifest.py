"""Manifest of a checkpoint: its files with their hashes, its tensors, and the run that wrote it.

The manifest is the last file of a checkpoint to be written. It is JSON in one fixed form with its own hash at the end,
so a manifest that was edited or cut short is told from one that was written.
"""

import dataclasses
import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from crosscut.checkpoint.storage import Folder, reason
from crosscut.config import CheckpointError

MANIFEST_FILE = "manifest.json"
FORMAT = 1
"""Raised when a checkpoint is written in a way that older versions cannot read."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a run when it wrote a checkpoint, and the identity of the run."""

    step: int
    """Optimizer steps done; the next batch is that of this step."""
    samples: int
    """Sequences consumed: the data's cursor."""
    layout: str
    """The layout that wrote the checkpoint, in words. Any layout may read the checkpoint."""
    seed: int = 0
    """Seed of the run. Random streams are functions of seed and step, so they need no storing."""
    identity: dict[str, Any] = field(default_factory=dict)
    """Settings by name that a run must share to go on from here, such as the model's sizes and the order of data."""
    config: dict[str, Any] = field(default_factory=dict)
    """The resolved run as a table; empty where there was none."""


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint."""

    size: int
    """Bytes."""
    sha256: str


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    """Global, padding included."""
    dtype: str
    placement: str
    """Cut of the tensor in the layout that wrote it, in words."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All that a checkpoint says of itself."""

    progress: Progress
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]
    values: tuple[str, ...] = ()
    """Names of the values stored beside tensors, such as learning rates."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of the programs that wrote the checkpoint."""
    rebuilt: bool = False
    """Written by a repair, after the fact: the hashes are those of the files as they were found."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all files that the manifest lists."""
        return sum(entry.size for entry in self.files.values())


def current_versions() -> dict[str, str]:
    """The versions of what is running."""
    versions = {"python": platform.python_version()}
    for package in ("crosscut", "torch"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "unknown"
    return versions


def dump_manifest(manifest: Manifest) -> bytes:
    """The manifest as it is written."""
    return _render({"format": FORMAT, **dataclasses.asdict(manifest)})


def _render(table: Mapping[str, Any]) -> bytes:
    """JSON in its fixed form, with the hash of all before it."""
    digest = hashlib.sha256(json.dumps(table, indent=1).encode()).hexdigest()
    return (json.dumps({**table, "sha256": digest}, indent=1) + "\n").encode()


def read_manifest(folder: Folder) -> Manifest:
    """Read and check a checkpoint's manifest; its files are not looked at.

    Raises `CheckpointError` for a folder that has none, and for one that was changed after it was written.
    """
    path = f"{folder}/{MANIFEST_FILE}"
    try:
        content = folder.read(MANIFEST_FILE)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"`{folder}` must be a checkpoint, but `{MANIFEST_FILE}` is missing: it was never finished, or the file "
            "was removed."
        ) from None
    except OSError as error:
        raise CheckpointError(f"`{path}` must be readable, but is not: {reason(error)}.") from None
    return parse_manifest(content, path)


def parse_manifest(content: bytes, path: str) -> Manifest:
    """The manifest in the content of a file. Raises `CheckpointError` naming `path`."""
    try:
        table = json.loads(content)
        digest = table.pop("sha256")
        found = table.pop("format")
    except (ValueError, KeyError, AttributeError, TypeError):
        raise CheckpointError(f"`{path}` must be a checkpoint's manifest, but cannot be parsed as one.") from None
    if _render({"format": found, **table}) != content:
        raise CheckpointError(
            f"`{path}` must be as it was written, but was changed: its content has not the SHA-256 that it ends with "
            f"(`{digest}`)."
        )
    if found != FORMAT:
        raise CheckpointError(
            f"`{path}` must be of checkpoint format {FORMAT}, but is of format {found}. Use the version of Crosscut "
            f"that wrote it ({table.get('versions', {}).get('crosscut', 'unknown')})."
        )
    try:
        return _from_table(table)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"`{path}` must be a checkpoint's manifest of format {FORMAT}, but is not: {reason(error)}."
        ) from None


def _from_table(table: Mapping[str, Any]) -> Manifest:
    return Manifest(
        progress=Progress(**table["progress"]),
        files={name: FileEntry(**entry) for name, entry in table["files"].items()},
        tensors={
            name: TensorEntry(tuple(entry["shape"]), entry["dtype"], entry["placement"])
            for name, entry in table["tensors"].items()
        },
        values=tuple(table["values"]),
        versions=table["versions"],
        rebuilt=table["rebuilt"],
    )
