"""Forged checkpoints, as an attacker could make them: arbitrary files, and a manifest with matching hashes."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crosscut.checkpoint.format.index import INDEX_FILE, _sealed
from crosscut.checkpoint.format.manifest import MANIFEST_FILE, _render
from crosscut.config.system.markers import MARKER_FILE


def edit_manifest(checkpoint: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest, and write a matching hash at its end."""
    path = checkpoint / MANIFEST_FILE
    table = json.loads(path.read_text())
    del table["sha256"]
    edit(table)
    path.write_bytes(_render(table))


def fit_hashes(checkpoint: Path, **changed: Any) -> None:
    """Make the manifest list the existing files with their hashes."""
    files = {
        path.name: {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in sorted(checkpoint.iterdir())
        if path.name not in (MANIFEST_FILE, MARKER_FILE)
    }
    edit_manifest(checkpoint, lambda table: table.update(files=files, **changed))


def edit_index(checkpoint: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change the index, and write matching hashes to the index and the manifest."""
    path = checkpoint / INDEX_FILE
    table = json.loads(path.read_text())
    del table["sha256"]
    edit(table)
    path.write_bytes(_sealed(json.dumps(table)[:-1].encode()))
    fit_hashes(checkpoint)
