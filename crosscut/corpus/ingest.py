"""Ingest: read source files of all formats into parts (Arrow files of documents), and list all unreadable records.

A task reads some consecutive files of one source, and holds one part in memory at a time. The task writes parts named
`<task>-<number>.arrow`, and a file `<task>.rejects.jsonl` with the file, the position and the reason for each
unreadable record. The module `origins` describes the other files of a task.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TextIO

from crosscut.config.corpora import CorpusConfig, SourceConfig
from crosscut.config.errors import DamagedDataError, DataError
from crosscut.corpus.batches import batches
from crosscut.corpus.documents import DOCUMENTS, INGEST, count_bytes, write_table
from crosscut.corpus.execution.budget import RecordWatch
from crosscut.corpus.execution.stages import CorpusStage, Counts, Output, StageTask, TaskRecord
from crosscut.corpus.extraction.careful import check_installed
from crosscut.corpus.filters.urls import UrlFilter
from crosscut.corpus.finished import WORK_FOLDER
from crosscut.corpus.json_rows import REJECT_KEYS, read_rows
from crosscut.corpus.origins import Skipped, SkippedWriter, files_name, skipped_name, write_files
from crosscut.corpus.readers import Item, RawText, ReaderSettings, Reject, Skip, find_reader
from crosscut.corpus.readers.files import File, find_source
from crosscut.data.hashing import sha256
from crosscut.data.text.records import too_long
from crosscut.data.text.sources import unreadable

TASK_BYTES = 64 << 20
"""Maximum number of bytes on disk that a task reads. A task that consists of a single file may read more."""

SLOWNESS = {"html": 8, "mail": 8, "wikipedia": 8, "warc": 8}
"""Cost of reading one byte, for each format that is slow to read. A byte of any other format costs 1. A higher cost
makes tasks smaller, so that all workers share the slow files."""

FILE_BYTES = 4096
"""Minimum cost of a file in bytes. Opening a file takes about as long as reading this many bytes."""


@dataclass(frozen=True, kw_only=True)
class IngestStage(CorpusStage):
    """The first stage, which reads the source files."""

    config: CorpusConfig
    name: str = INGEST
    version: int = 6

    def tasks(self, work: Path) -> list[StageTask]:  # noqa: ARG002 - no stage comes before
        """List the tasks. Each task reads some files of one source.

        Raises `DataError` if files are missing, unreadable, or of unknown format (see `find_source`).
        """
        tasks: list[StageTask] = []
        for source in self.config.sources:
            found = find_source(source)
            settings = self._settings(source, found.files)
            left_out = found.left_out
            for files in batches(found.files, _cost, TASK_BYTES):
                share = FileShare(
                    name=f"{len(tasks):06d}",
                    source=source.name,
                    files=tuple(files),
                    left_out=left_out,
                    reading=ReaderSettings.of(self.config, source),
                    part_bytes=self.config.ingest.part_mb * 10**6,
                )
                described = [[file.name, file.format, file.compression, file.size, file.version] for file in files]
                tasks.append(
                    StageTask(
                        name=share.name,
                        function=partial(ingest_files, share),
                        settings={**settings, "files": described, **({"left_out": left_out} if left_out else {})},
                        size=sum(file.size for file in files),
                        is_watched=True,
                    )
                )
                left_out = {}
        return tasks

    def _settings(self, source: SourceConfig, files: Sequence[File]) -> dict[str, object]:
        settings = asdict(ReaderSettings.of(self.config, source))
        tokenizer, extraction = settings.pop("tokenizer"), settings.pop("extraction")
        del settings["urls"]
        formats = {file.format for file in files}
        if formats & {"html", "warc"}:
            settings["extraction"] = str(extraction)
            check_installed(extraction)
        if formats & {"warc", "wet"}:
            lists = json.dumps(UrlFilter(self.config.urls).lists)
            settings["urls"] = hashlib.sha256(lists.encode()).hexdigest()
        pairs = [file for file in files if file.format == "megatron"]
        if pairs and not tokenizer:
            raise DataError(
                f"`tokens.tokenizer` must name the tokenizer that `{pairs[0].url}` was made with, but is empty. "
                f"Set the path of that `tokenizer.json`."
            )
        if pairs:
            try:
                settings["tokenizer"] = sha256(Path(tokenizer))
            except OSError as error:
                raise unreadable(tokenizer, error) from None
        return {"source": source.name, "part_mb": self.config.ingest.part_mb, **settings}


def _cost(file: File) -> int:
    return max(file.size, FILE_BYTES) * SLOWNESS.get(file.format, 1)


class FileShare(NamedTuple):
    """Files of one source that one task reads, with the settings for reading them."""

    name: str
    """Name of the task."""

    source: str
    """Name of the source."""

    files: tuple[File, ...]

    left_out: dict[str, int]
    """Number of files, keyed by suffix, that were skipped in the source's folders because they do not have the source's
    format. Only the first task of a source reports these numbers. For its other tasks, this field is empty."""

    reading: ReaderSettings

    part_bytes: int
    """Size of a part in bytes of text."""


def ingest_files(share: FileShare, output: Output) -> Counts:
    """Run a task: read files of one source, and write their documents as parts of about `part_bytes` bytes of text."""
    task, source, files = share.name, share.source, share.files
    parts = _Parts(task, share.part_bytes, output)
    write_files(output.path(files_name(task)), [(f"{source}/{file.name}", file.url) for file in files])
    with (
        output.path(f"{task}.rejects.jsonl").open("w", encoding="utf-8") as rejects,
        SkippedWriter(output.path(skipped_name(task))) as skipped,
    ):
        dropped = _Dropped(source, rejects, skipped)
        for file in files:
            _ingest_file(file, share, parts, dropped, output.watch)
    output.watch.stop()
    parts.write()
    size, written = sum(file.size for file in files), sum(parts.sizes.values())
    of_source = {
        "files": len(files),
        "bytes_in": size,
        "records": parts.num_documents + dropped.rejects,
        "rejects": dropped.rejects,
        "lost": dropped.lost,
        "documents": parts.num_documents,
        "bytes": written,
    }
    return {
        "documents_in": parts.num_documents + sum(rule["documents"] for rule in dropped.rules.values()),
        "documents_out": parts.num_documents,
        "bytes_in": size,
        "bytes_out": written,
        "rules": {name: dict(rule) for name, rule in sorted(dropped.rules.items())},
        "notes": dict(sorted(parts.notes.items())),
        "parts": parts.sizes,
        "damaged": list(dropped.damaged.values()),
        "sources": {source: of_source},
        **({"left_out": {source: share.left_out}} if share.left_out else {}),
    }


def _ingest_file(file: File, share: FileShare, parts: "_Parts", dropped: "_Dropped", watch: RecordWatch) -> None:
    name, before = f"{share.source}/{file.name}", parts.num_documents
    for item in _read(file, name, share.reading, watch):
        if isinstance(item, RawText):
            parts.add(f"{name}#{item.record}", item)
        else:
            dropped.add(item, file, parts.num_documents - before)


def _read(file: File, name: str, reading: ReaderSettings, watch: RecordWatch) -> Iterator[Item]:
    """Read a file within the limits of its records. If an earlier attempt could not read the file to its end, the items
    before that place are followed by a reject that stands for the rest.
    """
    loss = watch.begin_file(name)
    items = find_reader(file.format)(replace(file, watch=watch), reading)
    position = 0
    for item in islice(items, loss.after) if loss else items:
        watch.num_items += 1
        if isinstance(item, RawText):
            position = item.position
            if len(item.text) > reading.max_bytes:  # nested lists may make a text much longer than its page
                item = too_long(f"record {item.record}", "the text", item.text, reading.max_bytes)
        yield item
    if loss:
        place = f"after record {loss.after}" if loss.after else "byte 0"
        yield Reject(place, loss.rule, loss.reason, lost=max(file.size - position, 1))


@dataclass
class _Dropped:
    """Counter for a task's records that do not become documents. It also writes each unreadable record to `file`, and
    each skipped record to `skipped`.
    """

    source: str
    file: TextIO
    skipped: SkippedWriter
    rules: dict[str, Counter[str]] = field(default_factory=dict)
    """Number of dropped records (`documents`) and of lost bytes (`bytes`), keyed by the rule that dropped them."""
    rejects: int = 0
    lost: int = 0
    """Number of bytes that are lost in damaged files."""
    damaged: dict[str, dict[str, object]] = field(default_factory=dict)
    """Description of the first loss in each damaged file, keyed by the file's name."""

    def add(self, item: Reject | Skip, file: File, num_documents: int) -> None:
        """Count a record of `file`. `num_documents` is the number of documents read from that file so far."""
        name = f"{self.source}/{file.name}"
        rule = self.rules.setdefault(item.rule, Counter(documents=0, bytes=0))
        rule["documents"] += 1
        if isinstance(item, Reject):
            self.rejects += 1
            self.lost += item.lost
            rule["bytes"] += item.lost
            described: dict[str, object] = {
                "source": self.source,
                "name": name,
                "file": file.url.encode("utf-8", "backslashreplace").decode("utf-8"),
                "place": item.place,
                "rule": item.rule,
                "reason": item.reason,
                "excerpt": item.excerpt,
            }
            self.file.write(json.dumps(described) + "\n")
            if item.lost:
                self.damaged.setdefault(file.name, described | {"documents": num_documents})
        else:
            self.skipped.add(Skipped(name, item.record, item.rule))


