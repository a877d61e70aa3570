"""Console of the rich library that is safe for text of others, and cuts no name in a file or a pipe. Tables and panels
of this console.
"""

from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.panel import Panel
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from crosscut.config.errors import OutputClosed
from crosscut.config.system.terminal import printable

_WIDEST = 10_000
"""Maximum number of columns of a table that does not go to a terminal."""

_FRAME = 8
"""Number of columns of a panel's border and padding."""


class PrintableConsole(Console):
    """Console that replaces control characters on a terminal. Without an edge, tables do not wrap."""

    has_edge = True
    """Whether lines must not be longer than the width of the console."""

    def on_broken_pipe(self) -> None:
        """Raise `OutputClosed`, because the text goes to a pipe whose reader has gone."""
        self.quiet = True
        raise OutputClosed("The reader of the output has gone.") from None

    def render_str(self, text: str, **options: Any) -> Text:  # cells of tables, before their width is measured
        """Return a string as text that can be rendered."""
        return super().render_str(printable(text) if self.is_terminal else text, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print the objects. Without an edge, no line is cropped."""
        super().print(*objects, **({"crop": self.has_edge} | options))

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of an object. Without an edge, an outer object gets the columns that it needs."""
        options = options or self.options
        if not self.has_edge and options.max_width == self.width:
            options = options.update(width=max(self.width, self._needed(renderable, options)))
        for segment in super().render(renderable, options):
            is_safe = segment.control or not self.is_terminal
            yield segment if is_safe else segment._replace(text=printable(segment.text))

    def _needed(self, renderable: Any, options: ConsoleOptions) -> int:
        """Number of columns without which a table would wrap, or a word would be cut."""
        wide = options.update(max_width=_WIDEST)
        if isinstance(renderable, Table):
            return Measurement.get(self, wide, renderable).maximum
        if isinstance(renderable, Panel):
            return Measurement.get(self, wide, renderable.renderable).minimum + _FRAME
        return Measurement.get(self, wide, renderable).minimum if isinstance(renderable, Text) else 0


def right(*names: str) -> list[Column]:
    """Columns of figures, which are aligned to the right."""
    return [Column(name, justify="right") for name in names]


def folded(name: str) -> Column:
    """Column of texts in which long words are broken, not cut."""
    return Column(name, overflow="fold")


def plain_table(*columns: Column | str) -> Table:
    """Table without lines."""
    return Table(*columns, box=None, pad_edge=False)


def ruled_table(*columns: Column | str) -> Table:
    """Table with a line under its header."""
    return Table(*columns, box=box.SIMPLE, pad_edge=False)


def figures_table(first: Column | str, *others: str) -> Table:
    """Table with a column of texts and columns of figures."""
    return ruled_table(first, *right(*others))


def facts_panel(title: str, rows: Iterable[tuple[str | Text, str | Text]]) -> Panel:
    """Panel with a title and rows. Each row has a name and a value."""
    table = Table.grid(padding=(0, 3))
    table.add_column(style="bold")
    table.add_column()
    for name, value in rows:
        table.add_row(name, Text(value) if isinstance(value, str) else value)
    return Panel(table, title=title, title_align="left", padding=(1, 2))
