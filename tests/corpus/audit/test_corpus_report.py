"""The report: figures that add up, samples that belong to them, the same whatever the run."""

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import pytest

from crosscut.config.corpora import EngineConfig
from crosscut.corpus.audit.corpus_report import build_report, measure_timings
from crosscut.corpus.execution.running import StageResult
from tests.corpus.audit.conftest import HOSTILE, LEAKED, Audited, check_sums, run, texts


@pytest.fixture(scope="module")
def report(audited: Audited):
    return build_report(audited.results, audited.config, audited.work)


def entry(report, stage: str):
    return next(one for one in report["flow"] if one["stage"] == stage)


def result(name: str, **counts) -> StageResult:
    return StageResult(name=name, counts=counts, size=1, seconds=1.0, elapsed=1.0, num_tasks=1, num_run=1)


def test_every_document_byte_and_token_is_accounted_for(report):
    flow = report["flow"]
    assert [one["stage"] for one in flow] == ["ingest", "urls", "cleaning", "language", "length", "near", "leakage"]
    check_sums(flow)
    assert (report["summary"]["read"], report["summary"]["kept"]) == (flow[0]["out"], flow[-1]["out"])
    assert report["summary"]["read"]["documents"] == len(texts())
    assert entry(report, "cleaning")["mended"] == len("'") - len("\u00e2\u20ac\u2122".encode())


def test_tokens_are_counted_from_the_stage_on_that_counts_them(report):
    for stage in ("urls", "cleaning", "language"):
        assert entry(report, stage)["in"]["estimated"]
        assert all(rule["estimated"] for rule in entry(report, stage)["rules"].values())
    length = entry(report, "length")
    assert "estimated" not in length["in"]
    assert length["rules"]["too short"]["tokens"] == len(f"Too short. {HOSTILE}".split())
    near = entry(report, "near")
    assert near["in"]["tokens"] - near["rules"]["near-duplicate"]["tokens"] == near["out"]["tokens"]
    assert "estimated" not in near["out"]
    leakage = entry(report, "leakage")
    assert leakage["cut"]["estimated"]
    assert leakage["out"] == {
        "documents": near["out"]["documents"],
        "bytes": near["out"]["bytes"] - len(LEAKED),
        "tokens": near["out"]["tokens"] - leakage["cut"]["tokens"],
        "estimated": True,
    }


def test_what_is_left_is_counted_in_the_end(audited):
    kept = build_report(audited.results, audited.config, audited.work)["summary"]["kept"]
    counts = {"documents_in": kept["documents"], "documents_out": kept["documents"] - 1, "bytes_in": 1}
    lost = {
        "bytes_out": kept["bytes"] - 300,
        "rules": {"cut to pieces": {"documents": 1, "bytes": 999}},
        "short_pieces": 2,
    }
    tokens = result("tokens", **counts, **lost, tokens={"speeches": 5000, "web": 70}, texts=70)
    report = build_report([*audited.results, tokens], audited.config, audited.work)
    assert report["summary"]["kept"] == {
        "documents": kept["documents"] - 1,
        "bytes": kept["bytes"] - 300,
        "tokens": 5000,
    }
    check_sums(report["flow"])
    assert entry(report, "tokens")["cut"]["pieces"] == 2
    assert entry(report, "tokens")["cut"]["bytes"] == 300


def test_samples_show_what_a_rule_saw(report):
    language = entry(report, "language")["rules"]["language"]["samples"]
    assert len(language) == 5 < entry(report, "language")["rules"]["language"]["documents"]
    assert all(one["detail"] == "es 0.95" and "Uni\u00f3n" in one["text"] for one in language)
    for one in entry(report, "near")["rules"]["near-duplicate"]["samples"]:
        assert one["text"] != one["other_text"]
        assert one["text"][:10] == one["other_text"][:10]
    (changed,) = entry(report, "cleaning")["changed_samples"]
    assert "It\u00e2\u20ac\u2122s" in changed["before"]
    assert "It's" in changed["text"]
    assert "bytes" not in entry(report, "ingest")["rules"]["not JSON"], "bytes on disk are no bytes of text"
    rejected = entry(report, "ingest")["rules"]["not JSON"]["samples"]
    assert sorted(one["id"] for one in rejected) == ["speeches/some.jsonl#line 999", "web/some.jsonl#line 999"]


def test_records_that_are_not_read_have_a_kind_and_samples(report):
    rules = entry(report, "ingest")["rules"]
    assert {name: rule["kind"] for name, rule in rules.items()} == {"blank": "skipped", "not JSON": "unreadable"}
    skipped = rules["blank"]["samples"]
    assert sorted(one["id"] for one in skipped) == ["speeches/some.jsonl#900", "web/some.jsonl#900"]
    assert {one["detail"] for one in skipped} == {"no text is left"}


