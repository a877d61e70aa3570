"""Machine, versions and source that `run.py` measured."""

import hashlib
import subprocess
from datetime import UTC, datetime
from typing import Any

from benchmarks.commands import ROOT
from benchmarks.machine import describe_machine


def machine(device: dict[str, Any]) -> dict[str, Any]:
    """Describe the device, the versions and the source."""
    versions = describe_machine("torch", "triton", "transformers", "litgpt", "torchtitan", "torchao")
    now = datetime.now(tz=UTC).isoformat(timespec="seconds")
    return {**versions, **device, "date": now, "commit": _commit(), "source_sha256": _source_hash()}


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


def _source_hash() -> str:
    """Hash the Python files of the package and the benchmarks, which identifies a copy without git."""
    digest = hashlib.sha256()
    for path in sorted([*(ROOT / "crosscut").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
