"""The stages together: what stays is what comparing all with all would keep, on any number of workers."""

import pickle
import random
import re
import shutil
from pathlib import Path

import pytest

from crosscut.config.errors import DataError
from crosscut.corpus.documents import READ, Lineage
from crosscut.corpus.duplicates import candidates, duplicate_stages, similarity
from crosscut.corpus.duplicates.planted import exact_jaccard
from crosscut.corpus.finished import mark_finished, mark_unfinished
from tests.corpus.duplicates.corpora import VOCABULARY, corpus_config, drops, ingest, kept_by_all_pairs, made_texts
from tests.corpus.ingested import run
from tests.refusals import refusal

NEAR = {"jaccard": 0.7, "recall": 0.9999, "ngram": 2}


def deduplicate(folder: Path, parts, *, name="", workers=1, **duplicates):
    """Run all stages but the measurement on planted texts: what each counted."""
    work = ingest(folder / "work", parts, name=name)
    stages = duplicate_stages(corpus_config(folder, **{**NEAR, **duplicates}), READ)
    results = run(work, [stage for stage in stages if stage.name != "planted"], workers)
    mark_finished(work, Lineage(tuple(name for name in ("exact", "near") if name in results)))
    return results


def gone(folder: Path) -> dict[str, tuple[str, str, str]]:
    return drops(folder / "work", "exact") | drops(folder / "work", "near")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", range(2))
def test_what_stays_is_what_comparing_all_pairs_keeps(tmp_path, seed):
    texts = made_texts(random.Random(seed), families=25, copies=4)
    third = len(texts) // 3
    parts = [texts[:third], texts[third : 2 * third], texts[2 * third :]]
    deduplicate(tmp_path, parts)
    names = [f"{number}.{row}" for number, part in enumerate(parts) for row in range(len(part))]
    dropped = gone(tmp_path)
    kept = {place for place, name in enumerate(names) if name not in dropped}
    assert kept == kept_by_all_pairs(texts, 0.7, 2)
    place = {name: at for at, name in enumerate(names)}
    for name, (rule, detail, other) in dropped.items():
        one, two = texts[place[name]], texts[place[other]]
        if rule == "same text":
            assert one == two
            assert detail == ""
        else:
            assert rule == "near-duplicate"
            assert exact_jaccard(one, two, 2) >= 0.7
            assert detail == f"{exact_jaccard(one, two, 2):.2f}"
    assert len({rule for rule, _, _ in dropped.values()}) == 2


def test_many_pages_of_one_template_leave_one_without_comparing_all(tmp_path):
    chance = random.Random(0)
    words = chance.choices(VOCABULARY, k=60)
    texts = [" ".join([*words, f"page{number}"]) for number in range(150)]
    longest = chance.randrange(150)
    texts[longest] += " and some more"
    results = deduplicate(tmp_path, [texts[:70], texts[70:]])
    assert len(gone(tmp_path)) == 149
    assert (f"0.{longest}" if longest < 70 else f"1.{longest - 70}") not in gone(tmp_path)
    assert results["candidates"].counts["groups"] > 0
    assert results["similar"].counts["compared"] < 10 * 150
    assert results["clusters"].counts["sizes"] == {"150": 1}
    (largest,) = results["clusters"].counts["largest"]
    assert largest["documents"] == 150
    assert len(largest["dropped"]) == 19


def test_bytes_do_not_depend_on_workers_or_the_size_of_tasks(tmp_path, monkeypatch):
    texts = made_texts(random.Random(5), families=20, copies=4)
    results = deduplicate(tmp_path / "a", [texts[::2], texts[1::2]])
    deduplicate(tmp_path / "b", [texts[::2], texts[1::2]], workers=2)
    files = sorted(
        path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("[!.]*.*") if path.suffix != ".json"
    )
    assert len(files) > 10
    for path in files:
        assert (tmp_path / "a" / path).read_bytes() == (tmp_path / "b" / path).read_bytes(), path
    monkeypatch.setattr(candidates, "DOCUMENTS_PER_TASK", 600)
    monkeypatch.setattr(candidates, "GROUP_LIMIT", 2)
    monkeypatch.setattr("crosscut.corpus.duplicates.stages.PAIRS_PER_TASK", 64)
    monkeypatch.setattr(similarity, "CHARACTERS_AT_A_TIME", 1000)
    smaller = deduplicate(tmp_path / "c", [texts[::2], texts[1::2]])
    assert smaller["candidates"].num_tasks > results["candidates"].num_tasks
    assert smaller["similar"].num_tasks > results["similar"].num_tasks
    assert set(gone(tmp_path / "c")) == set(gone(tmp_path / "a"))


