"""Documents as the stage `ingest` writes them, for tests of the later stages."""

from collections.abc import Sequence
from pathlib import Path

from crosscut.corpus.documents import CLEANING, DOCUMENTS, INGEST, TEXTS, Lineage, Part, write_table
from crosscut.corpus.execution.engine import _Processes
from crosscut.corpus.execution.running import StageResult, run_stage
from crosscut.corpus.execution.stages import Digests, Output, Record, Stage, Task, execute
from crosscut.data.progress import ProgressBar


def write_part(
    work: Path,
    texts: Sequence[str],
    *,
    name: str = "000000-0000",
    file: str = "made/texts.jsonl",
    titles: Sequence[str] = (),
    filters: tuple[str, ...] = (),
) -> Part:
    """Write a part with these texts, ingested and cleaned as by the tasks of these stages."""
    (work / INGEST).mkdir(parents=True, exist_ok=True)
    (work / CLEANING).mkdir(exist_ok=True)
    columns = {
        "id": [f"{file}#{number}" for number in range(1, len(texts) + 1)],
        "text": texts,
        "url": [""] * len(texts),
        "karma": [None] * len(texts),
        "title": titles or [""] * len(texts),
    }

    def ingest(output: Output) -> dict[str, dict[str, int]]:
        write_table(output.path(f"{name}.arrow"), columns, DOCUMENTS)
        return {"parts": {name: sum(map(len, texts))}}

    def clean(output: Output) -> dict[str, int]:
        write_table(output.path(f"{name}.arrow"), {"row": list(range(len(texts))), "text": texts}, TEXTS)
        return {}

    execute(work / INGEST, Task(name=name.partition("-")[0], function=ingest), "ingested")
    execute(work / CLEANING, Task(name=name, function=clean), "cleaned")
    return Part(work, name, Lineage(filters, cleaned=True))


def run(work: Path, stages: Sequence[Stage]) -> dict[str, StageResult]:
    """Run stages on the parts that `write_part` has written."""
    digests = Digests()
    for folder in work.iterdir():
        for path in folder.glob("*.json"):
            record = Record.read(path)
            if record is not None:
                digests.learn(folder, record)
    with _Processes(1, work / ".workers.lock") as engine, ProgressBar(shown=False) as bar:
        return {stage.name: run_stage(stage, work, engine=engine, digests=digests, bar=bar) for stage in stages}
