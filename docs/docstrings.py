"""Check that docstrings open with the noun or verb that names the thing.

    python docs/docstrings.py [PATH ...]

A docstring that opens with "What", "Of", "Those", "That" or "How" describes its thing by a clause and leaves the reader
to find the noun. The check reads the docstrings of modules, classes and functions, and the texts under fields, in all
Python files of the paths (by default those of `crosscut/`, `benchmarks/`, `docs/` and `examples/`). Each finding is
printed as `file:line: text`, and the exit status is then 1.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
ROOTS = [ROOT / name for name in ("crosscut", "benchmarks", "docs", "examples")]
OPENINGS = ("What", "Of", "Those", "That", "How")
"""Words that no docstring may open with."""
_OPENING = re.compile(rf"({'|'.join(OPENINGS)})\b")


class Docstring(NamedTuple):
    """A docstring and its first line in the file."""

    line: int
    text: str

    @property
    def opening(self) -> str | None:
        """The unwanted word that the docstring opens with, or None."""
        found = _OPENING.match(self.text)
        return found[1] if found else None


def docstrings_of(tree: ast.Module) -> Iterator[Docstring]:
    """Yield every docstring of a module: its own, those of classes and functions, and the texts under fields."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if not isinstance(node, documented):
            continue
        for place, statement in enumerate(node.body):
            is_under_field = place > 0 and isinstance(node.body[place - 1], ast.Assign | ast.AnnAssign)
            if (place == 0 or is_under_field) and (text := _string(statement)) is not None:
                yield Docstring(statement.lineno, text.strip())


def _string(statement: ast.stmt) -> str | None:
    """Text of a statement that is nothing but a string."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        value = statement.value.value
        return value if isinstance(value, str) else None
    return None


def parsed(paths: Sequence[Path]) -> Iterator[tuple[Path, Path, ast.Module]]:
    """Yield each Python file of `paths` (files or folders), its path as it is shown, and its syntax tree."""
    for file in sorted({file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])}):
        shown = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
        yield file, shown, ast.parse(file.read_text(encoding="utf-8"), str(file))


def findings(paths: Sequence[Path]) -> Iterator[str]:
    """Yield `file:line: text` for every docstring that opens with an unwanted word."""
    for _, shown, tree in parsed(paths):
        for docstring in sorted(docstrings_of(tree)):
            if docstring.opening:
                first_line = docstring.text.partition("\n")[0]
                yield f"{shown}:{docstring.line}: {first_line}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the findings and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "paths",
        nargs="*",
        type=Path,
        default=ROOTS,
        help="files or folders to check",
    )
    found = list(findings(parser.parse_args(arguments).paths))
    for finding in found:
        print(finding)
    if found:
        words = f"{', '.join(OPENINGS[:-1])} or {OPENINGS[-1]}"
        print(f"A docstring must not open with {words}, but {len(found)} do. Name the thing first.", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
