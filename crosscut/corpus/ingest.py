"""Ingest: files of all kinds to parts of documents, with a list of all that could not be read.

A task reads some consecutive files of one source. It writes parts `<task>-<number>.arrow`, and `<task>.rejects.jsonl`
with the file, the place and the reason of each reject. It holds one part in memory at a time.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from crosscut.config.corpus import CorpusConfig, SourceConfig
from crosscut.config.errors import DataError
from crosscut.corpus.documents import DOCUMENTS, INGEST, count_bytes, write_table
from crosscut.corpus.execution.stages import Counts, Output, Record, Task
from crosscut.corpus.finished import WORK_FOLDER
from crosscut.corpus.readers import Reading, Reject, Text, find_reader
from crosscut.corpus.readers.files import File, find_files
from crosscut.data.hashing import sha256
from crosscut.data.sources import unreadable

TASK_BYTES = 64 << 20
"""Files on disk that a task reads; more only where one file is larger."""

SLOWNESS = {"html": 8, "mail": 8, "wikipedia": 8}
"""How many times as much their bytes count of formats that take long to read, so that all workers have some."""

LIBRARIES = {"jsonl": (), "parquet": (), "text": (), "megatron": ("tokenizers",), "html": ("resiliparse",)}
ALL_LIBRARIES = ("resiliparse", "mwparserfromhell", "mwxml")
"""What makes the text of each format, another version perhaps another text."""

FILE_BYTES = 4096
"""What a file counts at least: opening it takes about as long as reading so much of it."""


@dataclass(frozen=True)
class IngestStage:
    """The first stage."""

    config: CorpusConfig
    name: str = field(default=INGEST, init=False)
    version: int = field(default=1, init=False)

    def tasks(self, work: Path) -> list[Task]:  # noqa: ARG002 - no stage comes before
        """One for some files of a source. Raises `DataError` for what `find_files` raises it for."""
        tasks: list[Task] = []
        for source in self.config.sources:
            reading = Reading.of(self.config, source)
            files_of_source = find_files(source)
            settings = self._settings(source, files_of_source)
            for files in _groups(files_of_source):
                name = f"{len(tasks):06d}"
                part_bytes = self.config.ingest.part_mb * 10**6
                described = [[file.name, file.format, file.compression, file.size, file.version] for file in files]
                tasks.append(
                    Task(
                        name=name,
                        function=partial(ingest_files, name, source.name, tuple(files), reading, part_bytes),
                        settings={**settings, "files": described},
                        size=sum(file.size for file in files),
                    )
                )
        return tasks

    def _settings(self, source: SourceConfig, files: Sequence[File]) -> dict[str, Any]:
        settings = asdict(Reading.of(self.config, source))
        tokenizer = settings.pop("tokenizer")
        pairs = [file for file in files if file.format == "megatron"]
        if pairs and not tokenizer:
            raise DataError(
                f"`tokens.tokenizer` must name the tokenizer that `{pairs[0].url}` was made with, but is empty."
            )
        if pairs:
            try:
                settings["tokenizer"] = sha256(Path(tokenizer))
            except OSError as error:
                raise unreadable(tokenizer, error) from None
        return {"source": source.name, "part_mb": self.config.ingest.part_mb, **settings}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a reader that needs it says so
        return ""


def _groups(files: Sequence[File]) -> Iterator[list[File]]:
    group: list[File] = []
    total = 0
    for file in files:
        cost = max(file.size, FILE_BYTES) * SLOWNESS.get(file.format, 1)
        if group and total + cost > TASK_BYTES:
            yield group
            group, total = [], 0
        group.append(file)
        total += cost
    if group:
        yield group


def ingest_files(
    task: str, source: str, files: Sequence[File], reading: Reading, part_bytes: int, output: Output
) -> Counts:
    """Task of the stage: read files of a source and write their documents as parts of about `part_bytes` of text."""
    parts = _Parts(task, part_bytes, output)
    rules: dict[str, Counter[str]] = {}
    notes: Counter[str] = Counter()
    num_rejects = lost = 0
    with output.path(f"{task}.rejects.jsonl").open("w", encoding="utf-8") as rejects:
        for file in files:
            for item in find_reader(file.format)(file, reading):
                if isinstance(item, Text):
                    parts.add(f"{source}/{file.name}#{item.record}", item)
                    notes.update([item.note] if item.note else [])
                    continue
                rule = rules.setdefault(item.rule, Counter(documents=0, bytes=0))
                rule["documents"] += 1
                if isinstance(item, Reject):
                    num_rejects += 1
                    lost += item.lost
                    rule["bytes"] += item.lost
                    rejects.write(json.dumps(_described(source, file, item)) + "\n")
    parts.write()
    num_records = parts.num_documents + num_rejects
    size = sum(file.size for file in files)
    return {
        "documents_in": parts.num_documents + sum(rule["documents"] for rule in rules.values()),
        "documents_out": parts.num_documents,
        "bytes_in": size,
        "bytes_out": sum(parts.sizes.values()),
        "rules": {name: dict(rule) for name, rule in sorted(rules.items())},
        "notes": dict(sorted(notes.items())),
        "parts": parts.sizes,
        "sources": {
            source: {
                "files": len(files),
                "bytes_in": size,
                "records": num_records,
                "rejects": num_rejects,
                "lost": lost,
                "documents": parts.num_documents,
                "bytes": sum(parts.sizes.values()),
            }
        },
    }


def _described(source: str, file: File, reject: Reject) -> dict[str, str]:
    return {
        "source": source,
        "name": f"{source}/{file.name}",
        "file": file.url.encode("utf-8", "backslashreplace").decode("utf-8"),
        "place": reject.place,
        "rule": reject.rule,
        "reason": reject.reason,
        "excerpt": reject.excerpt,
    }


class _Parts:
    """The parts of a task, each written when it has enough text."""

    def __init__(self, task: str, part_bytes: int, output: Output) -> None:
        self._task = task
        self._part_bytes = part_bytes
        self._output = output
        self._columns: dict[str, list[Any]] = {name: [] for name in DOCUMENTS.names}
        self._num_bytes = 0
        self.num_documents = 0
        self.sizes: dict[str, int] = {}
        """Bytes of text of each part that is written, by name."""

    def add(self, name: str, item: Text) -> None:
        for column, value in zip(DOCUMENTS.names, (name, item.text, item.url, item.karma, item.title), strict=True):
            self._columns[column].append(value)
        self._num_bytes += count_bytes(item.text)
        self.num_documents += 1
        if self._num_bytes >= self._part_bytes:
            self.write()

    def write(self) -> None:
        if not self._columns["id"]:
            return
        part = f"{self._task}-{len(self.sizes):04d}"
        write_table(self._output.path(f"{part}.arrow"), self._columns, DOCUMENTS, packed=True)
        self.sizes[part] = self._num_bytes
        self._columns = {name: [] for name in DOCUMENTS.names}
        self._num_bytes = 0


def check_rejects(records: Sequence[Record], config: CorpusConfig) -> None:
    """Raise `DataError` when more of a source cannot be read than `ingest.max_rejects`, or all of it is empty.

    Each source is looked at by itself, since a large one would hide that a small one is wholly lost. What counts is the
    share of records or, where files are damaged, the share of their bytes, whichever is more.
    """
    for source in config.sources:
        of_source = [record for record in records if source.name in record.counts["sources"]]
        found: Counter[str] = Counter()
        for record in of_source:
            found.update(record.counts["sources"][source.name])
        first = _first_reject(of_source, source, Path(config.folder) / WORK_FOLDER / INGEST)
        by_records = found["rejects"] / max(found["records"], 1)
        by_bytes = found["lost"] / max(found["bytes_in"], 1)
        if max(by_records, by_bytes) > config.ingest.max_rejects:
            what = (
                f"{found['rejects']:,} of {found['records']:,} records ({by_records:.1%})"
                if by_records >= by_bytes
                else f"{found['lost']:,} of {found['bytes_in']:,} bytes ({by_bytes:.1%})"
            )
            raise DataError(
                f"At most {config.ingest.max_rejects:.1%} of the source `{source.name}` must be unreadable "
                f"(`ingest.max_rejects`), but {what} are, the first: {first}"
            )
        if not found["documents"]:
            raise DataError(
                f"The source `{source.name}` must hold documents, but its {found['files']:,} file(s) hold none. "
                f"Check `files` and `format`, or remove the source."
            )


def _first_reject(records: Sequence[Record], source: SourceConfig, folder: Path) -> str:
    for record in records:
        if record.counts["sources"][source.name]["rejects"]:
            path = folder / f"{record.task}.rejects.jsonl"
            with path.open(encoding="utf-8") as file:
                reject = json.loads(file.readline())
            return f"`{reject['file']}`, {reject['place']}: {reject['reason']}. All of them are in `{path.parent}`."
    return ""
