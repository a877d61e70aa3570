"""Stages that process each part (an Arrow file of documents) independently, with one task per part."""

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
    """A stage with one task per part (an Arrow file of documents). Each task calls `function` with its part,
    `arguments`, and its output.
    """

    name: str
    version: int
    function: Callable[..., Counts]
    arguments: tuple[Any, ...] = ()
    """Arguments that `function` receives after `part` and before `output`. All arguments must be picklable."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that the result depends on, as JSON values. If a setting changes, the tasks run again."""

    inputs: tuple[Path, ...] = ()
    """Files of other stages that `function` reads in addition to the part, such as a tokenizer."""

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
    """List the parts (Arrow files of documents) of a corpus in order, each with the size of its text in bytes.

    The parts leave out the documents that `filters` dropped. The sizes still include these documents.
    """
    found = []
    for record in read_records(work, INGEST):
        sizes: dict[str, int] = record.counts["parts"]
        found += [(Part(work, name, filters, cleaned), size) for name, size in sorted(sizes.items())]
    return found


def files_of(part: Part) -> tuple[Path, ...]:
    """List the files that `Part.documents` reads for a part: the texts, and the rows that filters dropped."""
    files = [part.work / INGEST / f"{part.name}.arrow"]
    if part.cleaned:
        files.append(part.work / CLEANING / f"{part.name}.arrow")
    return (*files, *(part.work / stage / drops_name(part.name) for stage in part.filters))
