"""Size of a checkout, room by room: what everybody pays who reads, tests or changes the project.

    python benchmarks/size.py                         # this checkout
    python benchmarks/size.py ../before .             # two checkouts: `1,200 -> 1,100` where they differ
    python benchmarks/size.py --change                # this checkout beside `benchmarks/size.json`
    python benchmarks/size.py --durations RUN.xml     # also the seconds of the tests of this run (`pytest --junitxml`)
    python benchmarks/size.py --write                 # write `benchmarks/size.json`, at each release

A room is a folder of `crosscut/`. The tests and the benchmarks in folders of the same name count for it. There is no
limit: CI prints the change, so that it is known. The columns:

code             lines of the package without docstrings, comments and blank lines
nodes            nodes of the syntax trees of the package, docstrings aside
functions        functions and methods of the package
large classes    classes of the package with more than 15 methods
Any              names and attributes called `Any` in the package
tests            lines of the tests, counted as in `code`
seconds          seconds of the tests
benchmarks       lines of the benchmarks, counted as in `code`
words            handwritten words of README, CONTRIBUTING, `docs/*.md` and `benchmarks/README.md`, where a word is what
                 spaces separate. A page does not count if its first lines say that a program writes it, nor does a part
                 between the comments `<!-- NAME -->` and `<!-- end -->`, or `<!-- NAME: begin -->` and
                 `<!-- NAME: end -->`, that a program fills.
"""

import ast
import io
import json
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.commands import ROOT, command_line
from benchmarks.shape import Source, read_sources, refuse_other_folders
from docs.docstrings import docstrings_of
from tests.slices import read_run

RECORD = Path(__file__).with_name("size.json")
COLUMNS = ("code", "nodes", "functions", "large classes", "Any", "tests", "seconds", "benchmarks", "words")
MOST_METHODS = 15
"""Methods that a class has at most without being counted as large."""
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
    tokenize.ENCODING,
}  # fmt: skip

Sizes = dict[str, dict[str, int]]
"""Room to column to figure. A figure of 0 is left out."""


def measure(checkout: Path, durations: Sequence[Path] = ()) -> Sizes:
    """Count all columns of a checkout."""
    sizes: Sizes = defaultdict(lambda: defaultdict(int))
    for source in read_sources(checkout / "crosscut"):
        for column, figure in figures_of(source).items():
            sizes[source.package][column] += figure
    for column in ("tests", "benchmarks"):
        for source in read_sources(checkout / column):
            sizes[source.package][column] += lines_of_code(source)
    for run in durations:
        for file, tests in read_run(run).items():
            folders = Path(file).parts[1:-1]
            sizes[folders[0] if folders else ""]["seconds"] += round(sum(tests.values()))
    for page in pages_of(checkout):
        sizes["docs"]["words"] += handwritten_words(page.read_text(encoding="utf-8"))
    found = {room: {name: figure for name, figure in sizes[room].items() if figure} for room in sorted(sizes)}
    return {room or "no room": figures for room, figures in found.items() if figures}


def figures_of(source: Source) -> dict[str, int]:
    """Count the columns of one file of the package."""
    classes = [node for node in source.nodes if isinstance(node, ast.ClassDef)]
    methods = [sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in each.body) for each in classes]
    return {
        "code": lines_of_code(source),
        "nodes": len(source.nodes) - 2 * len(list(docstrings_of(source.tree))),  # an expression and its constant
        "functions": len(list(source.functions())),
        "large classes": sum(number > MOST_METHODS for number in methods),
        "Any": sum("Any" in (getattr(node, "id", None), getattr(node, "attr", None)) for node in source.nodes),
    }


def lines_of_code(source: Source) -> int:
    """Count the lines that hold code. All lines of a string count, those of a docstring do not."""
    docstrings = {docstring.line for docstring in docstrings_of(source.tree)}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        is_docstring = token.type == tokenize.STRING and token.start[0] in docstrings
        if token.type not in NO_CODE and not is_docstring:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def pages_of(checkout: Path) -> Iterator[Path]:
    """Pages of the documentation. The decision records and the changelog only grow, so they do not count."""
    yield from sorted((checkout / "docs").glob("*.md"))
    for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md"):
        if (checkout / name).exists():
            yield checkout / name


def handwritten_words(text: str) -> int:
    """Count the words of a page that no program writes."""
    if re.search(r"<!-- Written by |`python [\w/.]+` writes this page", text[:1000]):
        return 0
    text = re.sub(r"<!-- (\w+): begin -->.*?<!-- \1: end -->|<!-- \w+ -->.*?<!-- end -->", "", text, flags=re.DOTALL)
    return len(text.split())


def to_markdown(sizes: Sizes, before: Sizes | None = None) -> str:
    """Table with a row for each room and the total. A figure that was different before is printed after the old one.
    Without a run of the tests, the table has no seconds.
    """
    is_timed = any("seconds" in figures for figures in sizes.values())
    columns = [column for column in COLUMNS if is_timed or column != "seconds"]
    rooms = sorted({*sizes, *(before or {})})
    lines = [f"| room | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    for room in (*rooms, "total"):
        new, old = row_of(sizes, room), row_of(sizes if before is None else before, room)
        cells = [cell(new.get(column, 0), old.get(column, 0)) for column in columns]
        lines.append(f"| {room} | {' | '.join(cells)} |")
    return "\n".join(lines)


def row_of(sizes: Sizes, room: str) -> Mapping[str, int]:
    """Figures of a room, or of all rooms together."""
    if room != "total":
        return sizes.get(room, {})
    return {column: sum(figures.get(column, 0) for figures in sizes.values()) for column in COLUMNS}


def cell(new: int, old: int) -> str:
    """Figure of one cell, and the figure before it."""
    if old == new:
        return f"{new:,}" if new else ""
    return f"{old:,} -> {new:,}"


def to_json(sizes: Sizes) -> str:
    """Text of `size.json`, one line for each room."""
    lines = [f"{json.dumps(room)}: {json.dumps(figures)}" for room, figures in sizes.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = command_line(__doc__)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[ROOT], help="one or two folders with `crosscut/`")
    parser.add_argument("--change", action="store_true", help="print the change against `benchmarks/size.json`")
    parser.add_argument("--durations", nargs="+", type=Path, default=[], metavar="RUN.xml", help="seconds of tests")
    parser.add_argument("--write", action="store_true", help="write `benchmarks/size.json`")
    options = parser.parse_args(arguments)
    refuse_other_folders(parser, options.checkouts)
    if len(options.checkouts) > 1 + (not options.change):
        most = "one folder beside --change" if options.change else "one or two folders"
        parser.error(f"`checkouts` must be {most}, but are {len(options.checkouts)}. Leave the others out.")
    *earlier, checkout = options.checkouts
    sizes = measure(checkout, options.durations)
    before = measure(earlier[0]) if earlier else None
    if options.change:
        before = json.loads(RECORD.read_text(encoding="utf-8"))
    print(to_markdown(sizes, before))
    if options.write:
        RECORD.write_text(to_json(sizes), encoding="utf-8")


if __name__ == "__main__":
    main()
