"""Documents as the stage `ingest` writes them, for tests of the later stages, and small corpora."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crosscut.config.corpora import CorpusConfig, EngineConfig, LanguageConfig, LengthConfig, SourceConfig, TokensConfig
from crosscut.corpus.documents import CLEANING, DOCUMENTS, INGEST, TEXTS, Lineage, Part, write_table
from crosscut.corpus.execution.engine import start_engine
from crosscut.corpus.execution.running import StageResult, run_stage
from crosscut.corpus.execution.stages import CorpusStage, Digests, Output, StageTask, execute, read_records
from crosscut.data.progress import ProgressBar


def source(name: str, *files: Path, **more: Any) -> SourceConfig:
    return SourceConfig(name=name, files=tuple(map(str, files)), **more)


def small_corpus(folder: Path, *sources: SourceConfig, **sections: Any) -> CorpusConfig:
    """A corpus of any languages, of which one process makes few tokens. `sections` replaces sections of the config."""
    small = {
        "language": LanguageConfig(keep=()),
        "length": LengthConfig(min_tokens=20),
        "tokens": TokensConfig(vocab_size=300, num_shards=1),
        "engine": EngineConfig(workers=1),
    }
    return CorpusConfig(folder=str(folder), sources=sources, **{**small, **sections})


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

    execute(work / INGEST, StageTask(name=name.partition("-")[0], function=ingest), "ingested")
    execute(work / CLEANING, StageTask(name=name, function=clean), "cleaned")
    return Part(work, name, Lineage(filters, cleaned=True))


def run(work: Path, stages: Sequence[CorpusStage], workers: int = 1) -> dict[str, StageResult]:
    """Run stages on the parts that are there, as a new start of the command does."""
    digests = Digests()
    for folder in work.iterdir() if work.is_dir() else ():
        for record in read_records(work, folder.name):
            digests.learn(folder, record)
    with start_engine(EngineConfig(workers=workers), work) as engine, ProgressBar(shown=False) as bar:
        return {stage.name: run_stage(stage, work, engine=engine, digests=digests, bar=bar) for stage in stages}
