"""The report of published scaling. The whole report takes seconds; `make check` computes it for the documentation.

The tests that run in `make test` compute the sections that they look at. `test_narayanan.py` and `test_runs.py` hold
the figures of the other sections.
"""

import re
from collections.abc import Iterator, Sequence
from html import unescape
from pathlib import Path

import pytest
from click.testing import CliRunner

from crosscut.cli.main import commands
from crosscut.planner.paper import study
from crosscut.planner.paper.narayanan import NARAYANAN_ROWS
from crosscut.planner.paper.runs import MEGATRON_ROWS, PAPER_SCALING
from crosscut.planner.paper.sections import Report, Section, to_html, to_markdown
from crosscut.planner.paper.study import scaling_report

PAGE = Path(__file__).parents[3] / "docs" / "scaling.md"


@pytest.fixture(scope="module")
def sections() -> Sequence[Section]:
    """All sections of the report."""
    return scaling_report().sections


@pytest.fixture(scope="module")
def short() -> Report:
    """The report with two sections that are quick to compute."""
    return Report(study._MARK, study._TITLE, study._WORDS, (study._models(), study._three_meanings()))


def test_the_fewest_tensor_ranks_that_fit_are_the_papers(short: Report) -> None:
    table = {row[0]: row[2:] for row in short.sections[0].rows}
    assert table == {preset: (str(tensor), str(tensor)) for preset, tensor in PAPER_SCALING.items()}


def test_three_meanings_are_kept_apart(short: Report) -> None:
    rows = next(section.rows for section in short.sections if section.title.startswith("Origin of 76"))
    assert [row[2] for row in rows] == ["75.6%", "77.0%", "74.0%", "69.2%"]
    assert [row[4] for row in rows] == ["+6.3 points", "+2.0 points", "+4.0 points", "+11.5 points"]


@pytest.mark.slow  # all sections
def test_rows_are_as_wide_as_their_header(sections: Sequence[Section]) -> None:
    assert all(len(row) == len(section.header) for section in sections for row in section.rows)


@pytest.mark.slow  # all sections
def test_the_report_tells_what_another_calibration_would_have_done(sections: Sequence[Section]) -> None:
    megatron, narayanan = (
        section.rows for section in sections if section.title.endswith("another row as the calibration")
    )
    assert [row[0] for row in megatron] == [row.name for row in MEGATRON_ROWS]
    assert [row[0] for row in narayanan] == [row.name for row in NARAYANAN_ROWS if row.pipeline == 1]
    assert narayanan[1][2] == "10 of 10"


def write_report(folder: Path) -> str:
    """Run the command. Returns the Markdown file."""
    done = CliRunner().invoke(commands, ("study", "scaling", "--output", str(folder)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "<html" in (folder / "scaling.html").read_text()
    assert done.stdout.endswith(f"\n{folder / 'scaling.md'}\n{folder / 'scaling.html'}\n")
    assert re.search(r"\n megatron-8.3b +8.31 +8 +8 ", done.stdout)
    return (folder / "scaling.md").read_text()


def test_the_command_writes_the_report(short: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "scaling_report", lambda: short)
    assert write_report(tmp_path) == to_markdown(short)


@pytest.mark.slow  # `make check` compares the page of the documentation with the report
def test_the_command_writes_the_page_of_the_documentation(tmp_path: Path) -> None:
    assert write_report(tmp_path) == PAGE.read_text()
    assert "<svg" in (tmp_path / "scaling.html").read_text()


def cells(html: str) -> Iterator[str]:
    return (unescape(match[1]) for match in re.finditer(r"<td>(.*?)</td>", html))


@pytest.mark.parametrize("is_whole", [pytest.param(True, marks=pytest.mark.slow), False])
def test_both_forms_hold_the_same_figures_and_load_nothing(short: Report, is_whole: bool) -> None:
    report = scaling_report() if is_whole else short
    html, markdown = to_html(report), to_markdown(report)
    for cell in cells(html):
        assert f"| {cell} |" in markdown
    assert max(map(len, (line for line in markdown.splitlines() if not line.startswith("|")))) <= 120
    assert not re.search(r"(src|href)\s*=|https?://|@import|url\(", html)
