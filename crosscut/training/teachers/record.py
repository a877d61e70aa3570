"""Record of a run's teacher in its checkpoints. When the run resumes, the teacher's folder may hold a newer model."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from crosscut.checkpoint import Progress, read_manifest
from crosscut.config.published.folders import MODEL_FILE
from crosscut.config.published.weights import weight_files
from crosscut.config.system.files import read_small
from crosscut.pretrained import ModelSource

_KEY = "teacher.checkpoint"
_SAMPLE = 1 << 20
"""Number of bytes at the start and at the end of a published file of weights that are hashed. Training changes all
weights, so these bytes differ between two models."""


def teacher_record(teacher: ModelSource | None) -> dict[str, object]:
    """Return the entry about the teacher that joins the identity of a run in its checkpoints. Empty without a teacher.
    Raises `OSError` if a file of a published teacher cannot be read.
    """
    return {} if teacher is None else {_KEY: {"name": teacher.name, "sha256": digest_of(teacher)}}


def describe_other_teacher(progress: Progress, record: Mapping[str, object]) -> str | None:
    """Describe the change from the teacher in a checkpoint to that of `record`. Empty if they are the same, and None if
    one of the two is not known.
    """
    before, now = progress.identity.get(_KEY), record.get(_KEY)
    if not isinstance(before, dict) or not isinstance(now, dict):
        return None
    if before.get("sha256") == now["sha256"]:
        return ""
    then, here = (f"`{each.get('name')}` (sha256 {str(each.get('sha256'))[:16]})" for each in (before, now))
    return f" `teacher.folder` now holds {here} instead of {then}."


def digest_of(teacher: ModelSource) -> str:
    """Hash of the teacher's files. That of a checkpoint follows from the hashes in its manifest."""
    if not teacher.is_published:
        hashes = {name: entry.sha256 for name, entry in read_manifest(teacher.folder).files.items()}
        return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()
    folder = Path(str(teacher.folder))
    digest = hashlib.sha256(read_small(folder / MODEL_FILE).encode())
    for path in weight_files(folder):
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE))
            file.seek(max(0, path.stat().st_size - _SAMPLE))
            digest.update(file.read(_SAMPLE))
    return digest.hexdigest()
