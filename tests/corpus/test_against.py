"""A corpus that adds to an earlier one, from its files to its report; both have a `web/web.jsonl`, so the same ids."""

import fcntl
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from crosscut.config import CorpusConfig, DataError, load_corpus
from crosscut.corpus import cleaned_otherwise, explain_document, prepare_corpus
from crosscut.corpus.collection import reading
from crosscut.corpus.finished import mark_unfinished
from crosscut.data import read_documents

PAGE = 1500


@pytest.fixture(scope="session")
def pages() -> list[str]:
    """Pages of real speeches, each another one."""
    texts = [document.text for document in read_documents(["builtin:state-of-the-union"])]
    return [text[PAGE : 2 * PAGE].encode("ascii", "ignore").decode() for text in texts[20:40]]


def describe(folder: Path, texts: Sequence[str], *overrides: str) -> CorpusConfig:
    """A corpus of a file beside its folder `out`."""
    folder.mkdir(exist_ok=True)
    (folder / "web.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    table = {
        "folder": str(folder / "out"),
        "sources": [{"name": "web", "files": [str(folder / "web.jsonl")]}],
        "language": {"keep": []},
        "length": {"min_tokens": 20},
        "tokens": {"vocab_size": 300, "num_shards": 1},
        "engine": {"workers": 1},
    }
    return load_corpus(table, overrides)


@pytest.fixture(scope="module")
def old(pages: Sequence[str], tmp_path_factory: pytest.TempPathFactory) -> CorpusConfig:
    """The earlier corpus; it mends its second document and drops its fourth."""
    texts = [pages[0], f"{pages[1]} It wasn\u00e2\u20ac\u2122t so.", pages[2], "Far too short.", pages[3]]
    config = describe(tmp_path_factory.mktemp("old"), texts)
    prepare_corpus(config, progress=False)
    return config


def test_earlier_corpus_with_other_repairs_is_told(old, tmp_path):
    against = f"duplicates.against={[old.folder, str(tmp_path / 'nowhere')]}"
    assert list(cleaned_otherwise(describe(tmp_path / "new", [], against))) == []
    other = describe(tmp_path / "new", [], against, "cleaning.uncurl_quotes=true", "cleaning.normalization=NFC")
    (line,) = cleaned_otherwise(other)
    assert line == (
        f"`{old.folder}` in `duplicates.against` was cleaned with `cleaning.uncurl_quotes` false, "
        '`cleaning.normalization` "none", unlike this corpus. Where these settings change a text, the two '
        "corpora differ. If the texts must match, set the same values."
    )
    (line,) = cleaned_otherwise(describe(tmp_path / "new", [], against, "html.site_boilerplate=false"))
    assert "was cleaned with `html.site_boilerplate` true, unlike this corpus." in line


def test_what_an_earlier_corpus_kept_goes_and_is_shown_as_its_document(old, pages, tmp_path):
    near = pages[3].replace("the ", "these ", 2)
    texts = [pages[5], pages[6], f"{pages[1]} It wasn\u2019t so.", near, pages[7], f"{pages[7]} And more.", pages[2]]
    config = describe(tmp_path / "new", texts, f"duplicates.against={[old.folder]}")
    result = prepare_corpus(config, progress=False)
    samples = {
        sample["id"].partition("#")[2]: sample
        for entry in result.report["flow"]
        for rule in entry["rules"].values()
        for sample in rule["samples"]
    }
    assert {number: sample["other"] for number, sample in samples.items()} == {
        "3": f"[{old.folder}] web/web.jsonl#2",
        "7": f"[{old.folder}] web/web.jsonl#3",
        "4": f"[{old.folder}] web/web.jsonl#5",
        "5": "web/web.jsonl#6",
    }
    assert samples["3"]["other_text"] == samples["3"]["text"]
    assert "these " not in samples["4"]["other_text"]
    assert samples["4"]["other_text"][:40] in pages[3]
    clusters = result.report["duplicates"]["clusters"]
    heads = {document["id"]: document["text"] for cluster in clusters for document in cluster["documents"]}
    assert heads[f"[{old.folder}] web/web.jsonl#5"][:100] in pages[3]
    told = explain_document(config, "web/web.jsonl#3")
    assert f"matched with web/web.jsonl#2 of the earlier run {old.folder}" in told
    assert told.partition("this   |")[2].split()[:9] == told.partition("other  |")[2].split()[:9]
    told = explain_document(config, "web/web.jsonl#2")
    assert "replaces" not in told, "those that went for the earlier run's document of that id"
    again = prepare_corpus(config, progress=False)
    assert [stage.name for stage in again.stages if stage.num_run] == []


def test_an_earlier_corpus_that_has_not_ended_well_is_refused_before_anything_is_read(old, pages, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(old.folder, broken)
    mark_unfinished(broken / "work")
    config = describe(tmp_path / "new", pages[5:9], f"duplicates.against={[str(broken)]}")
    with pytest.raises(DataError, match=r"finished runs of `crosscut prepare`, but `.*broken` holds no finished run"):
        prepare_corpus(config, progress=False)
    assert not Path(config.folder, "work").exists()


def test_an_earlier_corpus_is_not_prepared_and_read_at_once(old, pages, tmp_path):
    config = describe(tmp_path / "new", pages[5:9], f"duplicates.against={[old.folder]}")
    with Path(old.folder, ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError) as raised:
            prepare_corpus(config, progress=False)
    assert str(raised.value) == (
        f"`duplicates.against` must name finished runs, but another process is preparing `{old.folder}`. Wait until "
        f"that process has ended, or remove `{old.folder}` from `duplicates.against`."
    )
    assert not Path(config.folder, "work").exists()
    refused = pytest.raises(DataError, match=r"one `crosscut prepare` at a time, but another process is using it")
    with reading((old.folder, str(tmp_path))), reading((old.folder,)), refused:  # `tmp_path` has no lock
        prepare_corpus(old, progress=False)
    prepare_corpus(old, progress=False)


def test_a_corpus_does_not_add_to_itself(old):
    texts = (Path(old.folder).parent / "web.jsonl").read_text().splitlines()
    own = f"{old.folder}/../out"
    config = describe(
        Path(old.folder).parent, [json.loads(text)["text"] for text in texts], f"duplicates.against={[own]}"
    )
    with pytest.raises(DataError, match=r"but `.*/out/../out` is this run's own `folder`"):
        prepare_corpus(config, progress=False)
