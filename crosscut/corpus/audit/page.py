"""Report of a corpus as a single HTML file that contains its style, scripts and data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from crosscut.config.pages.inlined import inline_page
from crosscut.config.system.files import write_whole

PAGE = Path(__file__).parent / "page"


def write_page(report: Mapping[str, object], timings: Mapping[str, object], path: Path) -> None:
    """Write the report as an HTML page. The file is written atomically."""
    write_whole(path, make_page(report, timings))


def make_page(report: Mapping[str, object], timings: Mapping[str, object]) -> str:
    """Build the HTML page of a report."""
    return inline_page(PAGE / "report.html", {"report": report, "timings": timings})
