"""Machine, versions and source that `run.py` measured."""

import hashlib
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.commands import ROOT
from benchmarks.machine import describe_machine


def machine(device: dict[str, Any], codes: Mapping[str, Path]) -> dict[str, Any]:
    """Describe the device, the versions and the source. `codes` are the folders of `crosscut` by name."""
    versions = describe_machine("torch", "triton", "transformers")
    now = datetime.now(tz=UTC).isoformat(timespec="seconds")
    hashes = {name: _source_hash(folder / "crosscut") for name, folder in codes.items()}
    hashes["benchmarks"] = _source_hash(ROOT / "benchmarks")
    return {**versions, **device, "date": now, "commit": _commit(), "source_sha256": hashes}


def _commit() -> str:
    """Return the commit of the checkout, marked if files differ from it."""
    try:
        commit, changed = (
            subprocess.run(
                ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True, timeout=15
            ).stdout.strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{commit}{'-changed' if changed else ''}"


def _source_hash(folder: Path) -> str:
    """Hash the Python files of a folder, which identifies a copy without git."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