def test_counts_tell_what_went_in_and_out(tmp_path):
    texts = made_texts(random.Random(6), families=10, copies=3)
    results = deduplicate(tmp_path, [texts])
    exact, near, similar, clusters = (results[name].counts for name in ("exact", "near", "similar", "clusters"))
    assert exact["documents_in"] == len(texts)
    assert exact["documents_out"] == near["documents_in"] == results["sketches"].counts["sketches"]
    assert near["rules"]["near-duplicate"]["documents"] == near["documents_in"] - near["documents_out"]
    assert exact["bytes_in"] == sum(map(len, texts))
    assert sum(clusters["jaccard"].values()) == clusters["compared"] == similar["compared"] >= similar["similar"] > 0
    assert clusters["candidates"] == similar["candidates"]


def test_a_pair_that_several_tasks_compare_is_counted_once(tmp_path, monkeypatch):
    texts = made_texts(random.Random(6), families=10, copies=4)
    found = deduplicate(tmp_path / "a", [texts])["clusters"].counts
    monkeypatch.setattr(candidates, "DOCUMENTS_PER_TASK", len(texts) * 2)
    monkeypatch.setattr(candidates, "GROUP_LIMIT", 2)
    monkeypatch.setattr("crosscut.corpus.duplicates.stages.PAIRS_PER_TASK", 16)
    results = deduplicate(tmp_path / "b", [texts])
    again = results["clusters"].counts
    assert sum(again["jaccard"].values()) == again["compared"] < results["similar"].counts["compared"]
    assert again["compared"] <= found["compared"]
    assert again["candidates"] <= found["candidates"]


def test_finished_stages_run_again_only_for_other_settings(tmp_path):
    texts = made_texts(random.Random(7), families=6, copies=2)
    assert sum(result.num_run for result in deduplicate(tmp_path, [texts]).values()) > 0
    assert sum(result.num_run for result in deduplicate(tmp_path, [texts]).values()) == 0
    again = deduplicate(tmp_path, [texts], jaccard=0.71)
    assert again["exact"].num_run == 0
    assert again["similar"].num_run == again["similar"].num_tasks > 0


def test_lost_ngrams_are_made_again(tmp_path):
    texts = made_texts(random.Random(7), families=6, copies=2)
    deduplicate(tmp_path, [texts[:5], texts[5:]])
    dropped = gone(tmp_path)
    assert dropped
    (tmp_path / "work" / "ngrams" / "000001.arrow").unlink()
    again = deduplicate(tmp_path, [texts[:5], texts[5:]])
    assert {name: result.num_run for name, result in again.items() if result.num_run} == {"ngrams": 1}
    assert gone(tmp_path) == dropped


@pytest.mark.slow  # it compares many parts
def test_a_task_is_as_small_for_many_parts_as_for_few(tmp_path):
    texts = made_texts(random.Random(9), families=20, copies=2)
    names = {"candidates": 0, "ngrams": 2, "similar": 0}
    largest = {}
    for count in (2, 40):
        folder = tmp_path / f"{count:02}"
        deduplicate(folder, [texts[start::count] for start in range(count)])
        stages = duplicate_stages(corpus_config(folder, **NEAR), READ)
        for name, most_inputs in names.items():
            (stage,) = (one for one in stages if one.name == name)
            tasks = stage.tasks(folder / "work")
            assert all(len(task.inputs) <= most_inputs for task in tasks)  # a key is no list of all files
            largest[name, count] = max(len(pickle.dumps(task)) for task in tasks)
    assert all(largest[name, 40] <= largest[name, 2] + 8 < 1500 for name in names)


def test_another_text_or_part_is_compared_by_the_same_process(tmp_path):
    chance = random.Random(10)
    one, two, three = (" ".join(chance.choices(VOCABULARY, k=60)) for _ in range(3))
    deduplicate(tmp_path, [[one, two], [two + " more"]])
    assert set(gone(tmp_path)) == {"0.1"}
    deduplicate(tmp_path, [[one, two], [one + " more"]])
    assert set(gone(tmp_path)) == {"0.0"}
    deduplicate(tmp_path, [[one, three], [one + " more"], [three + " more"]])
    assert set(gone(tmp_path)) == {"0.0", "0.1"}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("parts", [[], [[]], [["", "", "..."]], [["one text"], []]])
