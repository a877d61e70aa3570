"""Run one stage: keep the results of finished tasks, let the engine run all other tasks, and add up the counts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from crosscut.config.system.terminal import echo
from crosscut.corpus.execution.engine import Engine, TaskCall
from crosscut.corpus.execution.stages import (
    CorpusStage,
    Counts,
    Digests,
    TaskRecord,
    add_counts,
    begin_folder,
    is_done,
    remove_others,
)
from crosscut.data.progress import ProgressBar


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """Result of a stage."""

    name: str

    counts: Counts
    """Counts of all tasks, added up."""

    size: int
    """Bytes of text that the tasks worked on."""

    seconds: float
    """Processing time of all tasks in seconds, summed over all processes. Tasks of earlier runs are included."""

    elapsed: float
    """Wall-clock seconds of the stage in this run."""

    num_tasks: int

    num_run: int
    """Number of tasks that ran in this run. The results of the other tasks were kept from earlier runs."""


def run_stage(stage: CorpusStage, work: Path, *, engine: Engine, digests: Digests, bar: ProgressBar) -> StageResult:
    """Run the tasks of a stage whose results are missing or out of date, and return the result of the whole stage.

    Exceptions of tasks reach the caller. Results of tasks that had finished before an exception are kept.
    """
    started = time.monotonic()
    folder = work / stage.name
    begin_folder(work, stage.name)
    tasks = stage.tasks(work)
    for left in remove_others(folder, tasks):
        echo(f"crosscut: {left}", err=True)
    records: dict[str, TaskRecord] = {}
    calls: list[TaskCall] = []
    for task in tasks:
        key = digests.key(stage, task)
        record = is_done(folder, task, key)
        if record is None:
            calls.append(TaskCall(folder, task, key))
        else:
            records[task.name] = record
    phase = bar.phase(stage.name, sum(task.size for task in tasks))
    position = sum(record.size for record in records.values())
    phase.advance(position)
    for record in engine.run(calls):
        records[record.task] = record
        position += record.size
        phase.advance(position, record.size)
    phase.finish()
    ordered = [records[task.name] for task in tasks]
    for record in ordered:
        digests.learn(folder, record)
    return StageResult(
        name=stage.name,
        counts=add_counts([record.counts for record in ordered]),
        size=sum(record.size for record in ordered),
        seconds=sum(record.seconds for record in ordered),
        elapsed=time.monotonic() - started,
        num_tasks=len(tasks),
        num_run=len(calls),
    )
