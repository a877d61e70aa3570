"""Cleaning and sentences by language: right text that changes, planted mojibake that is repaired, ends that are found.

`clean.py --by-language` prints the tables. A sentence counts as faulty if it holds a control character, an HTML entity
or mojibake; the others are right. Mojibake is planted by decoding the UTF-8 of a right sentence with a wrong codec.
"""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.commands import aligned
from crosscut.config.corpora import CleaningConfig
from crosscut.corpus.cleaning.paragraphs import join_lines
from crosscut.corpus.cleaning.repair import ftfy_settings, repair
from crosscut.data.text.sentences import sentence_starts
from crosscut.data.text.terminals import ends_sentence

PLANTED = ("latin-1", "cp1252", "cp1250", "cp1251", "mac-roman", "cp437")
"""Codecs with which right sentences are decoded wrongly."""

UNSPACED = ("ja", "zh")
"""Languages without a blank between two sentences."""

LINES = 3
"""Number of sentences, each on a line of its own, in a document for `join_lines`."""

_ENTITY = re.compile(r"&(?:#\d+|#[xX][0-9a-fA-F]+|[A-Za-z][A-Za-z0-9]*);")
_UTF8 = re.compile(rb"(?:[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3})+")
_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]+")
_WESTERN = ("latin-1", "cp1252", "cp1250", "cp1254")
"""Codecs with which mojibake in the sentences themselves was made."""


class Repairs(NamedTuple):
    """Counts of one language's sentences."""

    sentences: int
    right: int
    changed: int
    """Right sentences that the default steps change."""

    changed_by_ftfy: int
    """Right sentences that ftfy's own defaults change."""

    planted: int
    """Right sentences with planted mojibake."""

    differ: int
    """Planted sentences that `repair` and ftfy with the same steps repair differently."""

    restored: int
    """Planted sentences that are the right sentence after the default steps."""

    restored_by_ftfy: int
    """Planted sentences that are the right sentence after ftfy's own defaults."""


class Ends(NamedTuple):
    """Counts of the ends of one language's sentences."""

    sentences: int
    end: int
    """Sentences that end with a terminal."""

    found: int
    """Boundaries between sentences, written one after another, that are found."""

    wrong: int
    """Found boundaries that are none."""

    joined: int
    """Sentences on lines of their own that `join_lines` joins with the sentence before."""


def read_languages(folder: Path) -> dict[str, list[str]]:
    """Read the sentences of each language, by the name of the file. A file has a sentence per line."""
    files = sorted(folder.glob("*.txt"))
    return {file.stem: [line for line in file.read_bytes().decode().split("\n") if line.strip()] for file in files}


def is_faulty(sentence: str) -> bool:
    """Whether a sentence has a control character, an HTML entity or mojibake.

    Mojibake is a run of characters beyond ASCII that is UTF-8 after encoding with a wrong codec. A few right sentences
    count as faulty, such as one with a capital letter before an apostrophe in Turkish.
    """
    if any(one == "\ufeff" or unicodedata.category(one) in ("Cc", "Cs") for one in sentence if one != "\t"):
        return True
    runs = _BEYOND_ASCII.findall(sentence)
    return bool(_ENTITY.search(sentence)) or any(
        _UTF8.fullmatch(run.encode(codec, "replace")) for run in runs for codec in _WESTERN
    )


def plant(sentences: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each sentence that is not ASCII, and the sentence with mojibake. The codecs take turns."""
    for number, sentence in enumerate(one for one in sentences if not one.isascii()):
        codec = PLANTED[number % len(PLANTED)]
        yield sentence, sentence.encode("utf-8").decode(codec, errors="replace")


def measure_repairs(sentences: Sequence[str]) -> Repairs:
    """Repair right sentences, and the same sentences with planted mojibake."""
    import ftfy

    config = CleaningConfig()
    same = ftfy.TextFixerConfig(**ftfy_settings(config), explain=False)
    right = [one for one in sentences if not is_faulty(one)]
    planted = list(plant(right))
    repaired = [repair(wrong, config) for _, wrong in planted]
    return Repairs(
        sentences=len(sentences),
        right=len(right),
        changed=sum(repair(one, config) != one for one in right),
        changed_by_ftfy=sum(ftfy.fix_text(one) != one for one in right),
        planted=len(planted),
        differ=sum(ftfy.fix_text(wrong, same) != ours for (_, wrong), ours in zip(planted, repaired, strict=True)),
        restored=sum(one == ours for (one, _), ours in zip(planted, repaired, strict=True)),
        restored_by_ftfy=sum(ftfy.fix_text(wrong) == one for one, wrong in planted),
    )


def measure_steps(sentences: Sequence[str]) -> dict[str, int]:
    """Count the right sentences that each step alone changes, by the key of `[cleaning]`."""
    everything, nothing = CleaningConfig.all_or_none(True), CleaningConfig.all_or_none(False)
    right = [one for one in sentences if not is_faulty(one)]
    alone = {key: replace(nothing, **{key: getattr(everything, key)}) for key in everything.repairs}
    return {key: sum(repair(one, config) != one for one in right) for key, config in alone.items()}


def measure_ends(language: str, sentences: Sequence[str]) -> Ends:
    """Find the ends of sentences that are written one after another, and join their lines."""
    blank = "" if language in UNSPACED else " "
    pieces = [f"{one}{blank}" for one in sentences]
    true, place = set(), 0
    for piece in pieces[:-1]:
        place += len(piece)
        true.add(place)
    found = set(sentence_starts("".join(pieces)))
    documents = ["\n".join(sentences[at : at + LINES]) for at in range(0, len(sentences), LINES)]
    return Ends(
        sentences=len(sentences),
        end=sum(map(ends_sentence, sentences)),
        found=len(found & true),
        wrong=len(found - true),
        joined=sum(one.count("\n") - join_lines(one).count("\n") for one in documents),
    )


def show_languages(folder: Path) -> dict[str, dict[str, dict[str, int]]]:
    """Print the tables, and return the counts by table and language."""
    languages = read_languages(folder)
    tables = {
        "repair by language": {name: measure_repairs(sentences)._asdict() for name, sentences in languages.items()},
        "changed by one step": {name: measure_steps(sentences) for name, sentences in languages.items()},
        "ends of sentences": {name: measure_ends(name, sentences)._asdict() for name, sentences in languages.items()},
    }
    for title, table in tables.items():
        _show(title, table)
    return tables


def _show(title: str, table: dict[str, dict[str, int]]) -> None:
    names = list(next(iter(table.values()), {}))
    total = {name: sum(counts[name] for counts in table.values()) for name in names}
    rows = [[language, *counts.values()] for language, counts in (*table.items(), ("all", total))]
    print(f"\n{aligned([[title, *(name.replace('_', ' ') for name in names)], *rows])}")
