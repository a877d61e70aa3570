"""A small corpus of real speeches, processed by simple stages that belong to the tests.

These stages write the same files and report the same counts as the stages of the pipeline, so the audit is tested with
the files that it reads.
"""

import io
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations, islice, pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard

from crosscut.config.corpora import CorpusConfig, EngineConfig, LeakageConfig
from crosscut.corpus.audit.samples import audit_stage
from crosscut.corpus.documents import (
    TEXTS,
    Document,
    Drop,
    Judgement,
    Lineage,
    Part,
    write_drops,
    write_table,
)
from crosscut.corpus.execution.running import StageResult
from crosscut.corpus.execution.stages import CorpusStage, Counts, Output, PlannedStage, StageTask
from crosscut.corpus.filters.judging import count_drops, judge_part
from crosscut.corpus.origins import Skipped, SkippedWriter, files_name, skipped_name, write_files
from crosscut.corpus.parts import PartStage, find_parts
from crosscut.data.text.sources import BUILTIN_CORPORA
from tests.corpus.ingested import run as run_stages
from tests.corpus.ingested import source, write_documents

HOSTILE = '</script><script>document.title = "taken"</script><img src=x onerror="document.title = 1"> &amp; <!-- '
"""Text that a page must show and never run."""

FILTERS = ("urls", "cleaning", "language", "length", "near", "leakage")
LEAKED = "nothing in this sentence was ever said to any congress before"
SPANS = pa.schema([("row", pa.uint32()), ("start", pa.uint64()), ("end", pa.uint64())])
MATCHES = pa.schema(
    [*SPANS, ("test_set", pa.string()), ("item", pa.uint32()), ("grams", pa.uint32()), ("passage", pa.large_string())]
)
FOREIGN = (
    "Se\u00f1or presidente, la situaci\u00f3n de la Uni\u00f3n es buena, y as\u00ed ser\u00e1 el a\u00f1o que viene. "
    * 6
)


@cache
def texts() -> tuple[str, ...]:
    """Texts of the corpus: pieces of the first speeches, then texts that the stages must find. Always the same."""
    with BUILTIN_CORPORA["builtin:state-of-the-union"].open("rb") as packed:
        lines = io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(packed), encoding="utf-8")
        speeches = [json.loads(line)["text"] for line in islice(lines, 8)]
    pieces = [speech[start : start + 1500] for speech in speeches for start in range(0, len(speech) - 1500, 1500)]
    changed = [re.sub(r"\b(the|of)\b", "THAT", piece, count=2 * number) for number, piece in enumerate(pieces[:12], 1)]
    return (
        *pieces,
        *changed,
        f"{changed[3]} Copied once more.",
        *(f"{FOREIGN}{number}" for number in range(8)),
        "Too short.",
        HOSTILE,
        f"{HOSTILE}{pieces[20]} {HOSTILE}{pieces[21]}",
        f"It\u00e2\u20ac\u2122s said: {pieces[22]}{pieces[23]}",
        f"{pieces[24]} {LEAKED} {pieces[25]}",
    )


def read(task: str, source: str, numbers: range, per_part: int, output: Output) -> Counts:
    """Task of the stage `ingest`: write some of the texts as parts, and a record that could not be read."""
    parts = {}
    for place, start in enumerate(range(numbers.start, numbers.stop, per_part)):
        own = [texts()[number] for number in numbers if start <= number < start + per_part]
        ids = [f"{source}/some.jsonl#{number}" for number in range(start, start + len(own))]
        urls = ["http://bad.example/x" if number in (30, 41) else "" for number in range(start, start + len(own))]
        name = f"{task}-{place:04d}"
        write_documents(output.path(f"{name}.arrow"), ids, own, urls=urls, packed=True)
        parts[name] = sum(len(text.encode()) for text in own)
    reject = {
        "source": source, "name": f"{source}/some.jsonl", "file": "data/some.jsonl", "place": "line 999",
        "rule": "not JSON", "reason": "Expecting",
    }  # fmt: skip
    line = json.dumps({**reject, "excerpt": f'{{"text": "{HOSTILE}'})
    output.path(f"{task}.rejects.jsonl").write_text(f"{line}\n", encoding="utf-8")
    write_files(output.path(files_name(task)), [(f"{source}/some.jsonl", f"/data/{source}/some.jsonl")])
    with SkippedWriter(output.path(skipped_name(task))) as skipped:
        skipped.add(Skipped(f"{source}/some.jsonl", 900, "blank"))
    amounts = {"documents": len(numbers), "bytes": sum(parts.values()), "files": 1, "rejects": 1}
    return {
        "documents_in": len(numbers) + 2, "documents_out": len(numbers), "bytes_in": 77, "bytes_out": amounts["bytes"],
        "rules": {rule: {"documents": 1, "bytes": 0} for rule in ("blank", "not JSON")}, "notes": {}, "parts": parts,
        "sources": {source: amounts},
    }  # fmt: skip


