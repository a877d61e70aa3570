"""Keys that have moved still load, with a line that says where they are now."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from crosscut.config import ConfigError, CorpusConfig, dump_toml, load_corpus
from crosscut.config.corpora import CleaningConfig
from tests.refusals import refusal

SOURCES = [{"name": "web", "files": ["web.jsonl"]}]


def load(cleaning: Any, *overrides: str) -> tuple[CorpusConfig, list[str]]:
    told: list[str] = []
    table = {"folder": "out", "sources": SOURCES, "cleaning": cleaning}
    return load_corpus(table, overrides, tell=told.append), told


@pytest.mark.parametrize(("value", "switched"), [(True, "on"), (False, "off")])
def test_unicode_stands_for_all_repairs_or_none(value: bool, switched: str) -> None:
    config, told = load({"unicode": value})
    assert config.cleaning == CleaningConfig.all_or_none(value)
    (line,) = told
    assert line == (
        f"`cleaning.unicode` is now one key per repair. {str(value).lower()} switches `fix_encoding`, "
        "`unescape_html`, `fix_line_breaks`, `remove_control_chars`, `fix_character_width`, `fix_latin_ligatures`, "
        f"`uncurl_quotes` and `normalization` {switched}."
    )
    assert load({}, f"cleaning.unicode={str(value).lower()}") == (config, told)
    assert load_corpus(tomllib.loads(dump_toml(config))) == config


def test_file_without_the_key_says_nothing() -> None:
    config, told = load({"uncurl_quotes": True})
    assert config.cleaning == CleaningConfig(uncurl_quotes=True)
    assert told == []


def test_key_beside_it_takes_precedence() -> None:
    config, _ = load({"unicode": True, "uncurl_quotes": False})
    assert "uncurl_quotes" not in config.cleaning.repairs
    assert len(config.cleaning.repairs) == 7
    assert load({"unicode": False}, "cleaning.fix_encoding=true")[0].cleaning.repairs == ("fix_encoding",)


def test_command_line_takes_precedence_over_the_file() -> None:
    config, _ = load({"fix_encoding": True, "uncurl_quotes": True}, "cleaning.unicode=false")
    assert config.cleaning.repairs == ()
    config, _ = load({"fix_encoding": True}, "cleaning.unicode=false", "cleaning.uncurl_quotes=true")
    assert config.cleaning.repairs == ("uncurl_quotes",)


def test_value_that_is_neither_true_nor_false_is_a_mistake(tmp_path: Path) -> None:
    path = tmp_path / "corpus.toml"
    path.write_text('folder = "out"\n[[sources]]\nname = "web"\nfiles = ["web.jsonl"]\n[cleaning]\nunicode = "yes"\n')
    assert (
        refusal(ConfigError, load_corpus, path) == f"{path}:6: `cleaning.unicode` must be true or false, but is 'yes'."
    )


@pytest.mark.parametrize("section", ["all", 3, ["unicode"]])
def test_section_that_is_no_section_is_told_as_before(section: Any) -> None:
    with pytest.raises(ConfigError, match=r"^`cleaning` must be a section, but is"):
        load(section)
