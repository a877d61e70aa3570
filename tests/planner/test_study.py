import re
from collections.abc import Iterator

import pytest

from crosscut.planner.published import MEGATRON_ROWS, PAPER_SCALING
from crosscut.planner.study import Section, scaling_study, to_html, to_markdown


@pytest.fixture(scope="module")
def sections() -> list[Section]:
    return scaling_study()


def test_the_fewest_tensor_ranks_that_fit_are_the_papers(sections: list[Section]) -> None:
    table = {row[0]: row[2:] for row in sections[0].rows}
    assert table == {preset: (str(tensor), str(tensor)) for preset, tensor in PAPER_SCALING.items()}


def test_three_meanings_are_kept_apart(sections: list[Section]) -> None:
    rows = next(section.rows for section in sections if section.title.startswith("What 76"))
    assert [row[2] for row in rows] == ["75.6%", "77.0%", "74.0%", "69.2%"]


def test_rows_are_as_wide_as_their_header(sections: list[Section]) -> None:
    assert all(len(row) == len(section.header) for section in sections for row in section.rows)


def test_the_report_tells_what_another_calibration_would_have_done(sections: list[Section]) -> None:
    assert [row[0] for row in sections[-1].rows] == [row.name for row in MEGATRON_ROWS]


def cells(html: str) -> Iterator[str]:
    return (match[1] for match in re.finditer(r"<td>(.*?)</td>", html))


def test_both_reports_hold_the_same_figures_and_load_nothing(sections: list[Section]) -> None:
    html, markdown = to_html(sections), to_markdown(sections)
    for cell in cells(html):
        assert f"| {cell} |" in markdown
    assert max(map(len, (line for line in markdown.splitlines() if not line.startswith("|")))) <= 120
    assert not re.search(r"(src|href)\s*=|https?://|@import|url\(", html)