def given(name: str, calls: Callable[[Path], dict[str, Callable[[Output], Counts]]]) -> PlannedStage:
    """Stage whose tasks call these functions."""

    def plan(work: Path) -> list[StageTask]:
        return [StageTask(name=task, function=call, size=1) for task, call in calls(work).items()]

    return PlannedStage(name=name, version=1, plan=plan)


def by_url() -> Callable[[Sequence[Document]], Judgement]:
    return lambda documents: Judgement([Drop(one.row, "domain", "bad.example") for one in documents if one.url])


def mend(part: Part, output: Output) -> Counts:
    documents = list(part.documents())
    mended = [one.text.replace("\u00e2\u20ac\u2122", "'") for one in documents]
    write_table(output.path(f"{part.name}.arrow"), {"row": [one.row for one in documents], "text": mended}, TEXTS)
    write_drops(output, part.name, [])
    changed = sum(text != one.text for text, one in zip(mended, documents, strict=True))
    bytes_out = sum(len(text.encode()) for text in mended)
    return {**count_drops(documents, []), "bytes_out": bytes_out, "changed": {"unicode": changed, "join_lines": 0}}


def by_language() -> Callable[[Sequence[Document]], Judgement]:
    def judge(documents: Sequence[Document]) -> Judgement:
        codes = ["es" if "\u00f1" in one.text else "en" for one in documents]
        drops = [
            Drop(one.row, "language", f"{code} 0.95")
            for one, code in zip(documents, codes, strict=True)
            if code != "en"
        ]
        return Judgement(drops, {"language": codes, "score": [0.95 if code == "es" else 0.871 for code in codes]})

    return judge


def by_length() -> Callable[[Sequence[Document]], Judgement]:
    def judge(documents: Sequence[Document]) -> Judgement:
        tokens = [len(one.text.split()) for one in documents]
        drops = [Drop(one.row, "too short", f"{n} tokens") for one, n in zip(documents, tokens, strict=True) if n < 128]
        return Judgement(drops, {"tokens": tokens})

    return judge


@cache
def jaccards(work: Path) -> tuple[tuple[str, str, float], ...]:
    """Pairs of documents with the same beginning or end, and the share of words that they have in common."""
    documents = [one for part, _ in find_parts(work, Lineage(FILTERS[:4], cleaned=True)) for one in part.documents()]
    words = {one.id: set(one.text.split()) for one in documents}
    return tuple(
        (one.id, other.id, len(words[one.id] & words[other.id]) / len(words[one.id] | words[other.id]))
        for one, other in combinations(documents, 2)
        if one.text[-20:] == other.text[-20:] or one.text[:20] == other.text[:20]
    )


def near(part: Part, work: Path, output: Output) -> Counts:
    goes = {other: (one, share) for one, other, share in reversed(jaccards(work)) if share >= 0.7}
    documents = list(part.documents())
    drops = [
        Drop(document.row, "near-duplicate", f"{goes[document.id][1]:.2f}", goes[document.id][0])
        for document in documents
        if document.id in goes
    ]
    write_drops(output, part.name, drops)
    return count_drops(documents, drops)


def clusters(work: Path, _output: Output) -> Counts:
    pairs: dict[str, int] = {}
    for _, _, share in jaccards(work):
        low = f"{int(share * 20) / 20:.2f}"
        pairs[low] = pairs.get(low, 0) + 1
    stays: dict[str, list[str]] = {}
    for one, other, share in jaccards(work):
        if share >= 0.7 and not any(one in gone for gone in stays.values()):
            stays.setdefault(one, []).append(other)
    sizes = [len(gone) + 1 for gone in stays.values()]
    largest = [{"documents": len(gone) + 1, "kept": one, "dropped": gone} for one, gone in stays.items()]
    return {
        "candidates": sum(pairs.values()),
        "compared": sum(pairs.values()),
        "jaccard": pairs,
        "clusters": len(sizes),
        "sizes": {str(size): sizes.count(size) for size in sorted(set(sizes))},
        "largest": sorted(largest, key=lambda one: (-one["documents"], one["kept"])),
    }


