"""Read the files of test sets into items, which are the texts whose n-grams the corpus must not contain.

Each line of a .jsonl file is an item. Each article of a WikiText file is an item. In any other text, each passage
between blank lines is an item, or each line if there are no blank lines. N-grams ignore punctuation, so most tokens of
WikiText, such as `@-@` and `'s`, need no repair. Two tokens are treated specially: a text is split at `<unk>`, because
the words before and after `<unk>` are not consecutive, and `n't` is joined to the word before it.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from crosscut.config.checks import listed
from crosscut.config.errors import DataError
from crosscut.config.system.files import require_regular
from crosscut.data.text.lines import lines_of
from crosscut.data.text.records import RecordFile, Reject, read_json_records
from crosscut.data.text.sources import unreadable

SUFFIXES = (".jsonl", ".txt", ".raw", ".tokens")

UNKNOWN = "<unk>"
"""Placeholder for a rare word in tokenised test sets."""

_ARTICLE = re.compile(r"(?:\A|(?<=\n)) ?\n = (?!= )(.+?)(?<! =) = \n(?= ?\n)")
_BLANK_LINES = re.compile(r"\n[ \t]*\n+")


class Item(NamedTuple):
    """A text of a test set, such as a line or an article."""

    text: str
    """The whole text."""

    title: str = ""
    """Title of an article of WikiText. Empty for all other texts."""

    @property
    def segments(self) -> list[str]:
        """The text, split at each `<unk>` into segments of consecutive words."""
        return [part.replace(" n't", "n't") for part in self.text.split(UNKNOWN)]


def set_names(files: Sequence[str]) -> list[str]:
    """Name each test set by its file's name, or by the whole path if two files have the same name."""
    names = [Path(file).name for file in files]
    return [file if names.count(name) > 1 else name for file, name in zip(files, names, strict=True)]


def read_test_set(path: Path, *, text_key: str) -> list[Item]:
    """Read the items of a test set, in the order of the file.

    Raises `DataError` if the file cannot be read, is not UTF-8, has an unknown suffix or contains no text, or if a line
    of a .jsonl file has no string under `text_key`.
    """
    if path.suffix not in SUFFIXES:
        raise DataError(
            f"`leakage.test_sets` must name files that end in {listed(SUFFIXES)}, but names `{path}`. Convert or "
            "rename the file."
        )
    try:
        require_regular(path)
        if path.suffix == ".jsonl":
            items = _from_lines(path.read_bytes(), str(path), text_key)
        else:
            items = _from_text(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(str(path), error) from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"`{path}` must be UTF-8 text, but byte {error.start} is not valid UTF-8. Convert the file to UTF-8."
        ) from None
    if not items:
        raise DataError(f"`{path}` must contain texts of a test set, but contains none. Check `leakage.test_sets`.")
    return items


def _from_lines(data: bytes, name: str, text_key: str) -> list[Item]:
    file = RecordFile(name=name, size=len(data), compression="", text_key=text_key, setting="`leakage.text_key`")
    items = []
    for record in read_json_records(file, [(data, len(data))]):
        if isinstance(record, Reject):
            raise record.error
        items.append(Item(record.text))
    return items


def _from_text(text: str) -> list[Item]:
    articles = list(_ARTICLE.finditer(text))
    if articles:
        ends = [*(article.start() for article in articles[1:]), len(text)]
        return [Item(text[found.start() : end], found[1]) for found, end in zip(articles, ends, strict=True)]
    passages = _BLANK_LINES.split(text.strip())
    return [Item(item) for item in (passages if len(passages) > 1 else lines_of(text)) if item.strip()]
