"""All output passes one door, which makes text from others safe for a terminal."""

import ast
import io
import re
import sys
from pathlib import Path

import pytest

import crosscut
from crosscut.config.system.terminal import echo, new_console, printable
from tests.terminal import Terminal

PACKAGE = Path(crosscut.__file__).parent


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x1b[2J", "\\x1b[2J"),
        ("\x9b31m\x7f\x00", "\\x9b31m\\x7f\\x00"),
        ("good\rbad", "good\\x0dbad"),
        ("\u202egnp.exe\u2066", "\\u202egnp.exe\\u2066"),
        ("caf\udce9", "caf\\udce9"),
    ],
)
def test_control_characters_become_visible(text, shown):
    assert printable(text) == shown
    assert printable(shown) == shown


@pytest.mark.parametrize(
    "text",
    ["tab\tand\nline\r\n", "e\u0301 Ω 漢字 한국어", "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645", "שלום\u200f!",
     "\U0001f469\u200d\U0001f4bb \u2764\ufe0f", "\U0001f3f4\U000e0067\U000e0062\U000e007f", "\\x1b [bold]x[/] :smile:"],
)  # fmt: skip
def test_ordinary_text_of_all_languages_is_unchanged(text):
    assert printable(text) == text


def test_text_for_a_pipe_is_exact_but_errors_are_not(capfd):
    echo("\x1b[2J text\u202e")
    echo("\x1b[2J error", err=True)
    told = capfd.readouterr()
    assert told.out == "\x1b[2J text\u202e\n"
    assert told.err == "\\x1b[2J error\n"


def test_tables_on_a_terminal_interpret_neither_controls_nor_markup(monkeypatch):
    from rich.panel import Panel
    from rich.table import Table

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    table = Table("\x1b]0;head\x07", title="[link=evil]title")
    table.add_row("[red]row\x1b[2J :smile:")
    console = new_console()
    console.print(table)
    console.print(Panel("\x1bpanel", title="\x9btitle"))
    shown = screen.getvalue()
    for text in ("\\x1b]0;head", "[link=evil]title", "[red]row\\x1b[2J", ":smile:", "\\x1bpanel", "\\x9btitle"):
        assert text in shown
    assert "\x1b]0;head" not in shown
    assert "\x1b[2J" not in shown


def test_only_the_terminals_module_prints():
    names = ("print", "Console", "echo", "secho", "TextColumn")
    may_print = re.compile(r"(?<![\w.])print\(|Console\(|(click|rich)\.\w+\(|TextColumn\(")
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if path == PACKAGE / "config/system/terminal.py" or not may_print.search(text):
            continue
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.Call)
                and (getattr(node.func, "attr", None) or getattr(node.func, "id", "")) in names
            ):
                name = ast.unparse(node.func)
                assert name not in {"print", "Console", "click.echo", "click.secho", "rich.print"}, (
                    f"{path}, line {node.lineno}: `{name}` must be `echo` or `new_console` of `config.system.terminal`."
                )
                if name == "TextColumn":
                    assert any(word.arg == "markup" for word in node.keywords), f"{path}, line {node.lineno}: markup"


NAME = "/very/long/" + "x" * 120


def test_a_name_is_never_cut_in_a_file(capsys):
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from crosscut.config.system.console import facts_panel

    table = Table("module", "verdict", box=None)
    table.add_row(f"blocks.0.{NAME}", "the same in many more words than fit into eighty columns " * 3)
    console = new_console()
    for shown in (table, Group(Text("title"), table), facts_panel("run", [("folder", NAME)]), Text(f"see {NAME} now")):
        console.print(shown)
        told = capsys.readouterr().out
        assert NAME in told
        assert "\u2026" not in told
        if shown is table:
            assert len(told.splitlines()) == 2, "a header and a row"


def test_sentences_in_a_file_still_have_lines_of_80_columns(capsys):
    from rich.text import Text

    from crosscut.config.system.console import facts_panel

    for shown in (Text("word " * 100), facts_panel("run", [("note", "word " * 100)])):
        new_console().print(shown)
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 80
        assert len(lines) > 5


def test_a_terminal_keeps_its_width(monkeypatch):
    from rich.table import Table

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "60")
    table = Table("module", box=None)
    table.add_row("word " * 40)
    console = new_console()
    console.print(table)
    assert max(len(line) for line in terminal.lines()) <= 60
