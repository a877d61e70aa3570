"""Samples of what could not be read, from the rejects files of ingestion."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from crosscut.corpus.audit.excerpts import LENGTH
from crosscut.corpus.audit.samples import SAMPLES, sample_key
from crosscut.corpus.documents import INGEST


def rejected_samples(work: Path, seed: int) -> dict[str, list[dict[str, Any]]]:
    """Of each rule some records, chosen as samples of documents are; the files are read line by line."""
    chosen: dict[str, list[tuple[str, str]]] = {}
    for line in _lines(work):
        record = json.loads(line)
        of_rule = chosen.setdefault(record["rule"], [])
        of_rule.append((sample_key(seed, f"{record['file']}#{record['place']}"), line))
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


def _sample(record: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"{record['file']}, {record['place']}",
        "detail": record["reason"],
        "other": "",
        "text": record["excerpt"][:LENGTH],
    }
