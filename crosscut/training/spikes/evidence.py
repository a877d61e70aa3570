"""File about one loss spike, for people to read: the undone steps, and the documents that the run leaves out."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from crosscut.config import write_whole
from crosscut.config.system.deletion import enter_folder
from crosscut.logbook.schema import SPIKES_FOLDER
from crosscut.training.batches import BatchSource, TokenBatches

_AT_ONCE = 64
_LONGEST = 160


class Abandoned(NamedTuple):
    """Loss and gradient norm of a step that the run undoes."""

    step: int
    """Step, counted from 1."""
    loss: float
    norm: float


class Evidence(NamedTuple):
    """Content of the file about one spike."""

    headline: str
    """Message for the user."""
    steps: Sequence[Abandoned]
    """Steps that the run undoes, in order."""
    first: int
    """Position of the first sequence that is left out, in the order of the samples."""
    num_sequences: int
    """Number of sequences that are left out."""


def write_evidence(folder: Path, name: str, evidence: Evidence, batches: BatchSource) -> None:
    """Write the file about a spike as `name` to the folder `spikes` in a run's folder. Raises `OSError`."""
    enter_folder(folder, SPIKES_FOLDER)
    write_whole(folder / SPIKES_FOLDER / name, "\n".join(_lines(evidence, batches)) + "\n")


def _lines(evidence: Evidence, batches: BatchSource) -> Iterator[str]:
    assert isinstance(batches, TokenBatches), "fine-tuning does not look for spikes"
    yield evidence.headline
    yield ""
    yield "Steps that are undone"
    yield f"{'step':>10} {'loss':>12} {'gradient norm':>14}"
    for step, loss, norm in evidence.steps:
        yield f"{step:>10} {loss:>12.5g} {norm:>14.5g}"
    yield ""
    yield (
        "Sequences that are left out: position in the order of the samples, documents (name of the file and number in "
        "the file), beginning of the text"
    )
    end = evidence.first + evidence.num_sequences
    for first in range(evidence.first, end, _AT_ONCE):
        for position, documents, text in batches.describe(first, min(_AT_ONCE, end - first)):
            named = ", ".join(f"{source}:{number}" for source, number in documents)
            yield f"{position:>10}  {named}"
            yield f"{'':>10}  {_beginning(text)}"


def _beginning(text: str) -> str:
    """Return the beginning of a text as a single line."""
    line = " ".join(text.split())
    shown = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in line)
    return shown if len(shown) <= _LONGEST else shown[:_LONGEST] + "..."
