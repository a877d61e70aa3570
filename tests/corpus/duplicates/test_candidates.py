"""Candidates: all pairs of small groups, large groups in the order in which their documents would be kept."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosscut.corpus.collection import Collection
from crosscut.corpus.documents import Part, read_table
from crosscut.corpus.duplicates import candidates
from crosscut.corpus.duplicates.candidates import (
    GROUP_LIMIT,
    CandidatePairs,
    all_pairs,
    band_keys,
    distinct,
    find_candidates,
    group,
    preference,
    shares,
    without_earlier,
)
from crosscut.corpus.duplicates.sketches import SKETCHES, SketchSettings, write_values
from crosscut.corpus.execution.stages import Output

SETTINGS = SketchSettings(5, 2, 2)


@given(st.lists(st.integers(0, 12), max_size=60))
def test_groups_hold_all_pairs_of_equal_keys(keys):
    numbers = np.arange(len(keys), dtype=np.uint64) * np.uint64(3)
    found = []
    for members, size in group(np.array(keys, np.uint64), numbers):
        assert size <= GROUP_LIMIT or len(members) == size
        found.append(all_pairs(members.reshape(-1, size)))
    pairs = distinct(found)
    expected = [(3 * i, 3 * j) for i, j in combinations(range(len(keys)), 2) if keys[i] == keys[j]]
    assert list(zip(pairs.left.tolist(), pairs.right.tolist(), strict=True)) == expected


def test_keys_are_equal_where_all_rows_are():
    values = np.array([[1, 2], [2, 1], [1, 2], [0, 0], [0, 1]], np.uint32)
    keys = band_keys(values)
    assert keys[0] == keys[2]
    assert len(set(keys.tolist())) == 4


@pytest.mark.parametrize(("documents", "bands"), [(0, 3), (10, 17), (300_000, 17), (1_200_000, 4)])
def test_shares_are_all_of_the_work_and_each_bounded(documents, bands):
    found = shares(documents, bands)
    done = [(band, share.which) for share in found for band in share.bands]
    assert sorted(done) == [(band, which) for band in range(bands) for which in range(found[0].of)]
    assert max(len(share.bands) * documents // share.of for share in found) <= candidates.DOCUMENTS_PER_TASK


def test_earlier_then_longer_then_first_documents_are_preferred():
    earlier = np.array([False, True, False, False])
    lengths = np.array([5, 1, 9, 9], np.uint64)
    assert preference(earlier, lengths, np.arange(4, dtype=np.uint64)).tolist() == [1, 2, 3, 0]


def test_pairs_of_earlier_runs_alone_are_left_out():
    collection = Collection((Part(None, "a"), Part(None, "b")), ("old",))  # type: ignore[arg-type]
    new = 1 << 32
    pairs = CandidatePairs(np.array([0, 0, new], np.uint64), np.array([1, new, new + 1], np.uint64))
    assert without_earlier(collection, pairs).right.tolist() == [new, new + 1]


@pytest.mark.parametrize("count", [1, 3])
def test_large_groups_are_written_as_they_are(tmp_path, count, monkeypatch):
    size = GROUP_LIMIT + 5
    values = np.arange((size + 2) * 4, dtype=np.uint32).reshape(-1, 4)
    values[:size, :2] = 7  # all in one group of the first band
    values[size:, 2:] = 8  # the last two in one of the second
    (tmp_path / SKETCHES).mkdir()
    lengths = np.array([*range(size), 50, 50], np.uint64)
    write_values(tmp_path / SKETCHES / "p.arrow", SETTINGS, np.arange(size + 2, dtype=np.uint32), lengths, values)
    collection = Collection((Part(tmp_path, "p"),))
    pairs, groups, members = [], [], []
    for which in range(count):
        find_candidates(collection, candidates.BandShare((0, 1), which, count), 2, "x", Output(tmp_path))
        pairs += read_table(tmp_path / "x.pairs.arrow").to_pylist()
        groups += read_table(tmp_path / "x.groups.arrow").to_pylist()
        members += read_table(tmp_path / "x.members.arrow")["number"].to_pylist()
    assert pairs == [{"left": size, "right": size + 1, "close": True}]
    assert sorted(members) == list(range(size + 2))
    assert groups == [{"members": list(range(size))[::-1]}]


@pytest.mark.parametrize("at_a_time", [1, 2, 100])
def test_pairs_with_too_few_equal_values_are_not_close(tmp_path, monkeypatch, at_a_time):
    monkeypatch.setattr(candidates, "PAIRS_AT_A_TIME", at_a_time)
    values = np.array([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 7], [8, 9, 6, 7]], np.uint32)
    (tmp_path / SKETCHES).mkdir()
    numbers = np.arange(4, dtype=np.uint32)
    write_values(tmp_path / SKETCHES / "p.arrow", SETTINGS, numbers, np.full(4, 50, np.uint64), values)
    share = candidates.BandShare((0, 1), 0, 1)
    find_candidates(Collection((Part(tmp_path, "p"),)), share, 3, "x", Output(tmp_path))
    found = {(row["left"], row["right"]): row["close"] for row in read_table(tmp_path / "x.pairs.arrow").to_pylist()}
    assert found == {(0, 1): True, (0, 2): False, (1, 2): False, (2, 3): False}
    assert read_table(tmp_path / "x.members.arrow")["number"].to_pylist() == [0, 1]


def test_a_large_group_of_earlier_documents_alone_is_left_out(tmp_path):
    size = GROUP_LIMIT + 1
    values = np.full((size, 4), 7, np.uint32)
    (tmp_path / SKETCHES).mkdir()
    rows = np.arange(size, dtype=np.uint32)
    for name in ("a", "b"):
        write_values(tmp_path / SKETCHES / f"{name}.arrow", SETTINGS, rows, np.full(size, 50, np.uint64), values)
        values = values + np.uint32(1)
    collection = Collection((Part(tmp_path, "a"), Part(tmp_path, "b")), ("old",))
    find_candidates(collection, candidates.BandShare((0, 1), 0, 1), 2, "x", Output(tmp_path))
    groups = read_table(tmp_path / "x.groups.arrow")["members"].to_pylist()
    assert [set(members) for members in groups] == [{2**32 + row for row in range(size)}] * 2
    assert read_table(tmp_path / "x.members.arrow")["number"].to_pylist() == [2**32 + row for row in range(size)]
