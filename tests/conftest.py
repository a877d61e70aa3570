"""What all tests share: the kept ranks."""

from collections.abc import Iterator

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Four processes for tests on several ranks; they start with the first job (see `tests/ranks.py`)."""
    pool = RankPool()
    yield pool
    pool.close()
