"""Samples and counts that each part adds to the report. The choice of samples does not depend on the parts."""

import json

import pytest

from crosscut.corpus.audit.excerpts import LENGTH, common_beginning, excerpt, excerpts_of_pair
from crosscut.corpus.audit.samples import audit_stage, length_bucket, merge_samples, sample_key, score_bucket
from crosscut.corpus.documents import Lineage, Part, read_drops
from crosscut.corpus.parts import find_parts
from tests.corpus.audit.conftest import FILTERS, Audited


def test_samples_are_those_with_the_smallest_hashes(audited: Audited):
    dropped = [
        document.id
        for part, _ in find_parts(audited.work)
        for document in Part(audited.work, part.name).documents()
        if document.row in read_drops(audited.work, "near", part.name)["row"].to_pylist()
    ]
    chosen = [one["id"] for one in merge_samples(audited.work)["near", "near-duplicate"]]
    assert chosen == sorted(dropped, key=lambda name: sample_key(1234, name))[:5]
    assert chosen != sorted(dropped, key=lambda name: sample_key(1235, name))[:5]


def test_a_mark_that_changes_is_looked_at_again(audited: Audited):
    stage = audit_stage(Lineage(FILTERS, cleaned=True), seed=1)
    names = [path.parent.name + "/" + path.name.partition(".")[2] for path in stage.tasks(audited.work)[0].inputs]
    assert {"language/marks.arrow", "length/marks.arrow", "near/drops.arrow", "cleaning/arrow"} <= set(names)


@pytest.mark.parametrize(
    ("tokens", "low"),
    [(0, "0"), (1, "1"), (2, "2"), (3, "3"), (4, "4"), (5, "4"), (6, "6"), (127, "96"), (128, "128"), (191, "128"),
     (192, "192"), (256, "256"), (10**9, str(3 << 28))],
)  # fmt: skip
def test_lengths_fall_into_two_buckets_a_doubling(tokens, low):
    assert length_bucket(tokens) == low


@pytest.mark.parametrize(
    ("score", "low"), [(0.0, "0.00"), (0.05, "0.05"), (0.15, "0.15"), (0.999, "0.95"), (1.0, "0.95")]
)
def test_scores_fall_into_twentieths(score, low):
    assert score_bucket(score) == low


def test_excerpts_begin_at_a_word_and_say_what_is_left_out():
    text = " ".join(f"word{number}" for number in range(500))
    assert excerpt("short") == "short"
    assert excerpt(text) == text[:LENGTH] + "\u2026"
    middle = excerpt(text, 2000)
    assert middle.startswith("\u2026word")
    assert text.index(middle[1:-1]) < 2000 < text.index(middle[1:-1]) + LENGTH
    assert excerpt(text, len(text) - 1).endswith("word499")
    assert excerpt("x" * 1000, 500).startswith("\u2026x")


def test_excerpts_of_a_pair_begin_alike():
    one = " ".join(map(str, range(1000)))
    other = one.replace(" 700 ", " other ")
    assert common_beginning(one, other) == one.index(" 700 ") + 1
    left, right = excerpts_of_pair(one, other)
    assert left[:40] == right[:40]
    assert "699 700 701" in left
    assert "699 other 701" in right
    assert excerpts_of_pair(one, one) == (excerpt(one), excerpt(one))


def test_samples_can_be_read_line_by_line(audited: Audited):
    for path in (audited.work / "audit").glob("*.samples.jsonl"):
        for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
            assert {"stage", "rule", "key", "id", "text"} <= json.loads(line).keys()
