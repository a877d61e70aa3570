r"""Records that did not become documents: records that could not be read, and records that were skipped.

The stage `ingest` wrote both kinds to files. An unreadable record has the id `source/file#place`, such as
`mail/a.mbox#message 3`. The ids contain the same file names as document ids, so samples do not depend on where the
files are. In file names and excerpts, bytes that are not UTF-8 are escaped (`\udcff`), because pages and terminals
accept only valid text.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path

from crosscut.corpus.audit.excerpts import LENGTH
from crosscut.corpus.audit.samples import SAMPLES, sample_key
from crosscut.corpus.documents import INGEST
from crosscut.corpus.json_rows import REJECT_KEYS, JsonRow, read_rows
from crosscut.corpus.origins import Skipped, find_path, read_skipped

_SHOWN_IDS = 2

REASONS = {
    "blank": "no text is left",
    "redirect": "the page only redirects to another page",
    "no article": "the page is in a namespace for pages other than articles",
}
"""Reason to show for each rule that skips records. For a rule that is not listed here, its name is shown."""


def rejected_samples(work: Path, seed: int) -> dict[str, list[dict[str, str]]]:
    """Choose samples of the rejected records. Returns a list of samples for each rule that rejected records."""
    records = ((record["rule"], f"{_name(record)}#{record['place']}", record) for record in read_rejects(work))
    return {rule: [_sample(record) for record in chosen] for rule, chosen in _choose(records, seed).items()}


def skipped_samples(work: Path, seed: int) -> dict[str, list[dict[str, str]]]:
    """Choose samples of the skipped records. Returns a list of samples for each rule that skipped records."""
    records = ((one.rule, _id(one), one._asdict()) for one in read_skipped(work))
    return {
        rule: [
            {"id": _id(Skipped(**one)), "detail": REASONS.get(rule, rule), "other": "", "text": ""} for one in chosen
        ]
        for rule, chosen in _choose(records, seed).items()
    }


def _choose(records: Iterable[tuple[str, str, JsonRow]], seed: int) -> dict[str, list[JsonRow]]:
    """Choose records at random for each rule. `records` yields triples of a rule, an id and a record.

    The choice depends only on the seed and the records (see `sample_key`). Only a few records of each rule are held at
    a time, so memory is bounded.
    """
    chosen: dict[str, list[tuple[str, str]]] = {}
    for rule, name, record in records:
        of_rule = chosen.setdefault(rule, [])
        of_rule.append((sample_key(seed, name), json.dumps(record)))
        if len(of_rule) > 4 * SAMPLES:
            chosen[rule] = heapq.nsmallest(SAMPLES, of_rule)
    return {
        rule: [json.loads(line) for _, line in heapq.nsmallest(SAMPLES, of_rule)]
        for rule, of_rule in sorted(chosen.items())
    }


def explain_rejected(work: Path, wanted: str) -> tuple[str, str, str] | None:
    """Explain why the record with the id `wanted` could not be read. Returns a label, the reason, and an excerpt.

    The id may end with the full position of the record (`line 17`) or only with its number. Returns None if no rejected
    record has this id.
    """
    name, _, record = wanted.rpartition("#")
    for reject in read_rejects(work):
        place = reject["place"]
        if reject["name"] == name and record in (place, place.rpartition(" ")[2]):
            return "not read", f"{reject['file']}, {place}: {reject['reason']}", reject["excerpt"]
    return None


def rejected_ids(work: Path, name: str) -> list[str]:
    """Ids of the first rejected records of a file, for the message about an unknown id."""
    own = (reject for reject in read_rejects(work) if _name(reject) == name)
    return [f"{name}#{_written_out(reject['place'])}" for reject in islice(own, _SHOWN_IDS)]


def explain_skipped(work: Path, wanted: str) -> tuple[str, str, str] | None:
    """Explain why the record with the id `wanted` was skipped. Returns a label, the reason, and an empty excerpt, or
    None if no skipped record has this id.
    """
    for one in read_skipped(work):
        if _id(one) == wanted:
            path = find_path(work, one.name) or one.name
            return "skipped", f"{path}, record {one.record}: {one.rule}, {REASONS.get(one.rule, one.rule)}", ""
    return None


def read_rejects(work: Path) -> Iterator[JsonRow]:
    """Read the descriptions of all records that could not be read. Raises the errors of `read_rows`."""
    for path in sorted((work / INGEST).glob("*.rejects.jsonl")):
        yield from read_rows(path, REJECT_KEYS)


def _id(skipped: Skipped) -> str:
    return f"{skipped.name}#{skipped.record}" if skipped.record else skipped.name


def _name(record: Mapping[str, str]) -> str:
    """Name of a record's file, as in document ids."""
    return _written_out(record["name"])


def _written_out(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _sample(record: Mapping[str, str]) -> dict[str, str]:
    return {
        "id": f"{_name(record)}#{_written_out(record['place'])}",
        "detail": _written_out(record["reason"]),
        "other": "",
        "text": _written_out(record["excerpt"][:LENGTH]),
    }
