"""Running a stage: what is done already is taken as it is, the rest goes to the engine, and all of it is counted."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from crosscut.corpus.execution.engine import Call, Engine
from crosscut.corpus.execution.stages import Counts, Digests, Record, Stage, add_counts, is_done, remove_others
from crosscut.data.progress import ProgressBar


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """What a stage came to."""

    name: str

    counts: Counts
    """Of all its tasks."""

    size: int
    """Bytes of text that its tasks worked on."""

    seconds: float
    """Of all its tasks, added up over the processes that ran them, in this run or an earlier one."""

    elapsed: float
    """Seconds that it took this run, from the first task handed out to the last one back."""

    num_tasks: int

    num_run: int
    """Tasks that this run had to do."""


def run_stage(stage: Stage, work: Path, *, engine: Engine, digests: Digests, bar: ProgressBar) -> StageResult:
    """Bring a stage's files up to date. Raises what a task raises; what is done by then stays done."""
    started = time.monotonic()
    folder = work / stage.name
    folder.mkdir(parents=True, exist_ok=True)
    tasks = stage.tasks(work)
    remove_others(folder, tasks)
    records: dict[str, Record] = {}
    calls: list[Call] = []
    for task in tasks:
        key = digests.key(stage, task)
        record = is_done(folder, task, key)
        if record is None:
            calls.append(Call(folder, task, key))
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
