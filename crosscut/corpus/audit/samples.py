"""Count and sample the documents of each part (an Arrow file) for the report, by rule, language and length.

The samples are the documents with the smallest hashes of seed and id, so the choice does not depend on how the corpus
is divided into parts.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from crosscut.corpus.audit.excerpts import excerpt, excerpts_of_pair
from crosscut.corpus.documents import (
    CLEANING,
    INGEST,
    MARKS_SUFFIX,
    TEXTS,
    Lineage,
    Part,
    Rows,
    read_drops,
    read_table,
)
from crosscut.corpus.execution.stages import CorpusStage, Counts, Output
from crosscut.corpus.json_rows import JsonRow, read_rows
from crosscut.corpus.leakage.passages import Span, pieces
from crosscut.corpus.leakage.removal import LEAKAGE, files_of_cuts, read_cuts
from crosscut.corpus.parts import PartStage
from crosscut.corpus.tokens.encoding import INDEX_SUFFIX, TOKENS

AUDIT = "audit"
"""Name of the stage that this module implements."""

SAMPLES = 5
"""Maximum number of sampled documents per rule."""

CHANGED = "changed"
"""Rule name for samples of documents that the stage `cleaning` repaired."""

CUT, SHORT_PIECES = "cut", "short pieces"
"""Rule names for samples of kept documents that lost text. The stage `leakage` cuts passages out. The stage `tokens`
leaves out pieces between cuts if they are too short."""

SAMPLES_SUFFIX = ".samples.jsonl"
"""Suffix of the file with the samples of a part (an Arrow file of documents)."""

NOTHING = {"documents": 0, "bytes": 0, "tokens": 0, "uncounted": 0}

Numbers = npt.NDArray[np.int64]
Amount = dict[str, int]
"""Size of a set of documents: the number of `documents`, their `bytes`, and their `tokens`. `tokens` covers only
documents whose tokens were counted, and `uncounted` holds the bytes of all other documents."""


def audit_stage(lineage: Lineage, seed: int) -> CorpusStage:
    """Make the stage `audit`, which counts and samples the documents of every part (an Arrow file of documents).

    `lineage` names all stages of the corpus that yield drops or texts. `seed` decides which samples are chosen.
    """
    return PartStage(
        name=AUDIT,
        version=3,
        function=audit_part,
        arguments=(seed,),
        settings={"seed": seed, "samples": SAMPLES, "filters": list(lineage.filters)},
        inputs_of=lambda part: (*_marks_of(part), *_written_of(part)),
        lineage=lineage,
    )


def _marks_of(part: Part) -> tuple[Path, ...]:
    paths = (part.file(stage, MARKS_SUFFIX) for stage in part.lineage.filters)
    return tuple(path for path in paths if path.is_file())


def _written_of(part: Part) -> tuple[Path, ...]:
    """Files that tell which pieces of each document were written as tokens: the index of tokens, and the cuts."""
    return (part.file(TOKENS, INDEX_SUFFIX), *files_of_cuts(part)) if TOKENS in part.lineage.filters else ()


def audit_part(part: Part, seed: int, output: Output) -> Counts:
    """Run a task: count a part's documents by source, rule, language and length, and write its samples."""
    documents = _PartColumns(part)
    drops = {stage: read_drops(part.work, stage, part.name) for stage in part.lineage.filters}
    samples = [*_dropped(part, documents, drops, seed), *_mended(documents, seed), *_shortened(part, documents, seed)]
    lines = "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
    output.path(f"{part.name}{SAMPLES_SUFFIX}").write_text(lines, encoding="utf-8")
    counts: Counts = {
        "rules": {stage: _by_rule(documents, table) for stage, table in drops.items()},
        "counted": documents.total(documents.tokens >= 0),
        **_histograms(part, documents),
    }
    kept = np.setdiff1d(np.arange(len(documents)), part.dropped())
    if TOKENS in part.lineage.filters:
        _take_written(part, documents)
    return {"sources": documents.amounts(documents.sources[kept], kept), **counts}


