"""The real command, as the tests of `cli` run it."""

from tests.cli.conftest import crosscut

__all__ = ["crosscut"]
