"""Valid settings of a corpus, and the exact message about each invalid setting."""

import tomllib
from typing import Any

import pytest

from crosscut.config import ConfigError, CorpusConfig, dump_toml, is_corpus, load_corpus
from tests.refusals import refusal

SOURCE = {"name": "web", "files": ["web.jsonl"]}


def corpus(*sources: dict[str, Any], **sections: Any) -> CorpusConfig:
    return load_corpus({"folder": "out", "sources": list(sources) or [SOURCE], **sections})


def refused(*sources: dict[str, Any], **sections: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        corpus(*sources, **sections)
    return str(raised.value)


def test_defaults_are_the_papers():
    config = corpus()
    assert config.length.min_tokens == 128
    assert (config.duplicates.jaccard, config.leakage.ngram, config.urls.min_karma) == (0.7, 8, 3)
    assert (config.tokens.num_shards, config.tokens.train_to_validation) == (5, 29)
    assert config.language.keep == ("en",)


def test_repairs_that_change_right_text_of_some_language_are_off():
    cleaning = corpus().cleaning
    assert cleaning.repairs == ("fix_encoding", "unescape_html", "fix_line_breaks", "remove_control_chars")
    assert corpus(cleaning={"normalization": "NFC"}).cleaning.repairs == (*cleaning.repairs, "normalization")


def test_toml_gives_the_same_corpus_again():
    config = corpus(SOURCE, {**SOURCE, "name": "news", "weight": 2, "cleaners": ["join_lines"]}, seed=7)
    assert load_corpus(tomllib.loads(dump_toml(config))) == config
    assert config.sources[1].weight == 2.0


def test_keys_outside_sources_can_be_overridden():
    table = {"folder": "out", "sources": [SOURCE]}
    assert load_corpus(table, ["length.min_tokens=5", "folder=there"]).length.min_tokens == 5


def test_a_file_with_sources_is_a_corpus(tmp_path):
    path = tmp_path / "some.toml"
    path.write_text('folder = "out"\n[[sources]]\nname = "web"\nfiles = ["web.jsonl"]\n')
    assert is_corpus(path)
    path.write_text('[model]\npreset = "gpt2-small"\n')
    assert not is_corpus(path)


MESSAGES = {
    "sources = []": "`sources` must name at least one source, but is empty. Add a [[sources]] section.",
    "sources = {name = 'web', files = ['web.jsonl']}": "`sources` must be one or more sections [[sources]], but is "
    "{'name': 'web', 'files': ['web.jsonl']}.",
    "url = {}": "`url` must be a section of a corpus, but there is no such key. The nearest is `urls`.",
    "recipe = 'llama'\noutput.folder = 'x'": "The file of a corpus must not have sections of a run, but has `recipe`, "
    "`output`. Describe the corpus in a file of its own, prepare it with `crosscut prepare`, and give the run the "
    "folder with its tokens: `data.tokens`.",
    "folder = ''": "`folder` must name a folder for the corpus, but is empty.",
    "duplicates.jaccard = 0.2": "`duplicates.jaccard` must be between 0.3 and 1, but is 0.2. The paper uses 0.7.",
    "duplicates.recall = 1.0": "`duplicates.recall` must be above 0 and at most 0.9999, but is 1.0.",
    "leakage.action = 'delete'": "`leakage.action` must be 'report', 'articles', 'document' or 'passage', but is "
    "'delete'.",
    "leakage.false_positives = 0.0": "`leakage.false_positives` must be above 0 and at most 0.1, but is 0.0.",
    "cleaning.normalization = 'NFKC'": "`cleaning.normalization` must be 'none' or 'NFC', but is 'NFKC'.",
    "cleaning.uncurl_quotes = 'yes'": "`cleaning.uncurl_quotes` must be true or false, but is 'yes'.",
    "language.detector = 'fasttext'": "`language.detector` must be 'eldc' or 'langdetect', but is 'fasttext'.",
    "html.extraction = 'slow'": "`html.extraction` must be 'fast' or 'careful', but is 'slow'.",
    "engine.kind = 'slurm'": "`engine.kind` must be 'local' or 'ray', but is 'slurm'.",
    "ingest.max_rejects = 1.0": "`ingest.max_rejects` must be at least 0 and below 1, but is 1.0.",
}


for _name in ("folder", "duplicates.against", "leakage.test_sets", "tokens.tokenizer", "urls.domains", "urls.types"):
    _is_list = _name in ("duplicates.against", "leakage.test_sets", "urls.domains", "urls.types")
    MESSAGES[f"{_name} = {['s3://b/x'] if _is_list else 's3://b/x'!r}"] = (
        f"`{_name}` must be a path on this machine, but is 's3://b/x'. Only `checkpoint.folder` and the `files` of a "
        "corpus can be URLs. Name a path, such as that of a mounted store."
    )


@pytest.mark.parametrize("setting", MESSAGES)
def test_messages(setting):
    table = {"folder": "out", "sources": [SOURCE], **tomllib.loads(setting)}
    assert refusal(ConfigError, load_corpus, table) == MESSAGES[setting]


SOURCE_MESSAGES = {
    "name = 'my web'": "`sources.name` must consist of letters, digits, dots, dashes and underscores, but is 'my web'.",
    "files = []": "`sources.files` of `web` must name files or URLs, but is empty.",
    "weight = 0": "`sources.weight` must be above 0 and at most 100, but is 0.0.",
    "links = ['s3://b/x']": "`sources.links` must be a path on this machine, but is 's3://b/x'. Only "
    "`checkpoint.folder` and the `files` of a corpus can be URLs. Name a path, such as that of a mounted store.",
    "cleaners = ['join']": "`sources.cleaners` must be 'join_lines', but is 'join'.",
    "format = 'megatron'": "`tokens.tokenizer` must name the `tokenizer.json` that made the tokens of a `megatron` "
    "source, but is empty.",
    "wieght = 1": "`sources.wieght` must be a key of `sources`, but there is no such key. The nearest is "
    "`sources.weight`.",
}


@pytest.mark.parametrize("setting", SOURCE_MESSAGES)
def test_messages_of_sources(setting):
    assert refused({**SOURCE, **tomllib.loads(setting)}) == SOURCE_MESSAGES[setting]


def test_two_sources_have_two_names():
    assert refused(SOURCE, SOURCE) == (
        "`sources.name` must be unique, but several sources have the name web. Rename a source."
    )


@pytest.mark.parametrize(
    ("name", "minimum"),
    [
        ("ingest.max_document_mb", 1), ("ingest.part_mb", 1), ("length.min_tokens", 0), ("duplicates.ngram", 1),
        ("leakage.ngram", 1), ("leakage.margin", 0), ("leakage.min_matches", 1), ("leakage.max_cuts", 1),
        ("tokens.vocab_size", 257), ("tokens.num_shards", 1), ("tokens.train_to_validation", 1), ("engine.workers", 0),
        ("seed", 0),
    ],
)  # fmt: skip
def test_lower_bounds(name, minimum):
    assert (
        refusal(ConfigError, load_corpus, {"folder": "out", "sources": [SOURCE]}, [f"{name}={minimum - 1}"])
        == f"`{name}` must be at least {minimum}, but is {minimum - 1}."
    )
