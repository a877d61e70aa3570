r"""Samples of what could not be read, from the rejects files of ingestion.

A file is called as in the ids of documents, so that the samples are the same wherever its folder lies. What is no UTF-8
in names and excerpts is written out (`\udcff`), as pages and terminals take nothing else.
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


def rejected_samples(work: Path, seed: int) -> dict[str, list[dict[str, Any]]]:
    """Samples of the rejected records, by rule, chosen like samples of documents; reads the files line by line."""
    chosen: dict[str, list[tuple[str, str]]] = {}
    for line in _lines(work):
        record = json.loads(line)
        of_rule = chosen.setdefault(record["rule"], [])
        of_rule.append((sample_key(seed, f"{_name(record)}#{record['place']}"), line))
        if len(of_rule) > 4 * SAMPLES:
            chosen[record["rule"]] = heapq.nsmallest(SAMPLES, of_rule)
    return {
        rule: [_sample(json.loads(line)) for _, line in heapq.nsmallest(SAMPLES, of_rule)]
        for rule, of_rule in sorted(chosen.items())
    }


def _lines(work: Path) -> Iterator[str]:
    for path in sorted((work / INGEST).glob("*.rejects.jsonl")):
        with path.open(encoding="utf-8") as file:
            yield from file


def _name(record: Mapping[str, str]) -> str:
    """The file as document ids have it; of rejects without a `name`, its source and the last of its path."""
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
