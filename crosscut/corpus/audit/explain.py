"""History of one document: its source, the changes by each stage with their reasons, and the shards that hold its
tokens.

To find the document, the ids of the whole corpus are searched, but no texts are read. Then the texts of at most two
documents are read: the explained document, and the document that a stage reported as its match.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from crosscut.config.errors import DamagedDataError, DataError
from crosscut.config.system.files import require_regular
from crosscut.corpus.audit.excerpts import common_beginning, excerpts_of_pair
from crosscut.corpus.audit.lookup import (
    DocumentPlace,
    Runs,
    find_documents,
    latest_texts,
    near_ids,
    texts_cleaned,
    texts_read,
)
from crosscut.corpus.audit.rejects import explain_rejected, explain_skipped, rejected_ids
from crosscut.corpus.documents import CLEANING, DROPS_SUFFIX, INGEST, MARKS_SUFFIX, Drop, read_columns, read_table
from crosscut.corpus.json_rows import JsonRow
from crosscut.corpus.leakage.passages import pieces
from crosscut.corpus.leakage.removal import CUTS_SUFFIX, LEAKAGE, MATCHES_SUFFIX
from crosscut.corpus.origins import find_path
from crosscut.corpus.tokens.encoding import INDEX_SUFFIX, TOKENS
from crosscut.data.manifest import MANIFEST_NAME, TokenManifest
from crosscut.data.shards.writing import INDEX_DTYPE

NEAR, PACKING = "near", "packing"

SHOWN = 5
"""Maximum number of entries in each list that a history contains, such as the list of passages that the document
shares with test sets. Further entries are only counted."""

_WIDTH = 100
_LABEL = 16


def explain(runs: Runs, document_id: str) -> str:
    """Describe the history of a document of this run, as lines of text to print. The document may duplicate a document
    of an earlier run.

    Raises `DataError` if the corpus has no document with this id, and `DamagedDataError` if a file of the corpus is
    damaged or missing.
    """
    try:
        return _explained(runs, document_id)
    except (pa.ArrowException, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).partition("\n")[0]
        raise DamagedDataError(
            f"`{runs.work}` must hold the files that `crosscut prepare` wrote, but a file cannot be read: {reason}. "
            "Start `crosscut prepare` again to rewrite the damaged files."
        ) from None


def _explained(runs: Runs, document_id: str) -> str:
    work = runs.work
    place = find_documents(replace(runs, against=()), [document_id]).get(document_id)
    if place is None:
        return _without_document(work, document_id)
    story = _Story(runs, document_id, place)
    lines = [document_id, ""]
    done = [name for name in runs.lineage.filters if place.file(name, DROPS_SUFFIX).is_file()]
    for label, entry in story.entries(done):
        lines.append(f"{label:<{_LABEL}}{entry[0]}" if entry else label)
        lines += [textwrap.indent(line, " " * _LABEL) for line in entry[1:]]
    return "\n".join(lines)


class _Story:
    """History of one document through the stages, read from the files of the runs."""

    def __init__(self, runs: Runs, document_id: str, place: DocumentPlace) -> None:
        self._runs = runs
        self._work = place.work
        self._id = document_id
        self._place = place

    def entries(self, filters: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
        """Yield a label and lines of text for each step of the history, up to the stage that dropped the document."""
        yield "file", [self._path()]
        yield "read", self._origin()
        for stage in filters:
            drops = [Drop(**row) for row in self._rows(stage, DROPS_SUFFIX)]
            entry = [*self._marks(stage), *(self._mended() if stage == CLEANING else ())]
            entry += self._leaks() if stage == LEAKAGE else ()
            entry += self._short_pieces() if stage == TOKENS else ()
            for drop in drops:
                yield stage, [f"dropped: {_why(stage, drop)}", *entry, *self._match(drop.other)]
                return
            yield stage, entry or ["kept"]
        for stage, others in self._in_favour(filters):
            yield "replaces", [f"{len(others):,} dropped by {stage}:", *others[:SHOWN], *_rest(others)]
        yield "kept", self._end()

    def _rows(self, stage: str, suffix: str) -> list[JsonRow]:
        """Rows of this document in its part's file of a stage."""
        path = self._place.file(stage, suffix)
        if not path.is_file():
            return []
        table = read_table(path)
        return list(table.filter(pc.equal(table["row"], pa.scalar(self._place.row, pa.uint32()))).to_pylist())

    def _path(self) -> str:
        name, _, record = self._id.rpartition("#")
        path = find_path(self._work, name, task=self._place.part.partition("-")[0])
        return f"{path or name}, record {record}"

    def _origin(self) -> list[str]:
        table = read_columns(self._place.file(INGEST), "url", "karma", "title")
        columns = table.slice(self._place.row, 1).to_pylist()[0]
        text = texts_read([self._place])[self._place]
        facts = [f"{name} {value}" for name, value in columns.items() if value not in (None, "")]
        return [f"{len(text):,} characters; part {self._place.part}, row {self._place.row}", *facts, *_quoted("", text)]

    def _marks(self, stage: str) -> list[str]:
        marks = self._rows(stage, MARKS_SUFFIX)
        known = ({name: value for name, value in mark.items() if name != "row" and value is not None} for mark in marks)
        return [", ".join(f"{name} {_spelled(value)}" for name, value in mark.items()) for mark in known if mark]

    def _mended(self) -> list[str]:
        before = texts_read([self._place])[self._place]
        after = texts_cleaned(self._runs, [self._place]).get(self._place, before)
        if after == before:
            return []
        at = common_beginning(before, after)
        return [
            f"repaired: {len(before):,} characters before and {len(after):,} after; first difference:",
            f"before | {_spelled_out(before, at)}",
            f"after  | {_spelled_out(after, at)}",
        ]

    def _match(self, other: str) -> list[str]:
        """Describe the match of the document, if there is one, with excerpts of both texts."""
        if not other:
            return []
        work, document_id = self._runs.locate(other)
        entry = f"matched with {document_id}" + ("" if work == self._work else f" of the earlier run {work.parent}")
        place = find_documents(self._runs, [other]).get(other)
        if place is None:
            return [entry]
        texts = latest_texts(self._runs, [self._place, place])
        one, two = excerpts_of_pair(texts[self._place], texts[place])
        return [entry, *_quoted("this", one), *_quoted("other", two)]

    def _leaks(self) -> list[str]:
        matches, cuts = self._rows(LEAKAGE, MATCHES_SUFFIX), self._rows(LEAKAGE, CUTS_SUFFIX)
        entry = []
        for match in sorted(matches, key=lambda match: -match["grams"])[:SHOWN]:
            entry.append(
                f"{match['grams']:,} consecutive n-grams also occur in {match['test_set']}, item {match['item']:,}:"
            )
            entry += _quoted("", match["passage"])
        entry += _rest(matches, "shorter passages")
        if cuts:
            spans = ", ".join(f"{cut['start']:,} to {cut['end']:,}" for cut in cuts)
            entry.append(f"cut out: characters {spans}")
        return entry

    def _short_pieces(self) -> list[str]:
        """Describe the pieces that were too short to become tokens. Pieces are what remains of a document between its
        cuts.
        """
        cuts = self._rows(LEAKAGE, CUTS_SUFFIX)
        if not cuts:
            return []
        text = latest_texts(self._runs, [self._place])[self._place]
        written = {row["piece"] for row in self._rows(TOKENS, INDEX_SUFFIX)}
        left = pieces(text, [(cut["start"], cut["end"]) for cut in cuts])
        short = [piece for number, piece in enumerate(left) if number not in written]
        if not short:
            return []
        entry = f"{len(short):,} of {len(left):,} pieces between cuts were left out, because they have too few tokens:"
        return [entry, *(line for piece in short[:SHOWN] for line in _quoted("", piece)), *_rest(short)]

    def _in_favour(self, filters: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
        """Yield, for each stage, a label and the ids of the documents that the stage dropped in favour of this
        document.
        """
        for stage in filters:
            found: list[str] = []
            for path in sorted((self._work / stage).glob(f"*{DROPS_SUFFIX}")):
                table = read_table(path)
                rows = table.filter(pc.equal(table["other"], self._id))["row"]
                if len(rows):
                    part = path.name.removesuffix(DROPS_SUFFIX)
                    found += read_columns(self._work / INGEST / f"{part}.arrow", "id")["id"].take(rows).to_pylist()
            if found:
                yield stage, found

    def _end(self) -> list[str]:
        texts = self._rows(TOKENS, INDEX_SUFFIX)
        entry = [f"{sum(text['tokens'] for text in texts):,} tokens, including end-of-text tokens"] if texts else []
        if len(texts) > 1:
            entry[0] += f", in {len(texts)} pieces"
        return [*(entry or ["passed all finished stages"]), *self._shards()]

    def _shards(self) -> list[str]:
        """Positions of the document's texts in the shards. Empty if the shards are not written yet."""
        folder = self._work / PACKING
        if not (folder / MANIFEST_NAME).exists():
            return []
        manifest = TokenManifest.read(folder)
        file, _, record = self._id.rpartition("#")
        number = next((n for n, source in enumerate(manifest.sources) if source.name == file), None)
        shards = [entry.name for entry in (*manifest.train, manifest.validation)]
        entry = []
        for shard in shards if number is not None else ():
            require_regular(folder / f"{shard}.index")
            index = np.fromfile(folder / f"{shard}.index", dtype=INDEX_DTYPE)
            places = np.flatnonzero((index["source"] == number) & (index["record"] == int(record)))
            if len(places):
                entry.append(
                    f"{shard}: {'text' if len(places) == 1 else 'texts'} {', '.join(f'{at:,}' for at in places)}"
                )
        return entry or ["omitted from the shards because of the weight of its source"]


def _rest(entries: Sequence[object], what: str = "more") -> list[str]:
    """Line about the entries of a list that are not shown."""
    return [f"and {len(entries) - SHOWN:,} {what}"] if len(entries) > SHOWN else []


def _why(stage: str, drop: Drop) -> str:
    detail = f"Jaccard {drop.detail}" if stage == NEAR else drop.detail
    return f"{drop.rule}, {detail}" if detail else drop.rule


def _spelled(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _spelled_out(text: str, at: int) -> str:
    """Characters around a position, with invisible characters escaped."""
    return repr(text[max(0, at - 30) : at + 40])[1:-1]


def _quoted(name: str, text: str) -> list[str]:
    """Format a text as at most three lines that begin with `|`. `name` stands before the first line."""
    head = f"{name:<7}" if name else ""
    room = _WIDTH - _LABEL - len(head) - 2
    lines = textwrap.wrap(" ".join(text.split()), room, max_lines=3, placeholder=" ...") or [""]
    return [(head if number == 0 else " " * len(head)) + f"| {line}" for number, line in enumerate(lines)]


def _without_document(work: Path, document_id: str) -> str:
    """History of a record that did not become a document. Raises `DataError` if no record has this id."""
    label, entry, text = explain_rejected(work, document_id) or explain_skipped(work, document_id) or ("", "", "")
    if label:
        quoted = [textwrap.indent(line, " " * _LABEL) for line in _quoted("", text)] if text else []
        return "\n".join([document_id, "", f"{label:<{_LABEL}}{entry}", *quoted])
    near = [*near_ids(work, document_id), *rejected_ids(work, document_id.rpartition("#")[0])]
    hint = f" Similar ids are {', '.join(f'`{one}`' for one in near)}." if near else ""
    raise DataError(
        f"`--explain` must be the id of a document, in the form `source/file#record`, but this corpus has no document "
        f"`{document_id}`.{hint} Copy an id from the samples in `report.html`."
    )
