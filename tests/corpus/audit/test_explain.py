"""The story of one document, whatever became of it."""

import re
from pathlib import Path

from crosscut.config.errors import DataError
from crosscut.corpus.audit.explain import explain
from crosscut.corpus.audit.lookup import Runs, find_documents, latest_texts
from crosscut.corpus.collection import earlier_id
from crosscut.corpus.documents import Drop, Lineage, write_drops
from crosscut.corpus.execution.stages import Output
from crosscut.corpus.finished import mark_finished, mark_unfinished
from tests.corpus.audit.conftest import FILTERS, FOREIGN, HOSTILE, LEAKED, Audited, texts
from tests.corpus.ingested import write_documents
from tests.refusals import refusal

MIDDLE = len(texts()) // 2


def id_of(number: int) -> str:
    return f"{'speeches' if number < MIDDLE else 'web'}/some.jsonl#{number}"


def number_of(beginning: str) -> int:
    return next(number for number, text in enumerate(texts()) if text.startswith(beginning))


def story_of(audited: Audited, document_id: str) -> str:
    return explain(Runs(audited.work, Lineage(FILTERS, cleaned=True)), document_id)


def told(audited: Audited, number: int) -> dict[str, str]:
    """The story by its labels."""
    first, blank, *lines = story_of(audited, id_of(number)).split("\n")
    assert (first, blank) == (id_of(number), "")
    story: dict[str, str] = {}
    label = ""
    for line in lines:
        label = line[:16].strip() or label
        story[label] = f"{story.get(label, '')}{line[16:]}\n"
    return story


def test_a_document_that_stays_passes_every_stage(audited):
    story = told(audited, 12)
    assert list(story) == ["file", "read", *FILTERS, "kept"]
    assert story["file"] == "/data/speeches/some.jsonl, record 12\n"
    assert re.match(r"1,500 characters; part 000000-0000, row 12\n\| ", story["read"])
    assert story["language"] == "language en, score 0.871\n"
    assert story["length"] == f"tokens {len(texts()[12].split())}\n"
    assert story["near"] == "kept\n"


def test_a_document_that_goes_says_why_and_no_more(audited):
    story = told(audited, number_of(FOREIGN))
    assert list(story) == ["file", "read", "urls", "cleaning", "language"]
    assert story["language"].startswith("dropped: language, es 0.95\n")
    assert told(audited, 30)["urls"] == "dropped: domain, bad.example\n"
    assert told(audited, number_of(HOSTILE))["length"].startswith("dropped: too short, 9 tokens\n")


def test_a_duplicate_is_told_beside_what_it_is_like(audited):
    copy = len(texts()) - 14
    assert texts()[copy].endswith("Copied once more.")
    story = told(audited, copy)["near"]
    assert re.match(rf"dropped: near-duplicate, Jaccard 0\.\d\d\nmatched with {id_of(3)}\nthis   \| ", story)
    assert "THAT" in story
    assert "other  | " in story
    assert told(audited, 3)["replaces"] == f"2 dropped by near:\n{id_of(copy - 9)}\n{id_of(copy)}\n"


def test_a_repair_is_shown_where_it_begins(audited):
    story = told(audited, number_of("It\u00e2"))["cleaning"]
    assert "before | It\u00e2\u20ac\u2122s said" in story
    assert "after  | It's said" in story


def test_leaks_and_cuts_are_shown(audited):
    number = len(texts()) - 1
    at = texts()[number].index(LEAKED)
    assert told(audited, number)["leakage"] == (
        "4 consecutive n-grams also occur in made, item 3:\n"
        f"| {LEAKED}\n"
        f"cut out: characters {at:,} to {at + len(LEAKED):,}\n"
    )


