"""Readers are found by format."""

import sys
from importlib.abc import MetaPathFinder

import pytest

from crosscut.config import DataError
from crosscut.config.corpora import SourceFormat
from crosscut.config.system.extras import install_command
from crosscut.corpus.readers import find_reader
from crosscut.corpus.readers.files import SUFFIXES
from tests.refusals import refusal


def test_each_format_has_a_reader_and_suffixes() -> None:
    kinds = [kind for kind in SourceFormat if kind != "auto"]
    assert [find_reader(kind).__name__ for kind in kinds] == [f"read_{kind}" for kind in kinds]
    assert list(SUFFIXES) == kinds


class Uninstalled(MetaPathFinder):
    """The import system of an environment without resiliparse."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == "resiliparse":
            raise ModuleNotFoundError("No module named 'resiliparse'", name="resiliparse")


def test_library_that_is_not_installed_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "resiliparse"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Uninstalled(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "crosscut.corpus.readers.html", raising=False)
    assert refusal(DataError, find_reader, "html") == (
        "Files of the format `html` need the package `resiliparse`, but `resiliparse` is not installed. "
        f"Run `{install_command('corpus')}`."
    )
