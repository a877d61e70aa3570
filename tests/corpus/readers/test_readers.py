"""Readers are found by format."""

import sys

import pytest

from crosscut.config import DataError
from crosscut.config.corpora import SourceFormat
from crosscut.corpus.readers import find_reader
from crosscut.corpus.readers.files import SUFFIXES


def test_each_format_has_a_reader_and_suffixes() -> None:
    kinds = [kind for kind in SourceFormat if kind != "auto"]
    assert [find_reader(kind).__name__ for kind in kinds] == [f"read_{kind}" for kind in kinds]
    assert list(SUFFIXES) == kinds


def test_library_that_is_not_installed_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mwxml", None)
    monkeypatch.delitem(sys.modules, "crosscut.corpus.readers.wikipedia", raising=False)
    with pytest.raises(DataError) as error:
        find_reader("wikipedia")
    assert str(error.value) == (
        "Files of the format `wikipedia` need the package `mwxml`, but `mwxml` is not installed. "
        "Run `pip install 'crosscut[corpus]'`."
    )
