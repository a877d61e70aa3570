from collections.abc import Sequence

import pytest

from crosscut.planner.paper.narayanan import NARAYANAN_ROWS
from crosscut.planner.paper.runs import MEGATRON_ROWS, PAPER_SCALING
from crosscut.planner.paper.sections import Section
from crosscut.planner.paper.study import scaling_report


@pytest.fixture(scope="module")
def sections() -> Sequence[Section]:
    return scaling_report().sections


def test_the_fewest_tensor_ranks_that_fit_are_the_papers(sections: Sequence[Section]) -> None:
    table = {row[0]: row[2:] for row in sections[0].rows}
    assert table == {preset: (str(tensor), str(tensor)) for preset, tensor in PAPER_SCALING.items()}


def test_three_meanings_are_kept_apart(sections: Sequence[Section]) -> None:
    rows = next(section.rows for section in sections if section.title.startswith("Origin of 76"))
    assert [row[2] for row in rows] == ["75.6%", "77.0%", "74.0%", "69.2%"]


def test_rows_are_as_wide_as_their_header(sections: Sequence[Section]) -> None:
    assert all(len(row) == len(section.header) for section in sections for row in section.rows)


def test_the_report_tells_what_another_calibration_would_have_done(sections: Sequence[Section]) -> None:
    megatron, narayanan = (
        section.rows for section in sections if section.title.endswith("another row as the calibration")
    )
    assert [row[0] for row in megatron] == [row.name for row in MEGATRON_ROWS]
    assert [row[0] for row in narayanan] == [row.name for row in NARAYANAN_ROWS if row.pipeline == 1]
    assert narayanan[1][2] == "10 of 10"
