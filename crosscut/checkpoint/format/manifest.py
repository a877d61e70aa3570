"""Manifest of a checkpoint: its files with their hashes, its tensors, and the run that wrote it.

The manifest is written after all other files. It is JSON in a fixed form and ends with its own hash, so an edited or
truncated manifest is detected.
"""

import dataclasses
import hashlib
import json
import platform
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeAlias

from crosscut.checkpoint.storage import Folder, reason
from crosscut.config import CheckpointError, DamagedCheckpointError
from crosscut.config.conventions import MANIFEST_FILE
from crosscut.config.parts.kinds import with_layers
from crosscut.config.system.files import parse_json
from crosscut.config.system.records import Count, from_json

FORMAT = 2
"""Version of the checkpoint format. It increases when older versions of Crosscut cannot read new checkpoints."""
_NAME = re.compile(r"step-([0-9]{8,18})")

JsonValue: TypeAlias = Any
"""A value that JSON can express."""

MODEL, AVERAGE = "model", "average"
"""Groups of a checkpoint's tensors: the weights after the checkpoint's step and, if the run keeps a moving average of
the weights, this average. In both groups, the tensors have the names of the parameters."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a run at the time of a checkpoint, and the identity of the run."""

    step: Count
    """Number of completed optimizer steps. This is also the index of the next batch."""
    samples: Count
    """Number of sequences that the run has consumed."""
    layout: str
    """Description of the layout that wrote the checkpoint. Any layout may read the checkpoint."""
    seed: int = 0
    """Seed of the run. Random streams are functions of seed and step, so their state is not stored."""
    identity: dict[str, JsonValue] = field(default_factory=dict)
    """Settings by name, such as the model's sizes and the order of the data. A run must have the same settings to
    resume from the checkpoint. A teacher's checkpoint may differ."""
    config: dict[str, JsonValue] = field(default_factory=dict)
    """The resolved config of the run, as nested dictionaries. Empty if the run had no config."""
    skips: tuple[tuple[Count, Count], ...] = ()
    """Sequences that the run has skipped, as pairs (number of steps completed before the skip, number of skipped
    sequences)."""


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint."""

    size: Count
    """Size in bytes."""
    sha256: str


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a checkpoint."""

    shape: tuple[Count, ...]
    """Global shape, including padding."""
    dtype: str
    placement: str
    """Description of the tensor's placement in the layout that wrote the tensor, such as `Shard(0) over tensor=2`."""


@dataclass(frozen=True)
class _Seal:
    """Values of a manifest that are checked before all others."""

    sha256: str
    format: int


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
    """Whether a repair wrote the manifest. The hashes then describe the files at the time of the repair."""

    @property
    def num_bytes(self) -> int:
        """Total size of the files in the manifest, in bytes."""
        return sum(entry.size for entry in self.files.values())


def holds_average(manifest: Manifest) -> bool:
    """Whether a checkpoint holds a moving average of the weights in addition to the weights themselves."""
    return any(name.startswith(f"{AVERAGE}.") for name in manifest.tensors)


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
    """Return the content of `manifest.json` for a manifest."""
    return _render({"format": FORMAT, **dataclasses.asdict(manifest)})


def _render(table: Mapping[str, JsonValue]) -> bytes:
    """Return a manifest's JSON in its fixed form, ending with the hash of the preceding content."""
    digest = hashlib.sha256(json.dumps(table, indent=1).encode()).hexdigest()
    return (json.dumps({**table, "sha256": digest}, indent=1) + "\n").encode()


def step_of(name: str) -> int | None:
    """Step in a checkpoint's name such as `step-00001000`. None if the name has another form."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


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
    """Parse the content of a `manifest.json`. Raises `DamagedCheckpointError` if the content is damaged or was edited,
    and `CheckpointError` if this version of Crosscut cannot read its format. The message contains `path`.
    """
    try:
        table = parse_json(content)
        seal = from_json(_Seal, table)
        is_unchanged = _render({name: value for name, value in table.items() if name != "sha256"}) == content
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(
            f"`{path}` must be a checkpoint's manifest, but cannot be parsed: {reason(error)}. The file is damaged."
        ) from None
    if not is_unchanged:
        raise DamagedCheckpointError(
            f"`{path}` must be unchanged, but the content does not match the SHA-256 at its end (`{seal.sha256}`): the "
            "file is damaged or was edited."
        )
    if seal.format != FORMAT:
        raise CheckpointError(
            f"`{path}` must have checkpoint format {FORMAT}, but has format {seal.format}. Use the version of "
            "Crosscut that wrote it."
        )
    try:
        manifest = from_json(Manifest, table)
        for name in manifest.files:
            require_plain_name(name)
    except ValueError as error:
        raise CheckpointError(
            f"`{path}` must be a checkpoint's manifest, but is not: {reason(error)}. Use another checkpoint."
        ) from None
    return replace(manifest, progress=_with_layers(manifest.progress))


def _with_layers(progress: Progress) -> Progress:
    """Return the progress with `layers` in place of the keys `mlp` and `mlp_pattern`, with which older checkpoints name
    the MLPs of their model.
    """
    model = progress.config.get("model")
    if not isinstance(model, dict) or (changed := with_layers(model)) == model:
        return progress
    identity = {
        name: value for name, value in progress.identity.items() if name not in ("model.mlp", "model.mlp_pattern")
    }
    identity["model.layers"] = changed["layers"]
    return replace(progress, config={**progress.config, "model": changed}, identity=identity)


def require_plain_name(name: str) -> None:
    """Raise `ValueError` unless `name` is the name of a file directly in the checkpoint's folder."""
    if name in {"", ".", ".."} or any(character in name for character in "/\\\0"):
        raise ValueError(f"every file must be directly in the checkpoint's folder, but {reprlib.repr(name)} is not")
