"""Console of the rich library that is safe for text of others, and cuts no name in a file or a pipe."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.panel import Panel
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from crosscut.config.system.terminal import printable

_WIDEST = 10_000
"""Maximum number of columns of a table that does not go to a terminal."""

_FRAME = 8
"""Number of columns of a panel's border and padding."""


class PrintableConsole(Console):
    """Console that replaces control characters on a terminal. Without an edge, tables do not wrap."""

    has_edge = True
    """Whether lines must not be longer than the width of the console."""

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
