"""Stages that process each part (an Arrow file of documents) independently, with one task per part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from crosscut.corpus.documents import INGEST, READ, Lineage, Part
from crosscut.corpus.execution.stages import CorpusStage, Counts, StageTask, read_records


@dataclass(frozen=True, kw_only=True)
class PartStage(CorpusStage):
    """A stage with one task per part (an Arrow file of documents). Each task calls `function` with its part,
    `arguments`, and its output.
    """

    function: Callable[..., Counts]
    arguments: tuple[object, ...] = ()
    """Arguments that `function` receives after `part` and before `output`. All arguments must be picklable."""

    settings: Mapping[str, object] = field(default_factory=dict)
    """Settings that the result depends on, as JSON values. If a setting changes, the tasks run again."""

    inputs: tuple[Path, ...] = ()
    """Files of other stages that `function` reads in addition to the part, such as a tokenizer."""

    inputs_of: Callable[[Part], tuple[Path, ...]] = lambda _: ()
    """Function that lists the files of other stages that a task reads for its part only."""

    lineage: Lineage = READ
    """The stages that come before this stage."""

    def tasks(self, work: Path) -> list[StageTask]:
        """List the tasks, one for each part."""
        return [
            StageTask(
                name=part.name,
                function=partial(self.function, part, *self.arguments),
                inputs=(*part.files, *self.inputs_of(part), *self.inputs),
                settings=self.settings,
                size=size,
            )
            for part, size in find_parts(work, self.lineage)
        ]


def find_parts(work: Path, lineage: Lineage = READ) -> list[tuple[Part, int]]:
    """List the parts (Arrow files of documents) of a corpus in order, each with the size of its text in bytes.

    The parts leave out the documents that a stage of the `lineage` dropped. The sizes still include these documents.
    """
    found = []
    for record in read_records(work, INGEST):
        sizes: dict[str, int] = record.counts["parts"]
        found += [(Part(work, name, lineage), size) for name, size in sorted(sizes.items())]
    return found


def task_files(work: Path, stage: str, suffix: str = ".arrow") -> tuple[Path, ...]:
    """Paths of the files that the finished tasks of a stage wrote under their own names, ordered by the names."""
    return tuple(work / stage / f"{record.task}{suffix}" for record in read_records(work, stage))