class _PartColumns:
    """All documents of a part, as columns."""

    def __init__(self, part: Part) -> None:
        self.read = read_table(part.file(INGEST))
        self.mended = read_table(part.file(CLEANING)) if part.lineage.cleaned else TEXTS.empty_table()
        self.mended_rows = self.mended["row"].to_numpy()
        self.ids = self.read["id"]
        self.sources = np.asarray([name.partition("/")[0] for name in self.ids.to_pylist()], dtype=np.str_)
        self.num_bytes: Numbers = pc.binary_length(self.read["text"]).to_numpy().astype(np.int64)
        self.num_bytes[self.mended_rows] = pc.binary_length(self.mended["text"]).to_numpy()
        self.tokens: Numbers = np.full(len(self), -1, dtype=np.int64)
        counted = _mark(part, "tokens")
        if counted is not None:
            self.tokens[counted[0]] = counted[1]

    def __len__(self) -> int:
        return len(self.ids)

    def text(self, row: int) -> str:
        """Latest text of a document."""
        at = int(np.searchsorted(self.mended_rows, row))
        if at < len(self.mended_rows) and self.mended_rows[at] == row:
            return str(self.mended["text"][at].as_py())
        return str(self.read["text"][row].as_py())

    def total(self, chosen: npt.NDArray[np.bool_]) -> Amount:
        """Total amount of the chosen documents. `chosen` has one boolean per document of the part."""
        rows = np.flatnonzero(chosen)
        return self.amounts(np.zeros(len(rows), np.str_), rows).get("", dict(NOTHING))

    def amounts(self, labels: npt.NDArray[np.str_], rows: npt.NDArray[np.integer]) -> dict[str, Amount]:
        """Sum up the documents, bytes and tokens of the given rows by label. `labels` has one label per row."""
        names, group = np.unique(labels, return_inverse=True)
        sizes, tokens = self.num_bytes[rows], self.tokens[rows]
        values = (np.ones_like(sizes), sizes, np.maximum(tokens, 0), np.where(tokens < 0, sizes, 0))
        columns = [_sums(group, value, len(names)).tolist() for value in values]
        return {
            str(name): dict(zip(NOTHING, amount, strict=True))
            for name, amount in zip(names, zip(*columns, strict=True), strict=True)
        }


def _take_written(part: Part, documents: _PartColumns) -> None:
    """Set the bytes and tokens of each document to the totals of the pieces that were written as tokens.

    Before this call, the numbers also include the passages that the stage `leakage` cut out of the document.
    """
    written = read_table(part.file(TOKENS, INDEX_SUFFIX))
    rows = written["row"].to_numpy()
    documents.tokens = _sums(rows, written["tokens"].to_numpy().astype(np.int64) - 1, len(documents))
    texts = set(zip(rows.tolist(), written["piece"].to_pylist(), strict=True))
    cuts = _cuts_of(part)
    for row, spans in cuts.items():
        left = enumerate(pieces(documents.text(row), spans))
        documents.num_bytes[row] = sum(len(text.encode()) for piece, text in left if (row, piece) in texts)


def _cuts_of(part: Part) -> dict[int, list[Span]]:
    """Spans that were cut from the documents of a part, keyed by row. Empty unless the stages `leakage` and `tokens`
    have run.
    """
    return read_cuts(part) if TOKENS in part.lineage.filters else {}


def _sums(group: Numbers, values: Numbers, size: int) -> Numbers:
    sums = np.zeros(size, dtype=np.int64)
    np.add.at(sums, group, values)
    return sums


def _mark(part: Part, name: str) -> tuple[Rows, npt.NDArray[np.generic]] | None:
    """Rows and values of the measurement `name`, such as `tokens`. None if no filter has made this measurement."""
    for path in _marks_of(part):
        table = read_table(path)
        if name in table.column_names:
            return table["row"].to_numpy(), table[name].to_numpy(zero_copy_only=False)
    return None


def _by_rule(documents: _PartColumns, drops: pa.Table) -> dict[str, Amount]:
    return documents.amounts(np.asarray(drops["rule"].to_pylist(), dtype=np.str_), drops["row"].to_numpy())


def _histograms(part: Part, documents: _PartColumns) -> Counts:
    """Histograms of the documents by language, score and length. Each histogram covers the documents that were still in
    the corpus when the value was measured.
    """
    counts: Counts = {}
    for mark, name, label in (
        ("language", "languages", str),
        ("score", "scores", score_bucket),
        ("tokens", "lengths", length_bucket),
    ):
        measured = _mark(part, mark)
        if measured is not None:
            rows, values = measured
            labels = np.asarray([label(value) for value in values.tolist()], dtype=np.str_)
            counts[name] = documents.amounts(labels, rows)
    return counts


def score_bucket(score: float) -> str:
    """Lower bound of the histogram bucket of a score. Buckets are 0.05 wide."""
    return f"{min(int(score * 20 + 1e-9), 19) / 20:.2f}"


def length_bucket(tokens: int) -> str:
    """Lower bound of the histogram bucket of a number of tokens. There are two buckets per doubling.

    The lower bounds are 0, 1, 2, 3, 4, 6, 8, 12, 16, and so on.
    """
    if tokens < 2:
        return str(tokens)
    power = 1 << (tokens.bit_length() - 1)
    half = power + power // 2
    return str(half if tokens >= half else power)


