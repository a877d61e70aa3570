"""The table of docs/sharding.md is what a rank is measured to hold."""

from pathlib import Path

import pytest

from tests.training.held import table

PAGE = Path(__file__).parents[2] / "docs" / "sharding.md"


@pytest.mark.slow
def test_page_holds_the_measured_bytes(ranks):
    assert table(ranks) in PAGE.read_text(encoding="utf-8"), "run `python docs/sharding.py`"
