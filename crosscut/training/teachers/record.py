"""Record of a run's teacher in its checkpoints. When the run resumes, the teacher's folder may hold a newer model."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from crosscut.checkpoint import Progress, read_manifest
from crosscut.config.published.folders import MODEL_FILE
from crosscut.config.published.weights import weight_files
from crosscut.config.system.files import read_small
from crosscut.data.hashing import sha256_of_all
from crosscut.data.logits import LogitForm
from crosscut.pretrained import ModelSource

TEACHER = "teacher.folder"
"""Name of the teacher's hash among the values on which stored logits depend."""
_KEY = "teacher.checkpoint"
_SAMPLE = 1 << 20
"""Number of bytes at the start and at the end of a published file of weights that are hashed for a record in
checkpoints. Training changes nearly all weights, and the record only serves a note. Stored logits are refused by their
teacher's hash, so theirs is that of whole files."""


def teacher_record(teacher: ModelSource | None) -> dict[str, object]:
    """Return the entry about the teacher that joins the identity of a run in its checkpoints. Empty without a teacher.
    Raises `OSError` if a file of a published teacher cannot be read.
    """
    return {} if teacher is None else {_KEY: {"name": teacher.name, "sha256": digest_of(teacher)}}


def stored_record(form: LogitForm) -> dict[str, object]:
    """Return the entry about a teacher whose stored logits have this form. Empty if its hash is not known."""
    digest = form.depends_on.get(TEACHER)
    return {} if digest is None else {_KEY: {"name": "stored logits", "sha256": json.loads(digest), "is_stored": True}}


def describe_other_teacher(progress: Progress, record: Mapping[str, object]) -> str | None:
    """Describe the change from the teacher in a checkpoint to that of `record`. Empty if they are the same, and None if
    one of the two is not known.
    """
    before, now = progress.identity.get(_KEY), record.get(_KEY)
    if not isinstance(before, dict) or not isinstance(now, dict):
        return None
    if before.get("sha256") == now["sha256"]:
        return ""
    if before.get("is_stored") != now.get("is_stored"):  # the hashes of published weights are of another depth
        return None
    then, here = (f"`{each.get('name')}` (sha256 {str(each.get('sha256'))[:16]})" for each in (before, now))
    setting = "teacher.cache" if now.get("is_stored") else "teacher.folder"
    return f" `{setting}` now holds {here} instead of {then}."


def digest_of(teacher: ModelSource, *, whole: bool = False) -> str:
    """Hash of the teacher's files. That of a checkpoint follows from the hashes in its manifest. Of published weights,
    only the start and the end of each file are hashed, unless `whole`. Raises `OSError` if a file cannot be read.
    """
    if not teacher.is_published:
        hashes = {name: entry.sha256 for name, entry in read_manifest(teacher.folder).files.items()}
        return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()
    folder = Path(str(teacher.folder))
    digest = hashlib.sha256(read_small(folder / MODEL_FILE).encode())
    if whole:
        digest.update("".join(sha256_of_all(weight_files(folder), description=f"check {folder}")).encode())
        return digest.hexdigest()
    for path in weight_files(folder):
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE))
            file.seek(max(0, path.stat().st_size - _SAMPLE))
            digest.update(file.read(_SAMPLE))
    return digest.hexdigest()
