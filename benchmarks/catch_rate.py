"""Share of one-line faults in the package that `make test` finds.

    python benchmarks/catch_rate.py draw --seed 1 --into faults-1.json       # draw faults, without running anything
    python benchmarks/catch_rate.py map --into calls.json                    # run the quick tests once, noting calls
    python benchmarks/catch_rate.py run faults-1.json --calls calls.json --into found-1.jsonl
    python benchmarks/catch_rate.py show found-1.jsonl                       # a line for each room, and what escaped

A fault changes one line: a comparison, an operator, a number or a condition, or it leaves out a call. The faults are
spread over all rooms of the package by their lines of code, with at least one in each room. Each fault is planted in a
copy of the checkout. The tests of the fault's own room run first, then all others, until the first test fails. That
test runs once more without the fault. If it fails there too, it does not count, and the others run again.

With `--calls`, only the files of tests run that call the function with the fault (`called.py`). The map must be of the
same checkout as the one on which the faults are tried. Without it, all quick tests run on a fault that none finds.

`run` continues where it was stopped. A fault is stored with the text of its line, so it can be planted again after
other lines of its file have changed. To compare two sets of tests, run them on the same faults.
"""

import ast
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.called import CallMap
from benchmarks.commands import ROOT, command_line, markdown, write_figures
from benchmarks.machine import print_machine
from crosscut.config.system.machine import available_cores

PACKAGE = "crosscut"
MOST_SECONDS = 1800.0
"""Time after which the tests of one fault are stopped. The fault then counts as found, since it made a test hang."""
QUICK = ("-m", "not slow", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
"""Arguments of pytest in `make test`."""

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="),
    ast.In: (" in ", " not in "), ast.NotIn: (" not in ", " in "),
    ast.Is: (" is ", " is not "), ast.IsNot: (" is not ", " is "),
}  # fmt: skip
OPERATORS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"),
    ast.FloorDiv: ("//", "*"), ast.Div: ("/", "*"), ast.Mod: ("%", "//"),
}  # fmt: skip
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Fault:
    """A changed line. `line` is its number when the fault was drawn, and `before` and `after` are its texts."""

    path: str
    line: int
    before: str
    after: str

    @property
    def room(self) -> str:
        """Directory below the package that holds the file, or the package itself."""
        parts = Path(self.path).parts
        return parts[1] if len(parts) > 2 else PACKAGE

    def line_in(self, text: str) -> int:
        """Number of the line nearest to the old place that reads `before`.

        Raises `ValueError` if no line reads so any more.
        """
        places = [number for number, line in enumerate(text.split("\n"), start=1) if line == self.before]
        if not places:
            raise ValueError(f"`{self.path}` must still have the line `{self.before.strip()}`, but has not.")
        return min(places, key=lambda number: abs(number - self.line))

    def planted(self, text: str) -> str:
        """Text of the file with the fault."""
        lines = text.split("\n")
        lines[self.line_in(text) - 1] = self.after
        return "\n".join(lines)


@dataclass(frozen=True)
class Verdict:
    """Result of the tests on one fault. `test` is the first test that failed, empty if none did."""

    fault: Fault
    test: str
    own_room: bool
    """Whether a test of the fault's own room found it."""
    seconds: float


