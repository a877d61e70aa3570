"""Showing texts while they are written: one as it comes, several side by side, or a line of JSON for each."""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self, final

import click
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from crosscut.generation.running import Piece


@dataclass(eq=False)
class Written:
    """A text as far as it has been written."""

    prompt: str
    sample: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish: str = ""

    def add(self, piece: Piece) -> None:
        """One more token."""
        self.text += piece.text
        self.tokens.append(piece.token)
        self.finish = piece.finish

    def to_json(self) -> dict[str, Any]:
        """Fields of a line of `--json`."""
        return {
            "prompt": self.prompt,
            "sample": self.sample,
            "text": self.text,
            "tokens": self.tokens,
            "finish": self.finish,
        }


class Display(ABC):
    """Shows texts inside a `with`."""

    def __init__(self, texts: Sequence[Written]) -> None:
        self.texts = texts

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def show(self, text: Written, piece: Piece) -> None:
        """A piece that has just been added to one of the texts."""

    @abstractmethod
    def __exit__(self, *_error: object) -> None:
        """All texts have ended, or it came to an error."""


@final
class Silent(Display):
    """On ranks that show nothing."""

    def show(self, text: Written, piece: Piece) -> None:
        """Show nothing."""

    def __exit__(self, *_error: object) -> None:
        """Nothing was begun."""


@final
class Stream(Display):
    """One text, as it comes."""

    def __init__(self, texts: Sequence[Written]) -> None:
        super().__init__(texts)
        click.echo(click.style(texts[0].prompt, bold=True), nl=False)

    def show(self, text: Written, piece: Piece) -> None:  # noqa: ARG002
        """Print what is new."""
        click.echo(piece.text, nl=False)

    def __exit__(self, *_error: object) -> None:
        click.echo()


@final
class InOrder(Display):
    """Each text when it and all before it have ended: under a line that says which it is, or as a line of JSON."""

    def __init__(self, texts: Sequence[Written], *, as_json: bool) -> None:
        super().__init__(texts)
        self.as_json, self._num_shown = as_json, 0

    def show(self, text: Written, piece: Piece) -> None:  # noqa: ARG002
        """Print the texts that have their turn."""
        while self._num_shown < len(self.texts) and self.texts[self._num_shown].finish:
            done = self.texts[self._num_shown]
            self._num_shown += 1
            if self.as_json:
                click.echo(json.dumps(done.to_json(), ensure_ascii=False))
            else:
                click.echo(f"--- {self._num_shown} of {len(self.texts)}, sample {done.sample + 1}")
                click.echo(done.prompt + done.text)

    def __exit__(self, *_error: object) -> None:
        """Nothing is left."""


@final
class Columns(Display):
    """On a terminal: a row for each prompt, its samples side by side, growing."""

    def __init__(self, texts: Sequence[Written]) -> None:
        super().__init__(texts)
        self._console = Console()
        self._live = Live(get_renderable=self._table, console=self._console, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def show(self, text: Written, piece: Piece) -> None:
        """The table looks by itself, some times a second."""

    def __exit__(self, *_error: object) -> None:
        """Leave the whole table, also where it is longer than the terminal."""
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
    """Choose the display for `texts`: a stream, columns on a terminal, or one text after the other in order."""
    if len(texts) == 1 and not as_json:
        return Stream(texts)
    if Console().is_terminal and not as_json:
        return Columns(texts)
    return InOrder(texts, as_json=as_json)
