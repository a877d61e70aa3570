"""Figures of a report, as HTML."""

import re

import pytest

from crosscut.planner.paper.sections import Report, Section, to_html


@pytest.mark.parametrize("legend", [("one",), ("one", "two"), ("one", "two", "three")])
def test_a_row_has_a_bar_for_each_entry_of_the_legend(legend: tuple[str, ...]) -> None:
    bars = [("first", (4.0, 2.0, 1.0)[: len(legend)]), ("second", (1.0, 1.0, 1.0)[: len(legend)])]
    html = to_html(Report("", "title", "", [Section("figure", "", ("name",), [("first",)], bars, legend)]))
    widths = [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', html)]
    assert len(widths) == 2 * len(legend)
    assert widths[len(legend)] == pytest.approx(widths[0] / 4)
    assert all(f"</i>{name}</span>" in html for name in legend)
