"""Folders of tiny published models, each made once."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.pretrained.models import make


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Function that returns the folder of a model of `models.FAMILIES` or `IN_THREES`. Copy the folder to change it."""

    @cache
    def folder(name: str) -> Path:
        path = tmp_path_factory.mktemp("published") / name.replace(" ", "-")
        make(path, name)
        return path

    return folder
