"""The first of all documents with the same key is kept, also across parts and shares of the keys."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosscut.corpus import occurrences
from crosscut.corpus.collection import Collection
from crosscut.corpus.documents import Document, Lineage
from crosscut.corpus.occurrences import KEYS, first_stages, match_first, text_key
from tests.corpus.duplicates.corpora import drops, ingest
from tests.corpus.ingested import run


def url_key(document: Document) -> str:
    return document.url


def first_of(key, name="same", filters=()):
    return first_stages(name, rule="same one", key=key, lineage=Lineage(filters))


@given(st.lists(st.integers(0, 5), max_size=30))
def test_repeats_are_matched_with_the_first(values):
    keys = np.zeros(len(values), KEYS)
    keys["high"], keys["low"] = [value // 2 for value in values], [value % 2 for value in values]
    repeats, firsts = match_first(np.arange(len(values), dtype=np.uint64), keys)
    expected = [(at, values.index(value)) for at, value in enumerate(values) if values.index(value) != at]
    assert list(zip(repeats.tolist(), firsts.tolist(), strict=True)) == expected


@pytest.mark.parametrize("per_task", [10**6, 7])
def test_the_first_of_each_text_stays(tmp_path, monkeypatch, per_task):
    monkeypatch.setattr(occurrences, "KEYS_PER_TASK", per_task)
    chance = random.Random(0)
    texts = [f"text {chance.randrange(25)}" for _ in range(60)]
    parts = [texts[:20], texts[20:25], texts[25:]]
    results = run(ingest(tmp_path, parts), first_of(text_key))
    assert results["same-repeats"].num_tasks == -(-60 // per_task)
    names = [f"{number}.{row}" for number, part in enumerate(parts) for row in range(len(part))]
    expected = {
        names[at]: ("same one", "", names[texts.index(text)]) for at, text in enumerate(texts) if text in texts[:at]
    }
    assert drops(tmp_path, "same") == expected
    counts = results["same"].counts
    assert counts["documents_in"] - counts["documents_out"] == len(expected)
    assert counts["rules"]["same one"]["documents"] == len(expected)


def test_documents_without_a_key_are_never_the_same(tmp_path):
    urls = [["", "http://a", ""], ["http://a", "http://b"]]
    run(ingest(tmp_path, [["x", "x", "x"], ["y", "z"]], urls), first_of(url_key, "url-duplicates"))
    assert drops(tmp_path, "url-duplicates") == {"1.0": ("same one", "", "0.1")}


def test_dropped_documents_are_no_longer_the_first(tmp_path):
    work = ingest(tmp_path, [["x", "y"], ["x", "y"]], [["http://a", "http://b"], ["http://a", "http://c"]])
    run(work, [*first_of(url_key, "urls"), *first_of(text_key, "exact", filters=("urls",))])
    assert set(drops(work, "urls")) == {"1.0"}
    assert drops(work, "exact") == {"1.1": ("same one", "", "0.1")}


def test_records_of_earlier_runs_are_read_once_for_all_tasks(tmp_path, monkeypatch):
    monkeypatch.setattr(occurrences, "KEYS_PER_TASK", 2)
    calls = []
    monkeypatch.setattr(Collection, "earlier_digests", lambda _self: calls.append(1) or [])
    results = run(ingest(tmp_path, [[f"text {number}" for number in range(8)]]), first_of(text_key))
    assert (results["same-repeats"].num_tasks, len(calls)) == (4, 1)
