"""Show texts while they are generated: a single text as a stream, several texts side by side, or one line of JSON per
text.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self, final

from rich import box
from rich.live import Live
from rich.table import Table
from rich.text import Text

from crosscut.config.system.terminal import echo, new_console
from crosscut.generation.running import Piece


@dataclass(eq=False)
class Written:
    """A prompt with the text and the tokens that have been generated so far."""

    prompt: str
    sample: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish: str = ""

    def add(self, piece: Piece) -> None:
        """Append the token and the text of one `Piece`."""
        self.text += piece.text
        self.tokens.append(piece.token)
        self.finish = piece.finish

    def to_json(self) -> dict[str, Any]:
        """Fields of the JSON line that `--json` prints for this text."""
        return {
            "prompt": self.prompt,
            "sample": self.sample,
            "text": self.text,
            "tokens": self.tokens,
            "finish": self.finish,
        }


class Display(ABC):
    """Display of texts, used as a context manager."""

    def __init__(self, texts: Sequence[Written]) -> None:
        self.texts = texts

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def show(self, text: Written, piece: Piece) -> None:
        """Update the display after `piece` has been added to `text`."""

    @abstractmethod
    def __exit__(self, *_error: object) -> None:
        """End the display, after the last text or after an error."""


@final
class Silent(Display):
    """Display without output, for all ranks except the first."""

    def show(self, text: Written, piece: Piece) -> None:
        """Show nothing."""

    def __exit__(self, *_error: object) -> None:
        """Do nothing."""


@final
class Stream(Display):
    """Display that prints a single text as it is generated."""

    def __init__(self, texts: Sequence[Written]) -> None:
        super().__init__(texts)
        echo(texts[0].prompt, bold=True, nl=False)

    def show(self, text: Written, piece: Piece) -> None:  # noqa: ARG002
        """Print the text of the piece."""
        echo(piece.text, nl=False)

    def __exit__(self, *_error: object) -> None:
        echo()


@final
class InOrder(Display):
    """Display of complete texts, in the order of the prompts. A text is printed when it and all earlier texts have
    ended. It is printed below a heading with its number, or as a line of JSON.
    """

    def __init__(self, texts: Sequence[Written], *, as_json: bool) -> None:
        super().__init__(texts)
        self.as_json, self._num_shown = as_json, 0

    def show(self, text: Written, piece: Piece) -> None:  # noqa: ARG002
        """Print the next texts in order, up to the first text that has not ended."""
        while self._num_shown < len(self.texts) and self.texts[self._num_shown].finish:
            done = self.texts[self._num_shown]
            self._num_shown += 1
            if self.as_json:
                echo(json.dumps(done.to_json(), ensure_ascii=False))
            else:
                echo(f"--- {self._num_shown} of {len(self.texts)}, sample {done.sample + 1}")
                echo(done.prompt + done.text)

    def __exit__(self, *_error: object) -> None:
        """Do nothing, because all texts have been printed."""


@final
class Columns(Display):
    """Display as a growing table on a terminal: one row per prompt, with the samples side by side."""

    def __init__(self, texts: Sequence[Written]) -> None:
        super().__init__(texts)
        self._console = new_console()
        self._live = Live(get_renderable=self._table, console=self._console, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def show(self, text: Written, piece: Piece) -> None:
        """Do nothing, because the table is refreshed several times per second."""

    def __exit__(self, *_error: object) -> None:
        """Print the complete table, even if it is longer than the terminal."""
        self._live.stop()
        self._console.print(self._table())

    def _table(self) -> Table:
        num_samples = 1 + max(text.sample for text in self.texts)
        table = Table(box=box.SIMPLE_HEAD, show_lines=True, expand=True, show_header=num_samples > 1)
        for number in range(num_samples):
            table.add_column(f"sample {number + 1}", ratio=1, overflow="fold")
        for first in range(0, len(self.texts), num_samples):
            row = self.texts[first : first + num_samples]
            table.add_row(*(Text.assemble((text.prompt, "bold"), text.text) for text in row))
        return table


def display_for(texts: Sequence[Written], *, as_json: bool) -> Display:
    """Choose the display for `texts`: a stream for a single text, a table for several texts on a terminal, and one text
    after another in all other cases.
    """
    if len(texts) == 1 and not as_json:
        return Stream(texts)
    if new_console().is_terminal and not as_json:
        return Columns(texts)
    return InOrder(texts, as_json=as_json)
