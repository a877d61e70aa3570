"""Manifest of a checkpoint: its files with their hashes, its tensors, and the run that wrote it.

The manifest is written after all other files. It is JSON in a fixed form and ends with its own hash, so an edited or
truncated manifest is detected.
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
"""Version of the checkpoint format. The number increases when older versions of Crosscut cannot read new
checkpoints."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a run at the time of a checkpoint, and the identity of the run."""

    step: int
    """Number of completed optimizer steps, which is also the index of the next batch."""
    samples: int
    """Number of sequences that the run has consumed."""
    layout: str
    """Description of the layout that wrote the checkpoint. Any layout may read the checkpoint."""
    seed: int = 0
    """Seed of the run. Random streams are functions of seed and step, so their state is not stored."""
    identity: dict[str, Any] = field(default_factory=dict)
    """Settings by name, such as the model's sizes and the order of the data. A run must have the same settings to
    resume from the checkpoint."""
    config: dict[str, Any] = field(default_factory=dict)
    """The resolved config of the run as a table. Empty if the run had no config."""


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint."""

    size: int
    """Size in bytes."""
    sha256: str


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    """Global shape, including padding."""
    dtype: str
    placement: str
    """Description of the tensor's placement in the layout that wrote the tensor, such as `Shard(0) over tensor=2`."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Contents of a checkpoint's manifest."""

    progress: Progress
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]
    values: tuple[str, ...] = ()
    """Names of the stored values that are not tensors, such as learning rates."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of the software that wrote the checkpoint."""
    rebuilt: bool = False
    """Whether a repair wrote the manifest. If so, the hashes describe the files at the time of the repair."""

    @property
    def num_bytes(self) -> int:
        """Total size of the files in the manifest, in bytes."""
        return sum(entry.size for entry in self.files.values())


def current_versions() -> dict[str, str]:
    """Versions of Python, Crosscut and torch in this process. The version is "unknown" for a package that is not
    installed.
    """
    versions = {"python": platform.python_version()}
    for package in ("crosscut", "torch"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "unknown"
    return versions


def dump_manifest(manifest: Manifest) -> bytes:
    """Content of `manifest.json` for a manifest."""
    return _render({"format": FORMAT, **dataclasses.asdict(manifest)})


def _render(table: Mapping[str, Any]) -> bytes:
    """JSON in its fixed form, ending with the hash of the preceding content."""
    digest = hashlib.sha256(json.dumps(table, indent=1).encode()).hexdigest()
    return (json.dumps({**table, "sha256": digest}, indent=1) + "\n").encode()


def read_manifest(folder: Folder) -> Manifest:
    """Read and check the manifest of a checkpoint. The other files are not read.

    Raises `CheckpointError` for a folder without a manifest, and for a manifest that was changed after it was written.
    """
    path = f"{folder}/{MANIFEST_FILE}"
    try:
        content = folder.read(MANIFEST_FILE)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"`{folder}` must be a checkpoint, but `{MANIFEST_FILE}` is missing. Either the checkpoint was "
            "never finished, or the file was removed."
        ) from None
    except OSError as error:
        raise CheckpointError(f"`{path}` must be readable, but is not: {reason(error)}.") from None
    return parse_manifest(content, path)


def parse_manifest(content: bytes, path: str) -> Manifest:
    """Parse the content of a `manifest.json`. Raises `CheckpointError` for content that is damaged, edited or of
    another format; the message names the file by `path`.
    """
    try:
        table = json.loads(content)
        digest = table.pop("sha256")
        found = table.pop("format")
    except (ValueError, KeyError, AttributeError, TypeError):
        raise CheckpointError(
            f"`{path}` must be a checkpoint's manifest, but cannot be parsed: the file is damaged."
        ) from None
    if _render({"format": found, **table}) != content:
        raise CheckpointError(
            f"`{path}` must be unchanged, but the content does not match the SHA-256 at its end (`{digest}`): the "
            "file is damaged or was edited."
        )
    if found != FORMAT:
        raise CheckpointError(
            f"`{path}` must have checkpoint format {FORMAT}, but has format {found}. Use the version of Crosscut "
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