def test_a_corpus_without_duplicates_or_words_passes(tmp_path, parts):
    results = deduplicate(tmp_path, parts)
    assert drops(tmp_path / "work", "near") == {}
    assert results["near"].num_tasks == len(parts)
    assert results["clusters"].counts.get("clusters", 0) == 0


def test_at_similarity_one_only_the_same_text_goes(tmp_path):
    config = corpus_config(tmp_path, jaccard=1.0)
    assert [stage.name for stage in duplicate_stages(config, READ)] == [
        "exact-keys", "exact-repeats", "exact",
    ]  # fmt: skip
    deduplicate(tmp_path, [["a b c d", "a b c d e", "a b c d"]], jaccard=1.0)
    assert drops(tmp_path / "work", "exact") == {"0.2": ("same text", "", "0.0")}


def test_what_an_earlier_run_kept_is_not_kept_again(tmp_path):
    chance = random.Random(8)
    one, two, three, four = (" ".join(chance.choices(VOCABULARY, k=60)) for _ in range(4))
    deduplicate(tmp_path / "old", [[one, two], [one + " more", four]], name="old")
    assert set(gone(tmp_path / "old")) == {"old0.0"}
    shutil.rmtree(tmp_path / "old" / "work" / "ngrams")  # an earlier run is compared by its texts
    new = [[two, one + " x y z", three], [three + " more", four + " w"]]
    results = deduplicate(tmp_path / "new", new, name="new", against=(str(tmp_path / "old"),))
    before = f"[{tmp_path / 'old'}] "
    assert drops(tmp_path / "new" / "work", "exact") == {"new0.0": ("same text", "", f"{before}old0.1")}
    near = drops(tmp_path / "new" / "work", "near")
    assert set(near) == {"new0.1", "new0.2", "new1.1"}  # longer than the earlier ones, and yet they go
    assert [near[name][2] for name in sorted(near)] == [f"{before}old1.0", "new1.0", f"{before}old1.1"]
    assert results["similar"].num_run > 0
    deduplicate(tmp_path / "old", [[one, two + " changed"], [one + " more", four]], name="old")
    deduplicate(tmp_path / "new", new, name="new", against=(str(tmp_path / "old"),))
    assert drops(tmp_path / "new" / "work", "exact") == {}  # as the earlier run no longer has that text


def test_earlier_runs_must_be_there_with_the_same_settings(tmp_path):
    deduplicate(tmp_path / "old", [["a b c d"]])

    def stages(**duplicates):
        settings = {**NEAR, "against": (str(tmp_path / "old"),), **duplicates}
        return duplicate_stages(corpus_config(tmp_path / "new", **settings), READ)

    assert len(stages()) == 10
    told = refusal(DataError, stages, ngram=3)
    assert re.search(r"this run \(ngram 3, .*\), but `.*old` has ngram 2, .*Use the `duplicates` settings", told)
    assert "must name runs whose n-grams and bands are the same" in refusal(DataError, stages, recall=0.9)
    shutil.rmtree(tmp_path / "old" / "work" / "sketches")
    assert len(stages(jaccard=1.0)) == 3
    assert "old` has none, because that run removed exact duplicates only" in refusal(DataError, stages)
    told = refusal(DataError, stages, jaccard=1.0, against=(str(tmp_path / "old"), f"{tmp_path}/old/"))
    assert re.search(r"must name each earlier run once, but names `.*old/` twice", told)
    mark_unfinished(tmp_path / "old" / "work")
    told = refusal(DataError, stages)
    assert re.search(r"of finished runs .*, but `.*old` holds no finished run.* Finish the run first", told)


def test_a_run_does_not_add_to_itself(tmp_path, monkeypatch):
    deduplicate(tmp_path / "out", [["a b c d"]])
    monkeypatch.chdir(tmp_path)
    config = corpus_config(tmp_path / "out", against=(f"../{tmp_path.name}/out",))
    assert refusal(DataError, duplicate_stages, config, READ) == (
        f"`duplicates.against` must name output folders of earlier runs, but `../{tmp_path.name}/out` is this run's "
        f"own `folder`. Choose another `folder`, or remove `../{tmp_path.name}/out` from `duplicates.against`."
    )
