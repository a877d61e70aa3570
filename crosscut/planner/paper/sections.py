"""Render a report of tables and bars as Markdown for the repository and as self-contained HTML."""

from base64 import b64encode
from collections.abc import Sequence
from html import escape
from textwrap import fill
from typing import NamedTuple

from crosscut.config.system.wording import markdown_table
from crosscut.planner.paper.figures import page_style

_COLUMNS = 120
_COLORS = ("var(--c4)", "var(--c0)", "var(--c2)")
_LEFT, _WIDTH, _RIGHT = 190, 720, 70
_BAR = 10


class Section(NamedTuple):
    """Section of a report: a title, a text, optional bars, and a table."""

    title: str
    words: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    bars: Sequence[tuple[str, tuple[float, ...]]] = ()
    """Name and figures of each row of bars. A row has one figure for each entry of `legend`, at most three."""
    legend: tuple[str, ...] = ("published", "ours")
    unit: str = ""
    """Unit of the bars, for the caption of the drawing. Markdown has no bars."""


class Picture(NamedTuple):
    """Picture of a report."""

    file: str
    """Name of the file, which lies beside the report."""
    alt: str
    """Description of the picture in words."""
    png: bytes


class Report(NamedTuple):
    """Report of a study: a title, an introduction and sections."""

    mark: str
    """Comment at the top of the Markdown file: the command that writes the file."""
    title: str
    words: str
    sections: Sequence[Section]
    picture: Picture | None = None
    """Picture below the introduction."""


def percent(share: float) -> str:
    """Share in percent with one decimal, for a table cell."""
    return f"{100 * share:.1f}%"


def points(share: float) -> str:
    """Difference of two shares in percentage points with one decimal, for a table cell."""
    return f"{round(100 * share, 1) + 0.0:+.1f} points"


def percent_more(share: float) -> str:
    """Relative difference in whole percent, for a table cell."""
    return f"{100 * share:+.0f}%"


def to_markdown(report: Report) -> str:
    """Report as Markdown, in lines of 120 columns."""
    parts = [f"<!-- {report.mark} -->\n\n# {report.title}\n\n{fill(report.words, _COLUMNS)}\n"]
    if report.picture is not None:
        parts.append(f"![{report.picture.alt}]({report.picture.file})\n")
    for section in report.sections:
        lines = markdown_table(section.header, section.rows)
        parts.append("\n".join([f"## {section.title}\n", f"{fill(section.words, _COLUMNS)}\n", *lines, ""]))
    return "\n".join(parts)


def to_html(report: Report) -> str:
    """Report as one HTML page, which also draws the bars of each section."""
    body = "\n".join(_section(section) for section in report.sections)
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{report.title}</title>\n'
        f"<style>{page_style()}</style>\n"
        f"<header><h1>{report.title}</h1><p>{escape(report.words.replace('`', ''))}</p></header>\n"
        f'<main class="report">\n{_drawn(report.picture)}{body}\n</main>\n</html>\n'
    )


def _drawn(picture: Picture | None) -> str:
    """Return a picture as a part of the page. Empty for None."""
    if picture is None:
        return ""
    data = b64encode(picture.png).decode()
    return f'<img alt="{escape(picture.alt)}" src="data:image/png;base64,{data}" style="max-width:100%">\n'


def _section(section: Section) -> str:
    rows = "\n".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in section.rows)
    header = "".join(f"<th>{escape(name)}</th>" for name in section.header)
    return (
        f"<section><h2>{escape(section.title)}</h2><p>{escape(section.words.replace('`', ''))}</p>{_bars(section)}"
        f"<table><thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table></section>"
    )


def _bars(section: Section) -> str:
    """Return a drawing with one bar for each figure of a row, in the order of the legend, and the legend below. Empty
    if the section has no bars.
    """
    if not section.bars:
        return ""
    height = _BAR * (len(section.legend) + 1)
    scale = (_WIDTH - _LEFT - _RIGHT) / max(max(figures) for _, figures in section.bars)
    drawn = []
    for index, (name, figures) in enumerate(section.bars):
        y = index * height + 4
        drawn.append(f'<text x="0" y="{y + height / 2 - 1:g}">{escape(name)}</text>')
        for place, figure in enumerate(figures):
            size = f'width="{figure * scale:.1f}" height="{_BAR - 1}"'
            drawn.append(f'<rect x="{_LEFT}" y="{y + place * _BAR}" {size} fill="{_COLORS[place]}"/>')
    keys = "".join(
        f'<span><i style="background:{color}"></i>{escape(name)}</span>'
        for name, color in zip(section.legend, _COLORS, strict=False)
    )
    view = f'viewBox="0 0 {_WIDTH} {len(section.bars) * height + 4}"'
    drawing = f'<svg {view} role="img" aria-label="{escape(section.title)}">{"".join(drawn)}</svg>'
    unit = f"<span>{escape(section.unit)}</span>" if section.unit else ""
    return f'{drawing}<div class="legend">{unit}{keys}</div>'