def main() -> None:
    parser = command_line(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw", help="draw faults")
    drawing.add_argument("--seed", type=int, required=True)
    drawing.add_argument("--count", type=int, default=60, help="number of faults; default: %(default)s")
    drawing.add_argument("--into", type=Path, required=True, help="file of the faults")
    mapping = commands.add_parser("map", help="run the quick tests once, and write which files call which functions")
    mapping.add_argument("--into", type=Path, required=True, help="file of the map")
    mapping.add_argument("--workers", type=int, default=available_cores(), help="files that run beside each other")
    running = commands.add_parser("run", help="run the quick tests on each fault")
    running.add_argument("faults", type=Path)
    running.add_argument("--calls", type=Path, help="map of this checkout; by default, all quick tests may run")
    running.add_argument("--into", type=Path, required=True, help="file of the verdicts; existing ones are kept")
    showing = commands.add_parser("show", help="print the rates")
    showing.add_argument("verdicts", type=Path, nargs="+")
    options = parser.parse_args()
    if options.command == "draw":
        faults = draw(ROOT, options.seed, options.count)
        options.into.write_text(json.dumps([asdict(fault) for fault in faults], indent=1) + "\n", encoding="utf-8")
    elif options.command == "map":
        with checkout() as copy:
            write_figures(options.into, asdict(CallMap.of(copy, files_of_tests(copy), options.workers)))
    elif options.command == "run":
        print_machine("torch", "pytest")
        calls = CallMap(**json.loads(options.calls.read_text(encoding="utf-8"))) if options.calls else None
        run([Fault(**fault) for fault in json.loads(options.faults.read_text(encoding="utf-8"))], options.into, calls)
        show(options.into)
    else:
        for path in options.verdicts:
            show(path)


def draw(root: Path, seed: int, count: int) -> list[Fault]:
    """Draw `count` faults. A room gets faults in proportion to its lines on which a fault is possible, and at least
    one.
    """
    by_room: dict[str, list[list[Fault]]] = defaultdict(list)
    for path in sorted((root / PACKAGE).rglob("*.py")):
        of_line: dict[int, list[Fault]] = defaultdict(list)
        for fault in faults_of(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")):
            of_line[fault.line].append(fault)
        for faults in of_line.values():
            by_room[faults[0].room].append(faults)
    shares = _shares({room: len(lines) for room, lines in by_room.items()}, count)
    drawn = random.Random(seed)
    return [drawn.choice(faults) for room in sorted(shares) for faults in drawn.sample(by_room[room], shares[room])]


def _shares(sizes: dict[str, int], count: int) -> dict[str, int]:
    """Divide `count` over the rooms by size, with at least one for each room, by largest remainder."""
    if count < len(sizes):
        raise SystemExit(f"error: `--count` must be at least {len(sizes)}, one for each room, but is {count}.")
    left = count - len(sizes)
    exact = {room: left * size / sum(sizes.values()) for room, size in sizes.items()}
    shares = {room: 1 + int(share) for room, share in exact.items()}
    for room in sorted(exact, key=lambda room: int(exact[room]) - exact[room])[: count - sum(shares.values())]:
        shares[room] += 1
    return shares


def faults_of(path: str, text: str) -> Iterator[Fault]:
    """All faults that can be made in a file."""
    lines = text.split("\n")
    for node in _computing(ast.parse(text)):
        for start, end, new in _edits(node, lines):
            before = lines[node.lineno - 1]
            after = (before.encode()[:start] + new.encode() + before.encode()[end:]).decode()
            if after != before:
                yield Fault(path, node.lineno, before, after)


def _computing(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that compute, each on a single line. Of an `if`, only the condition must be on one line. Types, docstrings,
    messages and decorators are left out. So is the content of an f-string, because Python 3.11 gives its nodes a wrong
    column.
    """
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert):
                continue
            part = node.test if isinstance(node, ast.If) else node
            if getattr(node, "lineno", 0) == getattr(part, "end_lineno", -1):
                yield node
            yield from _computing(node)


def _edits(node: ast.AST, lines: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """Start and end in bytes of the part of the line that changes, and its new text."""
    match node:
        case ast.Compare(left, [operator], [right]) if type(operator) in COMPARISONS:
            yield from _between(left, right, COMPARISONS[type(operator)], lines)
        case ast.BinOp(left, operator, right) if type(operator) in OPERATORS:
            if not any(isinstance(side, ast.Constant) and isinstance(side.value, str) for side in (left, right)):
                yield from _between(left, right, OPERATORS[type(operator)], lines)
        case ast.BoolOp(operator, [left, right]):
            words = (" and ", " or ") if isinstance(operator, ast.And) else (" or ", " and ")
            yield from _between(left, right, words, lines)
        case ast.UnaryOp(ast.Not(), operand):
            yield node.col_offset, operand.col_offset, ""
        case ast.Constant(value) if value is True or value is False:
            yield node.col_offset, node.end_col_offset or 0, str(not value)
        case ast.Constant(value) if isinstance(value, int):
            yield node.col_offset, node.end_col_offset or 0, str(value + 1)
        case ast.Call(ast.Name(name)) if name in CALLS:
            yield node.col_offset, node.col_offset + len(name), CALLS[name]
        case ast.Expr(ast.Call()) | ast.AugAssign():
            yield node.col_offset, node.end_col_offset or 0, "pass"
        case ast.If(test):
            start, end = test.col_offset, test.end_col_offset or 0
            yield start, end, f"not ({lines[test.lineno - 1].encode()[start:end].decode()})"


def _between(
    left: ast.expr, right: ast.expr, words: tuple[str, str], lines: Sequence[str]
) -> Iterator[tuple[int, int, str]]:
    """Edit of the operator between two operands, if it can be found: parentheses may stand beside it."""
    line = lines[left.lineno - 1].encode()
    start, end = left.end_col_offset or 0, right.col_offset
    place = line[start:end].find(words[0].encode())
    if left.lineno == right.lineno and place >= 0:
        yield start + place, start + place + len(words[0].encode()), words[1]


@contextmanager
def checkout() -> Iterator[Path]:
    """Copy of this checkout, without uncommitted changes."""
    with tempfile.TemporaryDirectory(prefix="crosscut-faults-") as folder:
        copy = Path(folder) / "checkout"
        subprocess.run(["git", "clone", "-q", "--local", str(ROOT), str(copy)], check=True)
        yield copy


def files_of_tests(copy: Path) -> list[str]:
    """All files of tests of a checkout."""
    return sorted(path.relative_to(copy).as_posix() for path in (copy / "tests").rglob("test_*.py"))


def run(faults: Sequence[Fault], into: Path, calls: CallMap | None) -> None:
    """Run the quick tests on each fault that has no verdict yet, and append the verdicts to a file."""
    done = {verdict.fault for verdict in read(into)}
    with checkout() as copy:
        for number, fault in enumerate(faults, start=1):
            if fault in done:
                continue
            verdict = judge(fault, copy, calls)
            with into.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(verdict)) + "\n")
            outcome = verdict.test or "ESCAPED"
            print(f"{number}/{len(faults)}  {fault.path}:{fault.line}  {outcome}  {verdict.seconds:.0f} s", flush=True)


def judge(fault: Fault, copy: Path, calls: CallMap | None = None) -> Verdict:
    """Plant a fault in a copy of the checkout, and run the quick tests until the first one fails."""
    path = copy / fault.path
    sound = path.read_text(encoding="utf-8")
    start = time.perf_counter()
    files = files_of_tests(copy)
    if calls is not None:
        files = calls.files_for(fault.path, sound, fault.line_in(sound), files)
    for is_own in (True, False):
        places = [file for file in files if file.startswith(f"tests/{fault.room}/") == is_own]
        flaky: list[str] = []
        while places:
            path.write_text(fault.planted(sound), encoding="utf-8")
            failed = first_failure(copy, [*places, *(f"--deselect={test}" for test in flaky)])
            path.write_text(sound, encoding="utf-8")
            if not failed:
                break
            if failed == "no end" or not first_failure(copy, [failed]):
                return Verdict(fault, failed, is_own, time.perf_counter() - start)
            flaky.append(failed)
    return Verdict(fault, "", False, time.perf_counter() - start)


def first_failure(copy: Path, arguments: Sequence[str]) -> str:
    """Run pytest as `make test` does. Returns the id of the first test or file that fails, empty if none does."""
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    command = [sys.executable, "-m", "pytest", *QUICK, "-x", "-q", "--no-header", "-p", "no:cacheprovider", *arguments]
    try:
        ended = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired:
        return "no end"
    if ended.returncode in (0, 5):  # 5: no test was collected
        return ""
    for line in ended.stdout.splitlines():
        word, _, rest = line.partition(" ")
        if word in ("FAILED", "ERROR"):
            return rest.partition(" - ")[0]
    raise SystemExit(f"error: pytest must name the test that fails, but ended with {ended.returncode}:\n{ended.stdout}")


def read(path: Path) -> list[Verdict]:
    """Verdicts of a file. A file that does not exist has none."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines]
    return [Verdict(Fault(**each["fault"]), each["test"], each["own_room"], each["seconds"]) for each in found]


def show(path: Path) -> None:
    """Print a line for each room, and the faults that escaped."""
    verdicts = read(path)
    drawn, found, own = (
        Counter(v.fault.room for v in verdicts if rule(v))
        for rule in (lambda _: True, lambda v: bool(v.test), lambda v: bool(v.test) and v.own_room)
    )
    rows = [[room, drawn[room], found[room], own[room]] for room in sorted(drawn)]
    rows.append(["all", drawn.total(), found.total(), own.total()])
    print(f"\n{path.name}\n\n{markdown(('room', 'faults', 'found', 'found by its own tests'), rows)}\n")
    for verdict in verdicts:
        if not verdict.test:
            fault = verdict.fault
            print(f"escaped: {fault.path}:{fault.line}\n  - {fault.before.strip()}\n  + {fault.after.strip()}")


if __name__ == "__main__":
    main()
