"""The stage `leakage`: find the n-grams of test sets in each document, and cut passages or drop documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from crosscut.config.corpora import LeakageConfig
from crosscut.corpus.documents import Document, Drop, Part, count_bytes, read_table, write_drops, write_rows
from crosscut.corpus.execution.stages import Counts, Output
from crosscut.corpus.filters.judging import count_drops
from crosscut.corpus.leakage.grams import Grams, Numbers, open_grams
from crosscut.corpus.leakage.passages import Passage, Shared, Span, each_gram, passages, pieces, search, spans_to_cut
from crosscut.corpus.words.ngrams import words

LEAKAGE = "leakage"
"""Name of the stage that this module implements."""

ARTICLE_SHARE = 0.5
"""A document that contains at least this share of an article's n-grams counts as this article, even under another
title."""

CUTS = pa.schema([("row", pa.uint32()), ("start", pa.uint64()), ("end", pa.uint64())])
"""Columns of the file with the spans to cut: the document's row, and the start and the exclusive end in characters of
its text. Spans of a document are ascending and do not touch."""

HITS = pa.schema([("gram", pa.uint32()), ("documents", pa.uint32()), ("left", pa.uint32())])
"""Columns of the file with the n-grams found in a part: `gram` is the index of an n-gram in `Grams`, `documents` is the
number of documents of the part that contain the n-gram, and `left` is the number of those that are neither dropped nor
cut. The pieces of a cut document contain no n-gram of a test set."""

MATCHES = pa.schema(
    [
        ("row", pa.uint32()),
        ("id", pa.string()),
        ("test_set", pa.string()),
        ("item", pa.uint32()),
        ("grams", pa.uint32()),
        ("start", pa.uint64()),
        ("end", pa.uint64()),
        ("passage", pa.large_string()),
    ]
)
"""Columns of the file with the passages that documents share with test sets. `item` is the number of the text in its
test set, from 1, and `grams` is the number of n-grams in the passage."""


CUTS_SUFFIX, HITS_SUFFIX, MATCHES_SUFFIX = ".cuts.arrow", ".hits.arrow", ".matches.arrow"
"""Suffixes of a part's files with the columns `CUTS`, `HITS` and `MATCHES`."""


def files_of_cuts(part: Part) -> list[Path]:
    """List the file with the spans that the stage `leakage` cuts from a part, if this stage is in the lineage."""
    return [part.file(LEAKAGE, CUTS_SUFFIX)] if LEAKAGE in part.lineage.filters else []


def read_cuts(part: Part) -> dict[int, list[Span]]:
    """Read the spans that the stage `leakage` cuts from the documents of a part. Returns a list of spans for each row.
    The result is empty if this stage is not in the lineage.
    """
    cuts: dict[int, list[Span]] = {}
    for table in map(read_table, files_of_cuts(part)):
        for row, start, end in zip(*(table[name].to_pylist() for name in CUTS.names), strict=True):
            cuts.setdefault(row, []).append((start, end))
    return cuts