class _Parts:
    """Writer of a task's documents. It collects documents, and writes a part as soon as they have enough text."""

    def __init__(self, task: str, part_bytes: int, output: Output) -> None:
        self._task = task
        self._part_bytes = part_bytes
        self._output = output
        self._columns: dict[str, list[object]] = {name: [] for name in DOCUMENTS.names}
        self._num_bytes = 0
        self.num_documents = 0
        self.notes: Counter[str] = Counter()
        """Number of documents, keyed by the note that the reader attached to them (see `RawText.note`), and the number
        of replaced characters."""
        self.sizes: dict[str, int] = {}
        """Size of each written part in bytes of text, keyed by the part's name."""

    def add(self, name: str, item: RawText) -> None:
        for column, value in zip(DOCUMENTS.names, (name, item.text, item.url, item.karma, item.title), strict=True):
            self._columns[column].append(value)
        self._num_bytes += count_bytes(item.text)
        self.num_documents += 1
        self.notes.update(item.note.split(", ") if item.note else [])
        if item.num_replaced:
            self.notes.update({"with replaced characters": 1, "replaced characters": item.num_replaced})
        if self._num_bytes >= self._part_bytes:
            self.write()

    def write(self) -> None:
        if not self._columns["id"]:
            return
        self._output.watch.advance(self._num_bytes)
        part = f"{self._task}-{len(self.sizes):04d}"
        write_table(self._output.path(f"{part}.arrow"), self._columns, DOCUMENTS, packed=True)
        self.sizes[part] = self._num_bytes
        self._columns = {name: [] for name in DOCUMENTS.names}
        self._num_bytes = 0


