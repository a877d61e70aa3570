"""One report, as Markdown and as HTML."""

import re
from collections.abc import Iterator

import pytest

from crosscut.planner.paper.sections import Report, Section, to_html, to_markdown
from crosscut.planner.paper.study import scaling_report


def cells(html: str) -> Iterator[str]:
    return (match[1] for match in re.finditer(r"<td>(.*?)</td>", html))


def test_both_forms_hold_the_same_figures_and_load_nothing() -> None:
    report = scaling_report()
    html, markdown = to_html(report), to_markdown(report)
    for cell in cells(html):
        assert f"| {cell} |" in markdown
    assert max(map(len, (line for line in markdown.splitlines() if not line.startswith("|")))) <= 120
    assert not re.search(r"(src|href)\s*=|https?://|@import|url\(", html)


@pytest.mark.parametrize("legend", [("one",), ("one", "two"), ("one", "two", "three")])
def test_a_row_has_a_bar_for_each_entry_of_the_legend(legend: tuple[str, ...]) -> None:
    bars = [("first", (4.0, 2.0, 1.0)[: len(legend)]), ("second", (1.0, 1.0, 1.0)[: len(legend)])]
    html = to_html(Report("", "title", "", [Section("figure", "", ("name",), [("first",)], bars, legend)]))
    widths = [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', html)]
    assert len(widths) == 2 * len(legend)
    assert widths[len(legend)] == pytest.approx(widths[0] / 4)
    assert all(f"</i>{name}</span>" in html for name in legend)
