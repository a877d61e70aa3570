"""Report of a corpus, built from the counts of its stages and from samples of dropped and changed documents.

The content of `report.json` depends only on the sources and the settings. The report contains no times and no facts
about the machine or the folder, so an uninterrupted run, a resumed run and a run on any engine write the same report.
The file `timings.json` contains the times and the machine. A stage that did not run has no section in the report.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from crosscut.config.corpora import CorpusConfig
from crosscut.config.system.machine import available_cores
from crosscut.corpus.audit.excerpts import excerpt, excerpts_of_pair
from crosscut.corpus.audit.flow import FlowEntry, make_flow, tokens_of_byte, with_estimate
from crosscut.corpus.audit.lookup import DocumentPlace, Runs, find_documents, latest_texts
from crosscut.corpus.audit.rejects import rejected_samples, skipped_samples
from crosscut.corpus.audit.samples import CHANGED, CUT, NOTHING, SHORT_PIECES, merge_samples
from crosscut.corpus.audit.totals import cut_words, make_totals
from crosscut.corpus.documents import CLEANING, INGEST, Lineage
from crosscut.corpus.execution.running import StageResult
from crosscut.corpus.execution.stages import Counts
from crosscut.corpus.filters.links import LINK_LISTS, LINKS
from crosscut.corpus.json_rows import JsonRow
from crosscut.corpus.leakage.overlap import PAPER_OVERLAPS

FORMAT = "crosscut-corpus-report"
VERSION = 1

SHOWN_DOCUMENTS = 6
"""Maximum number of documents that the report shows for each cluster of near-duplicates."""

SHOWN_PASSAGES = 20
"""Maximum number of passages in the report. A passage is text that occurs both in the corpus and in a test set."""

PACKAGES = ("crosscut", "pyarrow", "numpy", "ftfy", "eldc", "gigatoken", "abloom", "tokenizers")
"""Packages whose versions the page shows."""

_WHERE = ("engine", "folder")
"""Settings that determine where a corpus is made. They do not affect the result."""

Report = Counts
"""Content of `report.json`."""


def build_report(results: Sequence[StageResult], config: CorpusConfig, work: Path) -> Report:
    """Build the content of `report.json` from the results of the stages and the files in the work folder.

    The report says how many documents each stage received and dropped, with samples of the dropped documents. The
    other sections are about duplicates, leakage of test data, lengths and languages of the texts, and the sources.
    """
    counts = {result.name: result.counts for result in results}
    flow = make_flow(results)
    runs = Runs(work, Lineage(cleaned=CLEANING in counts), against=config.duplicates.against)
    _add_samples(flow, counts, config, runs)
    ingest, audit = counts.get(INGEST, {}), counts.get("audit", {})
    ratio = tokens_of_byte(counts)
    damaged = [{key: one[key] for key in ("name", "place", "documents")} for one in ingest.get("damaged", [])]
    report = {
        "format": FORMAT,
        "version": VERSION,
        "summary": make_totals(flow, ingest),
        "rejects": sum(one["rejects"] for one in ingest["sources"].values()) if ingest else None,
        "damaged": damaged,
        "left_out": ingest.get("left_out", {}),
        "flow": flow,
        "links": {**counts.get(LINK_LISTS, {}), **{key: counts[LINKS][key] for key in ("joined",) if LINKS in counts}},
        "duplicates": _duplicates(counts, config, runs),
        "leakage": _leakage(counts, config),
        "lengths": _columns(audit.get("lengths", {}), ratio, "from"),
        "languages": _columns(audit.get("languages", {}), ratio, "name"),
        "scores": _columns(audit.get("scores", {}), ratio, "from"),
        "sources": _sources(counts, config, ratio),
        "written": [{"name": name, **one} for name, one in counts.get("packing", {}).get("shards", {}).items()],
        "settings": {name: value for name, value in dataclasses.asdict(config).items() if name not in _WHERE},
    }
    return {name: value for name, value in report.items() if name == "flow" or value not in ({}, [], None)}


def measure_timings(results: Sequence[StageResult], config: CorpusConfig) -> dict[str, object]:
    """Build the content of `timings.json`: the time of each stage, the machine, and the package versions.

    The entry of a stage has two times. `seconds` is the processing time of all tasks of the stage, summed over
    processes and runs. `elapsed` is the number of wall-clock seconds that the stage took in this run.
    """
    return {
        "folder": Path(config.folder).name,
        "machine": f"{available_cores()} cores, {platform.system()} {platform.machine()}, "
        f"Python {platform.python_version()}, engine {config.engine.kind}",
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "stages": [
            {
                "name": result.name,
                "bytes": result.size,
                "seconds": result.seconds,
                "elapsed": result.elapsed,
                "tasks": result.num_tasks,
                "run": result.num_run,
            }
            for result in results
        ],
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _add_samples(flow: Sequence[FlowEntry], counts: Counts, config: CorpusConfig, runs: Runs) -> None:
    """Add sampled documents to each rule of each stage in `flow`. If a sample was dropped because it matches another
    document, an excerpt of the other document is added to the sample.
    """
    samples = merge_samples(runs.work)
    dropped = [one for of_rule in samples.values() for one in of_rule if "at" in one]
    places = {one["id"]: DocumentPlace(runs.work, *one.pop("at")) for one in dropped}
    matched = [one for one in dropped if one["other"]]
    texts = _Texts(runs, [one["other"] for one in matched], [places[one["id"]] for one in matched])
    for entry in flow:
        stage = entry["stage"]
        for rule, amount in entry["rules"].items():
            amount["samples"] = [texts.beside(one, places[one["id"]]) for one in samples.get((stage, rule), [])]
        if stage == CLEANING:
            entry["changed"] = counts[stage].get("changed", {})
            entry["changed_samples"] = samples.get((stage, CHANGED), [])
        if "cut" in entry:
            texts_cut = samples.get((stage, CUT), []) + samples.get((stage, SHORT_PIECES), [])
            entry["cut"] |= {"words": cut_words(entry["cut"]), "samples": texts_cut}
        if stage == INGEST:
            _add_unread(entry["rules"], runs.work, config.seed)


def _add_unread(rules: dict[str, Counts], work: Path, seed: int) -> None:
    """Add the kind (`unreadable` or `skipped`) and the samples to each rule of the stage `ingest`."""
    for kind, found in (("skipped", skipped_samples(work, seed)), ("unreadable", rejected_samples(work, seed))):
        for rule, samples in found.items():
            if rule in rules:
                rules[rule] |= {"kind": kind, "samples": samples}


class _Texts:
    """Texts of some documents, from this run and from earlier runs."""

    def __init__(self, runs: Runs, names: Sequence[str], places: Sequence[DocumentPlace] = ()) -> None:
        self._places = find_documents(runs, names)
        self._texts = latest_texts(runs, [*self._places.values(), *places])

    def head(self, name: str) -> str:
        """Excerpt from the beginning of a document, or an empty string if the document is unknown."""
        return excerpt(self._texts[self._places[name]]) if name in self._places else ""

    def beside(self, sample: JsonRow, place: DocumentPlace) -> JsonRow:
        """Add excerpts of both texts to a sample that matches another document: its own text and the text of the match.

        Both excerpts start shortly before the first difference between the texts. A sample without a known match is
        returned unchanged.
        """
        if sample.get("other") not in self._places:
            return sample
        text, other = excerpts_of_pair(self._texts[place], self._texts[self._places[sample["other"]]])
        return {**sample, "text": text, "other_text": other}


def _columns(amounts: Counts, ratio: float | None, name: str) -> list[Counts]:
    """Convert a histogram (amounts by label) to a list, sorted by label. `name` is the key under which an entry holds
    its label: `"name"` for languages, and `"from"` for the lower bounds of buckets.
    """
    kind = str if name == "name" else float
    columns = ({name: kind(label), **with_estimate(amount, ratio)} for label, amount in amounts.items())
    return sorted(columns, key=lambda one: one[name])


def _duplicates(counts: Counts, config: CorpusConfig, runs: Runs) -> Counts:
    if "similar" not in counts and "near" not in counts:
        return {}
    found = counts.get("clusters", {})
    largest = [(one["documents"], [one["kept"], *one["dropped"]][:SHOWN_DOCUMENTS]) for one in found.get("largest", [])]
    texts = _Texts(runs, [name for _, ids in largest for name in ids])
    return {
        "jaccard": config.duplicates.jaccard,
        "recall": config.duplicates.recall,
        "ngram": config.duplicates.ngram,
        "candidates": found.get("candidates"),
        "compared": found.get("compared"),
        "pairs": [
            {"from": float(low), "to": round(float(low) + 0.05, 2), "pairs": pairs}
            for low, pairs in sorted(found.get("jaccard", {}).items())
        ],
        "sizes": _sizes({int(size): number for size, number in found.get("sizes", {}).items()}),
        "clusters": [
            {"size": size, "documents": [{"id": name, "text": texts.head(name)} for name in ids]}
            for size, ids in largest
        ],
        "planted": _planted(counts.get("planted", {}), config.duplicates.jaccard),
    }


def _sizes(sizes: Mapping[int, int]) -> list[Counts]:
    """List the number of clusters, and the number of documents removed from them, for each range of cluster sizes: 2,
    3, 4, 5 to 8, 9 to 16, and so on.
    """
    rows: list[Counts] = []
    low = high = 2
    while sizes and low <= max(sizes):
        here = {size: number for size, number in sizes.items() if low <= size <= high}
        if here:
            rows.append(
                {
                    "from": low,
                    "to": high,
                    "clusters": sum(here.values()),
                    "removed": sum((size - 1) * number for size, number in here.items()),
                }
            )
        low, high = high + 1, high + 1 if high < 4 else 2 * high
    return rows


def _planted(counts: Counts, jaccard: float) -> Counts:
    """Recall and precision of the search for duplicates, measured on planted duplicates (edited copies of documents).
    The list `tenths` has the numbers of planted and found duplicates for each range of similarity. The ranges are 0.1
    wide.
    """
    if not counts.get("planted"):
        return {}
    tenths = [
        {"from": float(low), "planted": planted, "found": counts["planted_found"].get(low, 0)}
        for low, planted in sorted(counts["planted"].items())
    ]
    above = [one for one in tenths if one["from"] >= jaccard - 1e-9]
    planted, found = (sum(one[name] for one in above) for name in ("planted", "found"))
    return {
        "sample": counts["sample"],
        "tenths": tenths,
        "from": above[0]["from"] if above else None,
        "planted": planted,
        "found": found,
        "recall": found / planted if planted else None,
        "pairs_found": counts["found"],
        "precision": counts["right"] / counts["found"] if counts["found"] else None,
    }


def _leakage(counts: Counts, config: CorpusConfig) -> Counts:
    found = counts.get("overlap", {}).get("test_sets", {})
    if not found:
        return {}
    passages = [{"set": name, **passage} for name, one in sorted(found.items()) for passage in one.get("longest", [])]
    return {
        **{name: getattr(config.leakage, name) for name in ("ngram", "action", "margin", "max_cuts", "min_matches")},
        "sets": [
            {"name": name, **{key: value for key, value in one.items() if key != "longest"}}
            for name, one in sorted(found.items())
        ],
        "passages": sorted(passages, key=lambda one: -one["grams"])[:SHOWN_PASSAGES],
        "frequent": counts["overlap"].get("frequent", []),
        "paper": PAPER_OVERLAPS,
    }


def _sources(counts: Counts, config: CorpusConfig, ratio: float | None) -> list[Counts]:
    """For each source, the amounts that were read, kept and written.

    The written amount includes end-of-text tokens, and counts a document several times if the weight of its source
    repeats the document.
    """
    read = counts.get(INGEST, {}).get("sources", {})
    kept = counts.get("audit", {}).get("sources", {})
    written = counts.get("packing", {}).get("sources", {})
    rows = []
    for source in config.sources if read and "audit" in counts else ():
        came = {unit: read.get(source.name, NOTHING)[unit] for unit in ("documents", "bytes")}
        row = {
            "name": source.name,
            "weight": source.weight,
            "read": with_estimate({**came, "tokens": 0, "uncounted": came["bytes"]}, ratio),
            "kept": with_estimate(kept.get(source.name, NOTHING), ratio),
        }
        rows.append({**row, **{split: dict(one) for split, one in sorted(written.get(source.name, {}).items())}})
    return rows