def check_rejects(records: Sequence[TaskRecord], config: CorpusConfig) -> None:
    """Raise `DataError` if the unreadable share of a source is above `ingest.max_rejects`, or if a source has no
    documents. The error is a `DamagedDataError` if a file of the source is damaged.

    Each source is checked separately, because a large source would hide the complete loss of a small source. The
    unreadable share of a source is the larger of two numbers: the share of rejected records, and the share of bytes
    that are lost in damaged files.
    """
    for source in config.sources:
        of_source = [record for record in records if source.name in record.counts["sources"]]
        found: Counter[str] = Counter()
        for record in of_source:
            found.update(record.counts["sources"][source.name])
        first = _first_reject(of_source, source, _rejects_folder(config))
        kind = DamagedDataError if found["lost"] else DataError
        by_records = found["rejects"] / max(found["records"], 1)
        by_bytes = found["lost"] / max(found["bytes_in"], 1)
        if max(by_records, by_bytes) > config.ingest.max_rejects:
            what = (
                f"{found['rejects']:,} of {found['records']:,} records ({by_records:.1%})"
                if by_records >= by_bytes
                else f"{found['lost']:,} of {found['bytes_in']:,} bytes ({by_bytes:.1%})"
            )
            raise kind(
                f"`ingest.max_rejects` allows {config.ingest.max_rejects:.1%} of the source `{source.name}` to be "
                f"unreadable, but {what} cannot be read. Repair the files, or raise `ingest.max_rejects`. "
                f"First reject: {first}"
            )
        if not found["documents"]:
            raise kind(
                f"The source `{source.name}` must contain documents, but its files ({found['files']:,} in total) "
                f"contain none. Check `files` and `format`, or remove the source."
            )


def check_damage(records: Sequence[TaskRecord], config: CorpusConfig) -> None:
    """Raise `DamagedDataError` if more files than `ingest.max_damaged_files` are damaged.

    Everything that is lost at the end of a damaged file counts as a single reject, even if it held many documents. The
    loss may then stay below `ingest.max_rejects`, so the number of damaged files has its own limit.
    """
    damaged = [one for record in records for one in record.counts["damaged"]]
    allowed = config.ingest.max_damaged_files
    if len(damaged) > allowed:
        first = damaged[0]
        more = f" {len(damaged) - 1:,} more are listed in `{_rejects_folder(config)}`." if len(damaged) > 1 else ""
        raise DamagedDataError(
            f"`ingest.max_damaged_files` allows {allowed:,} damaged files, but the corpus has {len(damaged):,}. First "
            f"damaged file: `{first['file']}`, {first['place']}, after {first['documents']:,} documents: "
            f"{first['reason'].rstrip('.')}.{more} The number of lost documents is unknown. Get the files again, or "
            "raise `ingest.max_damaged_files` to use the documents before the damage. Finished tasks are kept."
        )


def _rejects_folder(config: CorpusConfig) -> Path:
    return Path(config.folder) / WORK_FOLDER / INGEST


def _first_reject(records: Sequence[TaskRecord], source: SourceConfig, folder: Path) -> str:
    for record in records:
        if record.counts["sources"][source.name]["rejects"]:
            path = folder / f"{record.task}.rejects.jsonl"
            reject = next(read_rows(path, REJECT_KEYS))
            reason = reject["reason"].removesuffix(".")
            return f"`{reject['file']}`, {reject['place']}: {reason}. All rejects are in `{path.parent}`."
    return ""