def leaks(part: Part, output: Output) -> Counts:
    """Cut out the sentence of the test set."""
    documents = list(part.documents())
    found = [(one, one.text.index(LEAKED)) for one in documents if LEAKED in one.text]
    write_drops(output, part.name, [])
    rows = [one.row for one, _ in found]
    spans = {"row": rows, "start": [at for _, at in found], "end": [at + len(LEAKED) for _, at in found]}
    write_table(output.path(f"{part.name}.cuts.arrow"), spans, SPANS)
    told = {"test_set": ["made"] * len(found), "item": [3] * len(found), "grams": [4] * len(found)}
    matches = {**spans, **told, "passage": [LEAKED] * len(found)}
    write_table(output.path(f"{part.name}.matches.arrow"), matches, MATCHES)
    counts = count_drops(documents, [])
    counts["bytes_out"] -= len(LEAKED) * len(found)
    return {**counts, "cut": {"documents": len(found), "places": len(found), "bytes": len(LEAKED) * len(found)}}


def overlap(_output: Output) -> Counts:
    passage = {"grams": 4, "document": f"web/some.jsonl#{len(texts()) - 1}", "item": 3, "passage": LEAKED}
    made = {"items": 5, "items_too_short": 0, "items_touched": 1, "items_half_found": 1, "grams": 20, "grams_found": 4}
    return {
        "test_sets": {
            "made": {**made, "documents_touched": 1, "passages": 1, "longest": [passage]},
            "untouched": {"items": 9, "grams": 90, "grams_found": 0, "longest": []},
        },
        "frequent": [{"gram": LEAKED, "documents": 1, "test_sets": ["made"]}],
    }


def stages(per_part: int) -> list[CorpusStage]:
    """Stages of the corpus. The results must not depend on `per_part`, the number of documents in a part."""
    middle = len(texts()) // 2

    def ingestion(_work: Path) -> dict[str, Callable[[Output], Counts]]:
        ranges = {"speeches": range(middle), "web": range(middle, len(texts()))}
        return {
            f"{number:06d}": partial(read, f"{number:06d}", source, numbers, per_part)
            for number, (source, numbers) in enumerate(ranges.items())
        }

    def judged(name: str, make: Callable[[], Any], *, cleaned: bool = True) -> PartStage:
        before = Lineage(FILTERS[: FILTERS.index(name)], cleaned)
        return PartStage(name=name, version=1, function=judge_part, arguments=(make, (), ""), lineage=before)

    return [
        given("ingest", ingestion),
        judged("urls", by_url, cleaned=False),
        PartStage(name="cleaning", version=1, function=mend, lineage=Lineage(FILTERS[:1])),
        judged("language", by_language),
        judged("length", by_length),
        given("clusters", lambda work: {"all": partial(clusters, work)}),
        given("near", lambda work: {
            part.name: partial(near, part, work) for part, _ in find_parts(work, Lineage(FILTERS[:4], cleaned=True))
        }),
        PartStage(name="leakage", version=1, function=leaks, lineage=Lineage(FILTERS[:5], cleaned=True)),
        given("overlap", lambda _work: {"all": overlap}),
        audit_stage(Lineage(FILTERS, cleaned=True), seed=1234),
    ]  # fmt: skip


@dataclass(frozen=True)
class Audited:
    """A corpus after all its stages."""

    config: CorpusConfig
    work: Path
    results: list[StageResult]


def run(folder: Path, per_part: int = 40) -> Audited:
    """Run all stages in `folder`."""
    work = folder / "work"
    config = CorpusConfig(
        folder=str(folder),
        sources=(source("speeches", "a"), source("web", "b", weight=0.5)),
        leakage=LeakageConfig(test_sets=("made.txt",)),
        engine=EngineConfig(workers=1),
    )
    results = list(run_stages(work, stages(per_part)).values())
    return Audited(config, work, results)


def check_sums(flow: Sequence[dict[str, Any]]) -> None:
    """Check the sums of the flow in every unit: the input of a stage is the output of the stage before, and the output
    is the input without the dropped and cut amounts, plus the amounts that repairs added.
    """
    for before, after in pairwise(flow):
        for unit in ("documents", "bytes", "tokens"):
            assert before["out"][unit] == after["in"][unit], (after["stage"], unit)
    for one in flow:
        rules, cut = one["rules"].values(), one.get("cut", {})
        assert one["in"]["documents"] - sum(rule["documents"] for rule in rules) == one["out"]["documents"]
        for unit, mended in (("bytes", "mended"), ("tokens", "mended_tokens")) if one["stage"] != "ingest" else ():
            gone = sum(rule.get(unit, 0) for rule in rules) + cut.get(unit, 0)
            assert one["in"][unit] - gone + one.get(mended, 0) == one["out"][unit], (one["stage"], unit)


@pytest.fixture(scope="session")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Audited:
    """The corpus, made once."""
    return run(tmp_path_factory.mktemp("corpus"))