class Sampled(NamedTuple):
    """A document that was chosen as a sample, with its key from `sample_key`."""

    key: str
    row: int
    id: str


def _smallest(documents: _PartColumns, rows: Sequence[int], seed: int) -> list[Sampled]:
    ids = documents.ids.take(pa.array(rows, pa.int64())).to_pylist()
    return heapq.nsmallest(
        SAMPLES, (Sampled(sample_key(seed, name), row, name) for row, name in zip(rows, ids, strict=True))
    )


def sample_key(seed: int, name: str) -> str:
    """Pseudorandom key of a document, the same on every machine. Documents with the smallest keys become samples."""
    return hashlib.blake2b(f"{seed}\n{name}".encode(errors="replace"), digest_size=8).hexdigest()


def _dropped(part: Part, documents: _PartColumns, drops: Mapping[str, pa.Table], seed: int) -> Iterable[JsonRow]:
    for stage, table in drops.items():
        for rule in sorted(table["rule"].unique().to_pylist()):
            of_rule = table.filter(pc.equal(table["rule"], rule))
            rows = of_rule["row"].to_pylist()
            for sample in _smallest(documents, rows, seed):
                place = rows.index(sample.row)
                yield {
                    "stage": stage,
                    "rule": rule,
                    **_keyed(sample),
                    "detail": of_rule["detail"][place].as_py(),
                    "other": of_rule["other"][place].as_py(),
                    "text": excerpt(documents.text(sample.row)),
                    "at": [part.name, sample.row],
                }


def _mended(documents: _PartColumns, seed: int) -> Iterable[JsonRow]:
    rows = documents.mended_rows
    changed = pc.not_equal(documents.read["text"].take(rows), documents.mended["text"]).to_numpy()
    for sample in _smallest(documents, rows[changed].tolist(), seed):
        before, after = excerpts_of_pair(documents.read["text"][sample.row].as_py(), documents.text(sample.row))
        yield {"stage": CLEANING, "rule": CHANGED, **_keyed(sample), "before": before, "text": after}


def _shortened(part: Part, documents: _PartColumns, seed: int) -> Iterable[JsonRow]:
    """Samples of kept documents that lost text: the text at the first cut, and the first piece that is too short."""
    cuts = _cuts_of(part)
    if not cuts:
        return
    index = read_table(part.file(TOKENS, INDEX_SUFFIX))
    written: dict[int, set[int]] = {}
    for row, piece in zip(index["row"].to_pylist(), index["piece"].to_pylist(), strict=True):
        written.setdefault(row, set()).add(piece)
    kept = [row for row in cuts if row in written]
    for sample in _smallest(documents, kept, seed):
        spans = cuts[sample.row]
        ranges = ", ".join(f"{start:,} to {end:,}" for start, end in spans[:3]) + (", ..." if len(spans) > 3 else "")
        text = excerpt(documents.text(sample.row), spans[0][0])
        yield {"stage": LEAKAGE, "rule": CUT, **_keyed(sample), "detail": f"characters {ranges}", "text": text}
    left = {row: pieces(documents.text(row), cuts[row]) for row in kept}
    short = {row: [n for n in range(len(all_of)) if n not in written[row]] for row, all_of in left.items()}
    for sample in _smallest(documents, [row for row, missing in short.items() if missing], seed):
        missing, all_of = short[sample.row], left[sample.row]
        detail = f"{len(missing)} of {len(all_of)} pieces"
        text = excerpt(all_of[missing[0]])
        yield {"stage": TOKENS, "rule": SHORT_PIECES, **_keyed(sample), "detail": detail, "text": text}


def _keyed(sample: Sampled) -> dict[str, str]:
    return {"key": sample.key, "id": sample.id}


def merge_samples(work: Path) -> dict[tuple[str, str], list[JsonRow]]:
    """Merge the samples of all parts. Returns a list of samples for each pair of a stage and a rule."""
    chosen: dict[tuple[str, str], list[JsonRow]] = {}
    for path in sorted((work / AUDIT).glob(f"*{SAMPLES_SUFFIX}")):
        for sample in read_rows(path, frozenset({"stage", "rule", "key", "id"})):
            name = (sample.pop("stage"), sample.pop("rule"))
            candidates = [*chosen.get(name, ()), sample]
            chosen[name] = heapq.nsmallest(SAMPLES, candidates, key=lambda one: (one["key"], one["id"]))
    for sample in (one for of_rule in chosen.values() for one in of_rule):
        del sample["key"]
    return chosen