def test_duplicates_are_told_with_their_texts(report):
    found = report["duplicates"]
    largest = found["clusters"][0]
    assert largest["size"] == 3
    assert largest["documents"][0]["text"].startswith(texts()[3][:200])
    assert found["sizes"] == [
        {"from": 2, "to": 2, "clusters": 11, "removed": 11}, {"from": 3, "to": 3, "clusters": 1, "removed": 2},
    ]  # fmt: skip
    near = sum(one["pairs"] for one in found["pairs"] if one["from"] >= 0.7)
    assert near >= entry(report, "near")["rules"]["near-duplicate"]["documents"] == 13


def test_recall_is_that_of_the_pairs_above_the_threshold(audited):
    counts = {"planted": {"0.6": 10, "0.7": 20, "0.9": 30}, "planted_found": {"0.6": 1, "0.7": 18, "0.9": 30}}
    planted = result("planted", sample=99, **counts, found=50, right=49)
    found = build_report([*audited.results, planted], audited.config, audited.work)["duplicates"]["planted"]
    assert (found["planted"], found["found"], found["recall"], found["precision"]) == (50, 48, 0.96, 0.98)


def test_sizes_of_clusters_are_gathered(audited):
    clusters = result("clusters", sizes={"2": 5, "5": 1, "8": 2, "9": 1, "300": 1}, largest=[])
    results = [one for one in audited.results if one.name != "clusters"]
    sizes = build_report([*results, clusters], audited.config, audited.work)["duplicates"]["sizes"]
    assert [(one["from"], one["to"], one["clusters"], one["removed"]) for one in sizes] == [
        (2, 2, 5, 5), (5, 8, 3, 18), (9, 16, 1, 8), (257, 512, 1, 299),
    ]  # fmt: skip


def test_histograms_count_every_document_that_was_measured(report):
    measured = entry(report, "language")["in"]
    assert sum(one["documents"] for one in report["languages"]) == measured["documents"]
    assert [one["name"] for one in report["languages"]] == ["en", "es"]
    assert report["languages"][1]["estimated"]
    assert [one["from"] for one in report["scores"]] == [0.85, 0.95]
    assert sum(one["documents"] for one in report["lengths"]) == entry(report, "length")["in"]["documents"]
    assert sum(one["tokens"] for one in report["lengths"]) == entry(report, "length")["in"]["tokens"]


def test_leakage_is_told_by_test_set(report):
    made, untouched = report["leakage"]["sets"]
    assert (made["name"], made["grams_found"], untouched["grams_found"]) == ("made", 4, 0)
    assert report["leakage"]["passages"] == [
        {"set": "made", "grams": 4, "document": f"web/some.jsonl#{len(texts()) - 1}", "item": 3, "passage": LEAKED}
    ]


def test_sources_add_up(report):
    assert [one["name"] for one in report["sources"]] == ["speeches", "web"]
    assert [one["weight"] for one in report["sources"]] == [1.0, 0.5]
    for side in ("read", "kept"):
        assert sum(one[side]["documents"] for one in report["sources"]) == report["summary"][side]["documents"]


@pytest.mark.slow  # several whole corpora
def test_the_report_is_the_same_however_the_corpus_is_run_and_cut(audited, tmp_path, report):
    again = build_report(run(Path(audited.config.folder)).results, audited.config, audited.work)
    assert json.dumps(again) == json.dumps(report)
    other = run(tmp_path, per_part=7)
    elsewhere = replace(other.config, engine=EngineConfig(workers=2))
    assert json.dumps(build_report(other.results, elsewhere, other.work)) == json.dumps(report)


def test_a_stage_that_did_not_run_leaves_its_section_out(audited):
    for result in audited.results:
        fewer = [one for one in audited.results if one.name != result.name]
        report = build_report(fewer, audited.config, audited.work)
        assert result.name not in [one["stage"] for one in report["flow"]]
        assert ("leakage" in report) == (result.name != "overlap")
        assert ("lengths" in report) == (result.name != "audit")
    without = [one for one in audited.results if one.name != "audit"]
    assert all("tokens" not in one["in"] for one in build_report(without, audited.config, audited.work)["flow"])
    assert build_report([], audited.config, audited.work)["flow"] == []


def test_settings_are_told_but_not_where_and_on_what(report, audited):
    assert report["settings"]["seed"] == 1234
    assert "folder" not in report["settings"]
    assert "engine" not in report["settings"]
    assert str(audited.work) not in json.dumps(report)


def test_timings_name_stages_and_machine(audited):
    timings = measure_timings(audited.results, audited.config)
    assert [one["name"] for one in timings["stages"]] == [one.name for one in audited.results]
    assert all(one.keys() == {"name", "bytes", "seconds", "elapsed", "tasks", "run"} for one in timings["stages"])
    assert "Python 3" in timings["machine"]
    assert dataclasses.asdict(audited.results[0])["seconds"] == timings["stages"][0]["seconds"]
