"""Reading test sets: files to items, the texts whose n-grams the corpus must not have.

A line of a .jsonl file is an item. WikiText's files are cut into their articles. Any other text has an item in each
passage between blank lines, or in each line where there are no blank lines. N-grams are of words without their
punctuation, so that WikiText's ` @-@ ` and ` 's` need no repair: its tokenised words are those of the text. Two things
do: what stands around an `<unk>` is not consecutive, and `do n't` is `don't`.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from crosscut.config.checks import listed
from crosscut.config.errors import DataError
from crosscut.data.lines import lines_of
from crosscut.data.sources import unreadable

SUFFIXES = (".jsonl", ".txt", ".raw", ".tokens")

UNKNOWN = "<unk>"
"""What stands for a rare word in tokenised test sets."""

_ARTICLE = re.compile(r"(?:\A|(?<=\n)) ?\n = (?!= )(.+?)(?<! =) = \n(?= ?\n)")
_BLANK_LINES = re.compile(r"\n[ \t]*\n+")


class Item(NamedTuple):
    """A text of a test set."""

    text: str
    """All of it."""

    title: str = ""
    """Of an article of WikiText; empty for what is none."""

    @property
    def segments(self) -> list[str]:
        """Its consecutive words, as texts."""
        return [part.replace(" n't", "n't") for part in self.text.split(UNKNOWN)]


def set_names(files: Sequence[str]) -> list[str]:
    """What the test sets are called: their files' names, with their folders where two have the same."""
    names = [Path(file).name for file in files]
    return [file if names.count(name) > 1 else name for file, name in zip(files, names, strict=True)]


def read_test_set(path: Path, *, text_key: str) -> list[Item]:
    """Read the items of a test set; item numbers count from 1 in their order.

    Raises `DataError` for a file that cannot be read, is not UTF-8, has another suffix or no text, and for a line of a
    .jsonl file that has no text under `text_key`.
    """
    if path.suffix not in SUFFIXES:
        raise DataError(f"`leakage.test_sets` must name files that end in {listed(SUFFIXES)}, but names `{path}`.")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise unreadable(str(path), error) from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"`{path}` must be UTF-8 text, but is not at byte {error.start}. Convert it to UTF-8 first."
        ) from None
    items = list(_from_lines(path, text, text_key)) if path.suffix == ".jsonl" else _from_text(text)
    if not items:
        raise DataError(f"`{path}` must hold texts of a test set, but holds none. Check `leakage.test_sets`.")
    return items


def _from_text(text: str) -> list[Item]:
    articles = list(_ARTICLE.finditer(text))
    if articles:
        ends = [*(article.start() for article in articles[1:]), len(text)]
        return [Item(text[found.start() : end], found[1]) for found, end in zip(articles, ends, strict=True)]
    passages = _BLANK_LINES.split(text.strip())
    return [Item(item) for item in (passages if len(passages) > 1 else lines_of(text)) if item.strip()]


def _from_lines(path: Path, text: str, text_key: str) -> Iterator[Item]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line or line.isspace():
            continue
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError):
            raise DataError(f"`{path}`, line {number}, must be valid JSON, but is not. Mend the line.") from None
        found = row.get(text_key) if isinstance(row, dict) else None
        if not isinstance(found, str):
            what = f"its keys are: {', '.join(row) or 'none'}" if isinstance(row, dict) else "is no JSON object"
            raise DataError(
                f"`{path}`, line {number}, must hold a string under `{text_key}`, but {what}. Set `leakage.text_key`."
            )
        yield Item(found)
