"""Items that a reader yields for a file, for the tests of all readers."""

from pathlib import Path

from crosscut.config.corpora import SourceConfig
from crosscut.corpus.readers import Item, RawText, ReaderSettings, Reject, Skip, find_reader
from crosscut.corpus.readers.files import find_source


def read(path: Path, kind: str = "auto", **options: object) -> list[Item]:
    (file,) = find_source(SourceConfig(name="source", files=(str(path),), format=kind)).files
    return list(find_reader(file.format)(file, ReaderSettings(**options)))  # type: ignore[arg-type]


def texts(items: list[Item]) -> list[str]:
    return [item.text for item in items if isinstance(item, RawText)]


def rejects(items: list[Item]) -> list[tuple[str, str]]:
    """Place and rule of each reject among the items."""
    return [(item.place, item.rule) for item in items if isinstance(item, Reject)]


def skips(items: list[Item]) -> list[str]:
    return [item.rule for item in items if isinstance(item, Skip)]
