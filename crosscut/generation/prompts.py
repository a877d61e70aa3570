"""Read prompts from a file, or ask for prompts at a terminal."""

import os
import sys
from pathlib import Path

import click

from crosscut.config import DataError
from crosscut.config.system.files import parse_json, read_lines
from crosscut.config.system.terminal import echo


def read_prompts(path: Path) -> tuple[str, ...]:
    """Read prompts from a file: one per line, or in a `.jsonl` file, the value of `prompt` in each line. Empty lines
    are skipped.

    Raises `DataError` if the file cannot be read, has no prompt, or has a line that is not a prompt.
    """
    try:
        lines = list(read_lines(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise DataError(
            f"`{path}` must be a readable file of prompts, but is not: {reason}. Use a UTF-8 file with one prompt per "
            "line."
        ) from None
    of_line = _of_record if path.suffix == ".jsonl" else _of_line
    prompts = tuple(of_line(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip())
    if not prompts:
        raise DataError(f"`{path}` must hold one prompt per line, but is empty. Add a prompt.")
    return prompts


def _of_line(line: str, _place: str) -> str:
    return line


def _of_record(line: str, place: str) -> str:
    try:
        record = parse_json(line)
    except ValueError as error:
        raise DataError(f"`{place}` must be a JSON object with a `prompt`, but is not valid JSON: {error}.") from None
    prompt = record.get("prompt") if isinstance(record, dict) else None
    if not isinstance(prompt, str):
        raise DataError(f"`{place}` must be a JSON object with a string `prompt`, but is {line.strip()[:60]}.")
    return prompt


def can_ask() -> bool:
    """Whether standard input and output are a terminal, so that a user can type prompts."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def ask() -> str | None:
    """Ask the user for a prompt at the terminal. Returns None if the user ends the input with Ctrl-D or Ctrl-C."""
    if not sys.stdin.isatty():  # a started rank has no standard input, but still has the terminal
        os.dup2(os.open("/dev/tty", os.O_RDONLY), 0)
        sys.stdin = os.fdopen(0)
    try:
        typed: str = click.prompt("prompt", prompt_suffix="> ", default="", show_default=False)
    except click.Abort:
        echo()
        return None
    return typed