@dataclass
class _Removal:
    """Findings and decisions about the documents of a part."""

    config: LeakageConfig
    grams: Grams
    drops: list[Drop] = field(default_factory=list)
    cuts: list[tuple[int, int, int]] = field(default_factory=list)
    matches: list[tuple[object, ...]] = field(default_factory=list)
    """Rows of `MATCHES`."""

    found: list[Numbers] = field(default_factory=list)
    """The n-grams that each document shares with test sets."""

    left: list[Numbers] = field(default_factory=list)
    """The elements of `found` for the documents that are neither dropped nor cut."""

    cut_documents: int = 0
    cut_bytes: int = 0

    def treat(self, document: Document, shared: Shared, article: int | None) -> None:
        """Record the n-grams that a document shares with test sets, and decide whether to cut or drop the document."""
        distinct = np.unique(shared.numbers)
        found = list(passages(shared, self.grams))
        self.found.append(distinct)
        for passage in found:
            test_set, item = self.grams.set_names[passage.test_set], int(self.grams.numbers[passage.item])
            text = document.text[slice(*passage.span)]
            self.matches.append((document.row, document.id, test_set, item, passage.num_grams, *passage.span, text))
        action = self.config.action
        drop = None if action == "report" else self._article(document.row, article, distinct)
        if drop is None and action in ("document", "passage") and len(distinct) >= self.config.min_matches:
            cuts = spans_to_cut(document.text, shared, margin=self.config.margin)
            if action == "document" or len(cuts) > self.config.max_cuts:
                drop = self._leak(document.row, len(distinct), len(cuts), found)
            else:
                self._cut(document, cuts)
        elif drop is None:
            self.left.append(distinct)
        if drop is not None:
            self.drops.append(drop)

    def _cut(self, document: Document, cuts: Sequence[Span]) -> None:
        self.cuts += [(document.row, *cut) for cut in cuts]
        self.cut_documents += 1
        self.cut_bytes += document.num_bytes - sum(map(count_bytes, pieces(document.text, cuts)))

    def _leak(self, row: int, num_grams: int, num_cuts: int, found: Sequence[Passage]) -> Drop:
        """Make the `Drop` for a document that shares too much with test sets. The drop names the test set with the most
        shared n-grams.
        """
        by_set = np.zeros(len(self.grams.set_names), dtype=np.int64)
        for passage in found:
            by_set[passage.test_set] += passage.num_grams
        detail = f"{num_grams} {self.config.ngram}-gram{'' if num_grams == 1 else 's'}"
        if self.config.action == "passage":
            detail = f"{detail} in {num_cuts} places"
        return Drop(row, "leakage", detail, self.grams.set_names[int(by_set.argmax())])

    def _article(self, row: int, titled: int | None, distinct: Numbers) -> Drop | None:
        """Make the `Drop` for a document that has the title of a test-set article, or enough of the article's n-grams.
        Returns None for any other document.
        """
        grams, item, detail = self.grams, titled, "by its title"
        if item is None:
            items, counts = np.unique(grams.items_of(distinct)[1], return_counts=True)
            shares = [
                (count / int(grams.sizes[item]), item)
                for item, count in zip(items.tolist(), counts.tolist(), strict=True)
                if grams.titles[item]
            ]
            share, item = max(shares, default=(0.0, None))
            if share < ARTICLE_SHARE:
                return None
            detail = f"{share:.0%} of its n-grams"
        assert item is not None
        test_set = grams.set_names[int(grams.set_of_item[item])]
        return Drop(row, "test article", f"{grams.titles[item]}: {detail}", test_set)

    def write(self, part: str, output: Output) -> None:
        """Write the files of a part."""
        write_drops(output, part, self.drops)
        write_rows(output.path(f"{part}{CUTS_SUFFIX}"), self.cuts, CUTS)
        write_rows(output.path(f"{part}{MATCHES_SUFFIX}"), self.matches, MATCHES, packed=True)
        found, left = (np.concatenate([np.empty(0, dtype=np.int64), *some]) for some in (self.found, self.left))
        numbers, documents = np.unique(found, return_counts=True)
        left = np.bincount(np.searchsorted(numbers, left), minlength=len(numbers))
        hits = list(zip(numbers.tolist(), documents.tolist(), left.tolist(), strict=True))
        write_rows(output.path(f"{part}{HITS_SUFFIX}"), hits, HITS)


def remove_leaks(part: Part, folder: Path, config: LeakageConfig, output: Output) -> Counts:
    """Run a task: find the text that the documents of a part share with test sets, and decide what to cut or drop.

    `folder` contains the n-grams of the test sets. The task writes dropped documents to `PART.drops.arrow`, spans to
    cut to `PART.cuts.arrow`, n-grams to `PART.hits.arrow`, and passages to `PART.matches.arrow`.
    """
    documents = list(part.documents())
    grams = open_grams(folder, config.ngram)
    found = search([document.text for document in documents], grams)
    outcome = _Removal(config, grams)
    titles = {_spoken(title): item for item, title in reversed(list(enumerate(grams.titles))) if _spoken(title)}
    for document, shared in zip(documents, found.documents, strict=True):
        article = titles.get(_spoken(document.title))
        if len(shared.numbers) or article is not None:
            outcome.treat(document, shared, article)
    outcome.write(part.name, output)
    counts = count_drops(documents, outcome.drops)
    counts["bytes_out"] -= outcome.cut_bytes
    rows = {drop.row for drop in outcome.drops}
    dropped = sum(map(len, each_gram([one.text for one in documents if one.row in rows], config.ngram)))
    return {
        **counts,
        "cut": {"documents": outcome.cut_documents, "places": len(outcome.cuts), "bytes": outcome.cut_bytes},
        "grams_asked": found.asked,
        "grams_kept": found.asked - dropped,
        "false_positives": found.by_chance,
    }


def _spoken(title: str) -> str:
    return " ".join(words(title))
