"""Command lines, progress bars, tables and figures: what the programs of the benchmarks have in common."""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine, one_line

ROOT = Path(__file__).parents[1]


def command_line(docstring: str | None, *, tiny: str = "", figures: str = "") -> argparse.ArgumentParser:
    """Parser of a program's options, with its docstring as the help.

    `tiny` is the help of an option `--tiny`. `figures` adds an option `--json`: "print" prints the figures, and
    "write" takes a file.
    """
    parser = argparse.ArgumentParser(description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter)
    if tiny:
        parser.add_argument("--tiny", action="store_true", help=tiny)
    if figures == "print":
        parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    elif figures == "write":
        parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser


TINY_HELP = "use a tiny model, to check in seconds that everything runs"
"""Help of the option `--tiny` of most programs."""


def progress_bar() -> Any:
    """Bar of rich on standard error. Its tasks have a field `told`, a text behind the bar."""
    from rich import progress as bars
    from rich.console import Console

    left = bars.TimeRemainingColumn(elapsed_when_finished=True)
    columns = (bars.TextColumn("{task.description}"), bars.BarColumn(30), bars.MofNCompleteColumn(),
               bars.TimeElapsedColumn(), bars.TextColumn("left"), left)  # fmt: skip
    return bars.Progress(*columns, bars.TextColumn("{task.fields[told]}"), console=Console(stderr=True))


def subplots(*panels: int, **options: Any) -> tuple[Any, Any]:
    """Figure of matplotlib that needs no screen, and its panels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(*panels, layout="constrained", **options)


@contextmanager
def work_folder(kept: Path | None) -> Iterator[Path]:
    """Folder that the user names to keep its files, or else a temporary one."""
    with tempfile.TemporaryDirectory(prefix="crosscut-") as temporary:
        folder = (kept or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


def write_figures(path: Path | None, figures: Any) -> None:
    """Write figures as JSON to a file that the user may have named."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def print_figures(options: argparse.Namespace, packages: Sequence[str], figures: dict[str, Any]) -> bool:
    """Print the machine, with `--json` together with the figures. Returns whether the figures are printed."""
    machine = describe_machine(*packages)
    print(json.dumps({"machine": machine, **figures}, indent=2) if options.json else one_line(machine))
    return bool(options.json)


def markdown(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Table in Markdown."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def aligned(rows: Sequence[Sequence[object]], *, left: int = 1) -> str:
    """Table for a terminal. Its first `left` columns are aligned to the left, the others to the right. A row with fewer
    cells ends with its last cell, however long that is.
    """
    texts = [[str(cell) for cell in row] for row in rows]
    whole = [row for row in texts if len(row) == len(texts[0])]
    widths = [max(map(len, column)) for column in zip(*whole, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=False))
        ).rstrip()
        for row in texts
    )


def replace_section(page: Path, name: str, content: str) -> None:
    """Replace the text between the marks of a section of a page: `<!-- NAME: begin -->` and `<!-- NAME: end -->`."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    text = page.read_text(encoding="utf-8")
    if text.count(begin) != 1 or text.count(end) != 1:
        sys.exit(f"`{page}` must hold the lines `{begin}` and `{end}` once each, but does not.")
    whole = f"{begin}\n\n{content}\n\n{end}"
    page.write_text(re.sub(f"{begin}.*{end}", lambda _: whole, text, flags=re.DOTALL), encoding="utf-8")


def environment_here(**more: str) -> dict[str, str]:
    """Environment of a process that imports this checkout, wherever it runs."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, **more, "PYTHONPATH": path}


def run_command(command: Sequence[str], *, folder: Path = ROOT, environment: dict[str, str] | None = None) -> str:
    """Run a command that must succeed, and return its output."""
    done = subprocess.run(
        command, cwd=folder, env=environment or environment_here(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"`{' '.join(command)}` must end well, but exited with {done.returncode}:\n{done.stderr}")
    return done.stdout


def run_crosscut(*arguments: str, folder: Path = ROOT) -> str:
    """Run `crosscut` in a process of its own, with the code of this checkout."""
    return run_command([sys.executable, "-m", "crosscut", *arguments], folder=folder)
