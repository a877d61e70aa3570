r"""Samples of records that could not be read, taken from the files `*.rejects.jsonl` that the stage `ingest` wrote.

The samples name files in the same way as document ids do, so the samples do not depend on where the files are. In file
names and excerpts, bytes that are not UTF-8 are escaped (`\udcff`), because pages and terminals accept only valid text.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from crosscut.corpus.audit.excerpts import LENGTH
from crosscut.corpus.audit.samples import SAMPLES, sample_key
from crosscut.corpus.documents import INGEST
from crosscut.corpus.json_rows import REJECT_KEYS, read_rows


def rejected_samples(work: Path, seed: int) -> dict[str, list[dict[str, Any]]]:
    """Choose samples of the rejected records. Returns a list of samples for each rule that rejected records.

    The choice depends only on the seed and the records (see `sample_key`). The files are read line by line, so memory
    is bounded.
    """
    chosen: dict[str, list[tuple[str, str]]] = {}
    for record in read_rejects(work):
        of_rule = chosen.setdefault(record["rule"], [])
        of_rule.append((sample_key(seed, f"{_name(record)}#{record['place']}"), json.dumps(record)))
        if len(of_rule) > 4 * SAMPLES:
            chosen[record["rule"]] = heapq.nsmallest(SAMPLES, of_rule)
    return {
        rule: [_sample(json.loads(line)) for _, line in heapq.nsmallest(SAMPLES, of_rule)]
        for rule, of_rule in sorted(chosen.items())
    }


def read_rejects(work: Path) -> Iterator[dict[str, Any]]:
    """Read the descriptions of all records that could not be read. Raises the errors of `read_rows`."""
    for path in sorted((work / INGEST).glob("*.rejects.jsonl")):
        yield from read_rows(path, REJECT_KEYS)


def _name(record: Mapping[str, str]) -> str:
    """Name of a record's file, as in document ids. If the record has no `name`, the name is the source and the last
    component of the file's path.
    """
    return _written_out(record.get("name") or f"{record['source']}/{PurePosixPath(record['file']).name}")


def _written_out(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _sample(record: Mapping[str, str]) -> dict[str, Any]:
    return {
        "id": f"{_name(record)}, {_written_out(record['place'])}",
        "detail": _written_out(record["reason"]),
        "other": "",
        "text": _written_out(record["excerpt"][:LENGTH]),
    }
