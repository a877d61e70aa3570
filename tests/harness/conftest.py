"""Fixture with the real command, from the tests of `cli`."""

from tests.cli.conftest import crosscut

__all__ = ["crosscut"]
