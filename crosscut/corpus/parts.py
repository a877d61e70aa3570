"""Stages that do one thing to every part by itself: a task for each part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from crosscut.corpus.documents import CLEANING, INGEST, Part, drops_name
from crosscut.corpus.execution.stages import Counts, Task, read_records


@dataclass(frozen=True, kw_only=True)
class PartStage:
    """A stage with a task `function(part, *arguments, output)` for each part."""

    name: str
    version: int
    function: Callable[..., Counts]
    arguments: tuple[Any, ...] = ()
    """What the function takes between the part and the output. Pickles."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """What of the arguments the result depends on, as JSON has it."""

    inputs: tuple[Path, ...] = ()
    """Files of other stages that it reads besides the parts, such as a tokenizer."""

    filters: tuple[str, ...] = ()
    """The filters before it."""

    cleaned: bool = False
    """Whether it comes after the texts were cleaned."""

    def tasks(self, work: Path) -> list[Task]:
        """One for each part."""
        return [
            Task(
                name=part.name,
                function=partial(self.function, part, *self.arguments),
                inputs=(*files_of(part), *self.inputs),
                settings=self.settings,
                size=size,
            )
            for part, size in find_parts(work, filters=self.filters, cleaned=self.cleaned)
        ]


def find_parts(work: Path, *, filters: tuple[str, ...] = (), cleaned: bool = False) -> list[tuple[Part, int]]:
    """The parts of a corpus that is ingested, in its order, each with the bytes of its text."""
    found = []
    for record in read_records(work, INGEST):
        sizes: dict[str, int] = record.counts["parts"]
        found += [(Part(work, name, filters, cleaned), size) for name, size in sorted(sizes.items())]
    return found


def files_of(part: Part) -> tuple[Path, ...]:
    """The files that the documents of a part come from."""
    files = [part.work / INGEST / f"{part.name}.arrow"]
    if part.cleaned:
        files.append(part.work / CLEANING / f"{part.name}.arrow")
    return (*files, *(part.work / stage / drops_name(part.name) for stage in part.filters))
