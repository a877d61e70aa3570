"""Runs of a tiny model that benchmarks kill, damage and resume: their settings, and how two of them are compared."""

import hashlib
from pathlib import Path

from benchmarks.recovery.damages import files_of
from benchmarks.texts import addresses
from crosscut.checkpoint import list_checkpoints
from crosscut.checkpoint.format.manifest import MANIFEST_FILE
from crosscut.logbook.contents import read_metrics

LAYOUTS = {
    "tensor 2": ("layout.tensor=2",),
    "data 2": ("layout.tensor=1", "layout.data=2"),
    "pipeline 2": ("layout.tensor=1", "layout.pipeline=2"),
    "context 2": ("layout.tensor=1", "layout.context=2"),
}
TINY = (
    "recipe=small", "model.num_layers=2", "model.hidden_size=32", "model.num_heads=4", "model.max_sequence_length=64",
    "data.vocab_size=300", "training.batch_size=4", "training.sequence_length=32", "training.validation_sequences=8",
    "training.device=cpu", "optimizer.warmup_steps=1", "output.sample_tokens=0",
)  # fmt: skip


def write_text(folder: Path, copies: int) -> Path:
    """Write some copies of an address to a file of text."""
    path = folder / "text.txt"
    path.write_text("\n\n".join([next(addresses())] * copies), encoding="utf-8")
    return path


def steps_done(run: Path) -> int:
    """Last step in the metrics of a run."""
    return max((row["step"] for row in read_metrics(run)), default=0)


def losses_of(run: Path) -> list[tuple[int, float]]:
    """Step and loss of each row of the metrics."""
    return [(row["step"], row["loss"]) for row in read_metrics(run) if "loss" in row]


def checkpoints_of(run: Path) -> dict[int, Path]:
    """Folders that a run considers to be complete checkpoints, by their steps, the oldest first."""
    root = run / "checkpoints"
    return {int(one.name.removeprefix("step-")): root / one.name for one in list_checkpoints(root)}


def newest_step(run: Path) -> int:
    """Step from which a run would resume."""
    return max(checkpoints_of(run), default=0)


def digests(checkpoint: Path) -> dict[str, str]:
    """SHA-256 of the files that hold parameters, optimizer state and numbers. On one layout, equal states give equal
    files. The manifest holds the folder of the run, so it is left out.
    """
    files = [path for path in files_of(checkpoint) if path.name != MANIFEST_FILE]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