def matched(folder: Path, number: int, other: str) -> str:
    """Says that a document of a corpus goes for another, as the stage `near` does; how this is told."""
    (folder / "near").mkdir(exist_ok=True)
    write_drops(Output(folder / "near"), "000000-0000", [Drop(number, "near-duplicate", "0.80", other)])
    return explain(Runs(folder, Lineage(("near",)), (str(folder.parent.parent / "old"),)), id_of(number))


def test_a_duplicate_of_an_earlier_run_is_found_there_alone(tmp_path):
    """The ids of both runs are the same, but not the documents."""
    for run_name, texts_of_run in (("old", ["old mill", "old well"]), ("new", ["new mill", "new well"])):
        ids = [id_of(number) for number in range(2)]
        (tmp_path / run_name / "work" / "ingest").mkdir(parents=True)
        write_documents(tmp_path / run_name / "work" / "ingest" / "000000-0000.arrow", ids, texts_of_run)
    old, new = tmp_path / "old", tmp_path / "new" / "work"
    told_of_old = matched(new, 0, earlier_id(str(old), id_of(1)))
    assert f"matched with {id_of(1)} of the earlier run {old}\n" in told_of_old
    assert "other  | old well" in told_of_old
    told_of_new = matched(new, 0, id_of(1))
    assert f"matched with {id_of(1)}\n" in told_of_new
    assert "other  | new well" in told_of_new
    gone = matched(new, 0, earlier_id(str(old), id_of(7)))
    assert gone.endswith(f"matched with {id_of(7)} of the earlier run {old}")
    assert "replaces" not in explain(Runs(new, Lineage(("near",))), id_of(1))


def test_texts_are_those_of_the_stages_that_the_run_has(audited):
    """A folder `cleaning` that a run without that stage finds there is of another run."""
    number = number_of("It\u00e2")
    here = find_documents(Runs(audited.work, Lineage(cleaned=True)), [id_of(number)])
    (place,) = here.values()
    assert latest_texts(Runs(audited.work, Lineage(cleaned=True)), [place])[place].startswith("It's said")
    assert latest_texts(Runs(audited.work, Lineage(cleaned=False)), [place])[place].startswith("It\u00e2")
    earlier = Runs(audited.work.parent / "other", Lineage(cleaned=True), against=(audited.config.folder,))
    found = find_documents(earlier, [earlier_id(audited.config.folder, id_of(number))])
    assert list(found.values()) == [place]
    mark_finished(audited.work, Lineage(FILTERS, cleaned=True))
    assert latest_texts(earlier, [place])[place].startswith("It's said")
    mark_finished(audited.work, Lineage(FILTERS))
    assert latest_texts(earlier, [place])[place].startswith("It\u00e2")
    mark_unfinished(audited.work)


def test_a_record_that_could_not_be_read_is_explained(audited):
    for place in ("999", "line 999"):  # the id of a document would be, and the id of its sample
        assert "not read        data/some.jsonl, line 999: Expecting" in story_of(audited, f"web/some.jsonl#{place}")
    for other in ("web/e.jsonl#999", "web/jsonl#999", "web/data/some.jsonl#999", "web#999", "#999"):
        # A reject of a file whose name ends alike does not count.
        assert f"but this corpus has no document `{other}`" in refusal(DataError, story_of, audited, other)


def test_a_skipped_record_is_explained(audited):
    story = story_of(audited, "web/some.jsonl#900")
    assert story == "web/some.jsonl#900\n\nskipped         /data/web/some.jsonl, record 900: blank, no text is left"


def test_an_unknown_id_is_refused_with_near_ones(audited):
    last = len(texts()) - 1
    assert refusal(DataError, story_of, audited, "web/some.jsonl#998").startswith(
        "`--explain` must be the id of a document, in the form `source/file#record`, but this corpus has no document "
        f"`web/some.jsonl#998`. Similar ids are `{id_of(last)}`, `{id_of(last - 1)}`"
    )
    assert "Similar ids are `speeches/some.jsonl#1" in refusal(DataError, story_of, audited, "speches/some.jsonl#1")
