"""Cleaning writes the texts that are left, says what went, and counts what each repair changed."""

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from crosscut.config.corpora import Cleaner, CleaningConfig
from crosscut.corpus.cleaning.parts import CLEANERS, clean_part, cleaning_settings
from crosscut.corpus.documents import CLEANING, Drop, Lineage, Part, read_drops, read_table, write_drops
from crosscut.corpus.execution.stages import Output

STORY = (
    "It was a dark and stormy night, and the rain fell in torrents upon the\n"
    "roofs of the old town by the sea, where nobody had yet gone to sleep in\n"
    "spite of the hour, since all of them were waiting for the same ship to\n"
    "come home.\n"
)


def clean(part: Part, **cleaners: tuple[str, ...]) -> tuple[Part, dict]:
    (part.work / CLEANING).mkdir(exist_ok=True)
    counts = clean_part(part, CleaningConfig(), cleaners, None, Output(part.work / CLEANING))
    return Part(part.work, part.name, Lineage((*part.lineage.filters, CLEANING), cleaned=True)), counts


def test_texts_are_mended_and_empty_ones_go(make_part: Callable[..., Part]) -> None:
    part = make_part(["voil\u00c3\u00a0\r\n", "plain\n", " \n\t", "\x00\ufeff", "", "caf\u00e9"])
    cleaned, counts = clean(part)
    assert [(one.row, one.text) for one in cleaned.documents()] == [
        (0, "voil\u00e0\n"),
        (1, "plain\n"),
        (5, "caf\u00e9"),
    ]
    drops = read_drops(part.work, CLEANING, part.name).to_pylist()
    assert drops == [Drop(row, "empty")._asdict() for row in (2, 3, 4)]
    assert counts == {
        "documents_in": 6,
        "documents_out": 3,
        "bytes_in": 10 + 6 + 3 + 4 + 0 + 5,
        "bytes_out": 7 + 6 + 5,
        "rules": {"empty": {"documents": 3, "bytes": 7}},
        "changed": {"unicode": 2, "join_lines": 0},
    }


def test_a_source_gets_the_cleaners_that_it_names(make_part: Callable[..., Part]) -> None:
    part = make_part([STORY, STORY], ["stories", "poems"])
    cleaned, counts = clean(part, stories=("join_lines",))
    joined, kept = (one.text for one in cleaned.documents())
    assert "upon the roofs" in joined
    assert kept == STORY
    assert counts["changed"] == {"unicode": 0, "join_lines": 1}


def test_unicode_is_left_alone_where_that_is_asked_for(make_part: Callable[..., Part], tmp_path: Path) -> None:
    part = make_part(["voil\u00c3\u00a0\r\n"])
    counts = clean_part(part, CleaningConfig.all_or_none(False), {}, None, Output(tmp_path))
    assert read_table(tmp_path / f"{part.name}.arrow")["text"].to_pylist() == ["voil\u00c3\u00a0\r\n"]
    assert counts["changed"]["unicode"] == 0


def test_each_text_keeps_its_punctuation_unless_that_is_asked_for(
    make_part: Callable[..., Part], tmp_path: Path
) -> None:
    texts = ["\u201eJa\u201c, d\u00e9j\u00e0", "\u4ed6\u8bf4\uff1a\u201c\u597d\u3002\u201d", "\u304b\u3099"]
    part = make_part(texts)
    for config, expected in (
        (CleaningConfig(), texts),
        (CleaningConfig(uncurl_quotes=True), ['"Ja", d\u00e9j\u00e0', '\u4ed6\u8bf4\uff1a"\u597d\u3002"', texts[2]]),
        (CleaningConfig(fix_character_width=True), [texts[0], "\u4ed6\u8bf4:\u201c\u597d\u3002\u201d", texts[2]]),
        (CleaningConfig(normalization="NFC"), [*texts[:2], "\u304c"]),
    ):
        clean_part(part, config, {}, None, Output(tmp_path))
        assert read_table(tmp_path / f"{part.name}.arrow")["text"].to_pylist() == expected


def test_every_setting_that_changes_a_text_counts() -> None:
    everything, nothing = CleaningConfig.all_or_none(True), CleaningConfig.all_or_none(False)
    settings = [
        cleaning_settings(everything, {}),
        cleaning_settings(nothing, {}),
        cleaning_settings(everything, {"s": ("join_lines",)}),
        cleaning_settings(CleaningConfig(), {}),
        *(cleaning_settings(replace(everything, **{key: getattr(nothing, key)}), {}) for key in everything.repairs),
    ]
    assert len({json.dumps(one, sort_keys=True) for one in settings}) == len(settings)
    assert [(one["ftfy"], bool(one["join_lines"])) for one in settings[:3]] == [
        (version("ftfy"), False),
        ("", False),
        (version("ftfy"), True),
    ]


def test_only_documents_that_are_left_are_cleaned(make_part: Callable[..., Part]) -> None:
    part = make_part(["a", "b", "c"])
    (part.work / "urls").mkdir()
    write_drops(Output(part.work / "urls"), part.name, [Drop(1, "domain")])
    cleaned, counts = clean(Part(part.work, part.name, Lineage(("urls",))))
    assert [one.row for one in cleaned.documents()] == [0, 2]
    assert (counts["documents_in"], counts["documents_out"]) == (2, 2)


def test_the_same_texts_give_the_same_bytes(make_part: Callable[..., Part], tmp_path: Path) -> None:
    part = make_part(["\u201cone\u201d", "two"])
    written = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        clean_part(part, CleaningConfig(), {}, None, Output(tmp_path / name))
        written.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert written[0] == written[1]
    assert len(written[0]) == 2


def test_every_cleaner_of_the_configuration_is_there() -> None:
    assert set(CLEANERS) == set(Cleaner)
