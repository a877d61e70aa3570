"""Documents as the stage `ingest` writes them, for tests of the later stages."""

from collections.abc import Sequence
from pathlib import Path

from crosscut.config.corpora import EngineConfig
from crosscut.corpus.documents import CLEANING, DOCUMENTS, INGEST, TEXTS, Lineage, Part, write_table
from crosscut.corpus.execution.engine import start_engine
from crosscut.corpus.execution.running import StageResult, run_stage
from crosscut.corpus.execution.stages import Digests, Output, Stage, Task, TaskRecord, execute
from crosscut.data.progress import ProgressBar


def write_documents(
    path: Path,
    ids: Sequence[str],
    texts: Sequence[str],
    *,
    urls: Sequence[str] = (),
    titles: Sequence[str] = (),
    packed: bool = False,
) -> None:
    """Write documents without karma to a file, compressed as the tasks of `ingest` do, or as they are."""
    blank = [""] * len(texts)
    columns = {"id": ids, "text": list(texts), "url": urls or blank, "karma": [None] * len(texts)}
    write_table(path, {**columns, "title": titles or blank}, DOCUMENTS, packed=packed)


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
    ids = [f"{file}#{number}" for number in range(1, len(texts) + 1)]

    def ingest(output: Output) -> dict[str, dict[str, int]]:
        write_documents(output.path(f"{name}.arrow"), ids, texts, titles=titles)
        return {"parts": {name: sum(map(len, texts))}}

    def clean(output: Output) -> dict[str, int]:
        write_table(output.path(f"{name}.arrow"), {"row": list(range(len(texts))), "text": texts}, TEXTS)
        return {}

    execute(work / INGEST, Task(name=name.partition("-")[0], function=ingest), "ingested")
    execute(work / CLEANING, Task(name=name, function=clean), "cleaned")
    return Part(work, name, Lineage(filters, cleaned=True))


def run(work: Path, stages: Sequence[Stage], workers: int = 1) -> dict[str, StageResult]:
    """Run stages on the parts that are there."""
    digests = Digests()
    for folder in work.iterdir():
        for path in folder.glob("*.json"):
            record = TaskRecord.read(path)
            if record is not None:
                digests.learn(folder, record)
    with start_engine(EngineConfig(workers=workers), work) as engine, ProgressBar(shown=False) as bar:
        return {stage.name: run_stage(stage, work, engine=engine, digests=digests, bar=bar) for stage in stages}
