"""Stages that process each part independently, with one task per part."""

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
    """A stage that calls `function(part, *arguments, output)` as one task for each part."""

    name: str
    version: int
    function: Callable[..., Counts]
    arguments: tuple[Any, ...] = ()
    """Arguments of the function between the part and the output. They must be picklable."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """The values among the arguments that the result depends on, as JSON values."""

    inputs: tuple[Path, ...] = ()
    """Files of other stages, besides the parts, that the function reads, such as a tokenizer."""

    filters: tuple[str, ...] = ()
    """Names of the filters that come before this stage."""

    cleaned: bool = False
    """Whether this stage comes after the stage `cleaning`."""

    def tasks(self, work: Path) -> list[Task]:
        """List the tasks, one for each part."""
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
    """List the parts of an ingested corpus in order, each with the bytes of its text."""
    found = []
    for record in read_records(work, INGEST):
        sizes: dict[str, int] = record.counts["parts"]
        found += [(Part(work, name, filters, cleaned), size) for name, size in sorted(sizes.items())]
    return found


def files_of(part: Part) -> tuple[Path, ...]:
    """List the files that the documents of a part are read from."""
    files = [part.work / INGEST / f"{part.name}.arrow"]
    if part.cleaned:
        files.append(part.work / CLEANING / f"{part.name}.arrow")
    return (*files, *(part.work / stage / drops_name(part.name) for stage in part.filters))
