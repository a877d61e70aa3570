"""The audit of what the pipeline's own stages make of real speeches, with copies and a leak among them."""

import json
import re
from pathlib import Path

import pytest

from crosscut.config.corpora import CorpusConfig, EngineConfig, IngestConfig, LeakageConfig, SourceConfig, TokensConfig
from crosscut.corpus import explain_document, prepare_corpus
from tests.corpus.audit.conftest import HOSTILE, check_sums, texts

LEAKED = "we hold that nobody has ever said these very words to a congress of any country at all"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> CorpusConfig:
    folder = tmp_path_factory.mktemp("real")
    speeches = texts()[:40]
    copy = speeches[2].replace("the", "that", 3)
    documents = [*speeches, copy, speeches[3], f"{HOSTILE}{speeches[4]}{speeches[9]} {LEAKED}. {speeches[5]}", "Short."]
    lines = [json.dumps({"text": text}) for text in documents]
    (folder / "speeches.jsonl").write_text("\n".join([*lines, '{"text": "broken']) + "\n")
    (folder / "test.txt").write_text(f"A test says: {LEAKED}.\n")
    config = CorpusConfig(
        folder=str(folder / "corpus"),
        sources=(SourceConfig(name="speeches", files=(str(folder / "speeches.jsonl"),), weight=2.0),),
        ingest=IngestConfig(max_rejects=0.1),
        leakage=LeakageConfig(test_sets=(str(folder / "test.txt"),), margin=20),
        tokens=TokensConfig(vocab_size=300, num_shards=2),
        engine=EngineConfig(workers=1),
    )
    prepare_corpus(config, progress=False)
    return config


def test_figures_agree_from_the_files_to_the_shards(corpus):
    report = json.loads((Path(corpus.folder) / "report.json").read_text())
    flow = report["flow"]
    check_sums(flow)
    assert all(one["mended"] == 0 for one in flow if one["stage"] not in ("ingest", "cleaning"))
    assert report["rejects"] == 1
    assert report["summary"]["kept"]["documents"] == report["summary"]["read"]["documents"] - 3 == 41
    (source,) = report["sources"]
    assert source["kept"] == report["summary"]["kept"]  # without what was cut
    assert "estimated" not in source["kept"]
    written = sum(source[split]["tokens"] for split in ("train", "validation"))
    assert written == sum(one["tokens"] for one in report["written"])
    # Training documents are written twice, and each text, one of two pieces among them, has an end.
    assert source["train"]["documents"] == 2 * (41 - source["validation"]["documents"])
    once = source["train"]["tokens"] / 2 + source["validation"]["tokens"]
    assert once == report["summary"]["kept"]["tokens"] + 41 + 1


def test_the_page_is_there(corpus):
    html = (Path(corpus.folder) / "report.html").read_text()
    assert HOSTILE not in html
    assert LEAKED in html


def test_stories_end_where_documents_are(corpus):
    gone = explain_document(corpus, "speeches/speeches.jsonl#3")
    assert re.search(
        r"near +dropped: near-duplicate, Jaccard 0\.\d\d\n +matched with speeches/speeches.jsonl#41\n", gone
    )
    kept = explain_document(corpus, "speeches/speeches.jsonl#41")
    assert re.search(r"replaces +1 dropped by near:\n +speeches/speeches.jsonl#3\n", kept)
    leaked = explain_document(corpus, "speeches/speeches.jsonl#43")
    assert "consecutive n-grams also occur in test.txt, item 1:" in leaked
    assert "cut out: characters" in leaked
    (told,) = re.findall(
        r"([\d,]+) tokens, including end-of-text tokens, in 2 pieces\n +(train-\d|validation): texts", leaked
    )
    assert told
    assert "not read" in explain_document(corpus, "speeches/speeches.jsonl#45")
