"""Parts of the slow tests that take about equally long: the option `--part` of pytest, and the measured seconds.

    python -m pytest -m slow --part 7/18     # the seventh of 18 parts of what `-m slow` selects
    python -m pytest -m slow --part extras   # the tests that need the extras `harness` and `ray`; no k/n contains them
    python tests/slices.py part COMMIT       # the part that .ci/run chooses for this commit, such as 7/18
    python tests/slices.py renew RUN.xml ... # write the seconds of these runs (`--junitxml`) into tests/durations.json

Each part is a list of units, and each unit is a run of tests of one file. The longest unit goes first, always to the
part that has the least so far. The measured seconds are committed, so all machines divide alike. A unit is a whole file
if the file is short. Tests that share a fixture of their module stay together, unless they would fill half of a part.
"""

import argparse
import json
import math
import re
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
DURATIONS = Path(__file__).with_name("durations.json")

NUM_PROCESSES = 2
"""Processes that run a part, as in `make test-slow`."""
SECONDS_OF_A_PART = 120.0
"""Measured seconds of each process in a part. Collecting the tests takes up to 30 more, many tests were measured on a
busy machine or not at all, and a part must take less than four minutes.
"""
DEFAULT_SECONDS = 2.0
"""Seconds of a test that was never measured."""
UNITS_OF_A_PART = 8
"""Fewest units that a part is put together from, if fixtures do not join longer ones."""
EXTRAS = "extras"

Durations = Mapping[str, Mapping[str, tuple[int, float]]]
"""File to test function to the number of its cases and the seconds of each. A case that takes much longer than the
other cases of its function has an entry of its own, under its whole name.
"""


class Case(NamedTuple):
    """A test that is to be put into a part."""

    path: str
    """File of the test, relative to the root, with slashes."""
    name: str
    """Name of the function, with the parameters of the case in brackets."""
    shared: str = ""
    """Fixtures of the module that the test uses. Tests of a file with equal, non-empty texts share them."""


class Unit(NamedTuple):
    """Tests of one file that stay together."""

    seconds: float
    places: tuple[int, ...]
    """Places in the list of all tests that are divided."""


def load(path: Path = DURATIONS) -> Durations:
    """Read the measured seconds."""
    files = json.loads(path.read_text(encoding="utf-8"))
    return {file: {name: (count, seconds) for name, (count, seconds) in tests.items()} for file, tests in files.items()}


def seconds_of(case: Case, durations: Durations) -> float:
    """Measured seconds of a test, or the default."""
    tests = durations.get(case.path, {})
    found = tests.get(case.name) or tests.get(case.name.partition("[")[0])
    return found[1] if found else DEFAULT_SECONDS


def num_parts(durations: Durations) -> int:
    """Number of parts into which .ci/run divides the slow tests. This is its only home."""
    total = sum(count * seconds for tests in durations.values() for count, seconds in tests.values())
    return max(1, math.ceil(total / (NUM_PROCESSES * SECONDS_OF_A_PART)))


def part_of(commit: str, parts: int) -> int:
    """Number of the part, from 1, that belongs to a commit with this hash."""
    return int(commit, 16) % parts + 1


def divide(cases: Sequence[Case], parts: int, durations: Durations) -> list[list[int]]:
    """Divide tests into parts with about equal seconds. Each part is a list of places in `cases`, ascending."""
    seconds = [seconds_of(case, durations) for case in cases]
    found = units(cases, seconds, sum(seconds) / parts)
    loads, divided = [0.0] * parts, [[] for _ in range(parts)]
    for unit in sorted(found, key=lambda unit: (-unit.seconds, cases[unit.places[0]])):
        least = loads.index(min(loads))
        loads[least] += unit.seconds
        divided[least] += unit.places
    return [sorted(places) for places in divided]


def units(cases: Sequence[Case], seconds: Sequence[float], of_a_part: float) -> list[Unit]:
    """Unite tests of one file: the whole file if it is short, tests that share fixtures, and runs of other tests."""
    most = of_a_part / UNITS_OF_A_PART
    found = []
    for _, of_file in groupby(sorted(range(len(cases)), key=lambda place: cases[place].path), lambda p: cases[p].path):
        whole = unit(of_file, seconds)
        if whole.seconds <= most:
            found.append(whole)
            continue
        joined = defaultdict(list)
        for place in whole.places:
            joined[cases[place].shared].append(place)
        alone = joined.pop("", [])
        for places in joined.values():
            if (together := unit(places, seconds)).seconds <= of_a_part / 2:
                found.append(together)
            else:
                alone += places
        found += runs(sorted(alone), seconds, most)
    return found


def runs(places: Iterable[int], seconds: Sequence[float], most: float) -> list[Unit]:
    """Join neighbours to units of at most so many seconds. A longer test is a unit of its own."""
    found: list[Unit] = []
    for place in places:
        if found and found[-1].seconds + seconds[place] <= most:
            found[-1] = Unit(found[-1].seconds + seconds[place], (*found[-1].places, place))
        else:
            found.append(Unit(seconds[place], (place,)))
    return found


def unit(places: Iterable[int], seconds: Sequence[float]) -> Unit:
    """Unite the tests at these places."""
    chosen = tuple(places)
    return Unit(sum(seconds[place] for place in chosen), chosen)


# Hooks of pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option `--part`."""
    parser.addoption(
        "--part", type=parsed_part, metavar="K/N", help="run the K-th of N parts with equal time, or extras"
    )


def parsed_part(text: str) -> str | tuple[int, int]:
    """Read the value of `--part`: `extras`, or the number of the part and the number of parts."""
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if found and int(found[1]) <= int(found[2]):
        return int(found[1]), int(found[2])
    if text == EXTRAS:
        return text
    raise argparse.ArgumentTypeError(
        f"`--part` must be K/N with K from 1 to N, or {EXTRAS}, but is {text}. Try 1/{num_parts(load())}."
    )


@pytest.hookimpl(trylast=True)  # after pytest has looked at `-m` and `-k`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave only the tests of the chosen part, in files that take less and less time."""
    part = config.getoption("part")
    if part is None:
        return
    if part == EXTRAS:
        chosen = [item for item in items if item.get_closest_marker(EXTRAS)]
    else:
        chosen = chosen_items([item for item in items if not item.get_closest_marker(EXTRAS)], *part)
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = chosen


def chosen_items(items: Sequence[pytest.Item], number: int, parts: int) -> list[pytest.Item]:
    """Items of the part with this number, sorted by the seconds of their files."""
    durations = load()
    cases = [case_of(item) for item in items]
    places = divide(cases, parts, durations)[number - 1]
    of_files: dict[str, float] = defaultdict(float)
    for place in places:
        of_files[cases[place].path] += seconds_of(cases[place], durations)
    places.sort(key=lambda place: (-of_files[cases[place].path], cases[place].path, place))
    return [items[place] for place in places]


def case_of(item: pytest.Item) -> Case:
    """Name of a collected test, and the fixtures that it shares with other tests of its module."""
    fixtures = getattr(item, "_fixtureinfo", None)
    shared = {
        name
        for name, found in (fixtures.name2fixturedefs.items() if fixtures else ())
        if found[-1].scope in ("class", "module", "package") and found[-1].baseid
    }
    params = getattr(getattr(item, "callspec", None), "params", {})
    texts = [f"{name}={params[name]!r}" if isinstance(params.get(name), str) else name for name in sorted(shared)]
    return Case(item.nodeid.partition("::")[0], item.name, " ".join(texts))


# Measured seconds


def read_run(path: Path) -> dict[str, dict[str, float]]:
    """Seconds of a run's tests, setup and teardown included: file to name of the test to seconds."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for case in ET.parse(path).getroot().iter("testcase"):
        if case.find("skipped") is None:
            found[case.attrib["classname"].replace(".", "/") + ".py"][case.attrib["name"]] = float(case.attrib["time"])
    return found


def summarized(seconds: Mapping[str, float]) -> dict[str, tuple[int, float]]:
    """Sum up the cases of each function. A case of more than ten seconds that takes more than twice as long as the
    median case keeps an entry of its own.
    """
    functions: dict[str, dict[str, float]] = defaultdict(dict)
    for name, of_case in seconds.items():
        functions[name.partition("[")[0]][name] = of_case
    found = {}
    for function, of_cases in functions.items():
        median = sorted(of_cases.values())[(len(of_cases) - 1) // 2]
        long = {name: of_case for name, of_case in of_cases.items() if of_case > max(10.0, 2 * median)}
        long = {} if len(of_cases) == 1 else long
        others = [of_case for name, of_case in of_cases.items() if name not in long]
        found[function] = (len(others), round(sum(others) / len(others), 2))
        found |= {name: (1, round(of_case, 2)) for name, of_case in long.items()}
    return found


def renewed(durations: Durations, measured: Mapping[str, Mapping[str, float]]) -> Durations:
    """Replace the seconds of all functions that were measured, and leave out functions that no longer exist."""
    found = {}
    for file in sorted({*durations, *measured}):
        text = (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).exists() else ""
        new = summarized(measured.get(file, {}))
        old = {
            name: value
            for name, value in durations.get(file, {}).items()
            if name.partition("[")[0] not in new and f"def {name.partition('[')[0]}(" in text
        }
        if tests := old | new:
            found[file] = dict(sorted(tests.items()))
    return found


def write(durations: Durations, path: Path = DURATIONS) -> None:
    """Write the measured seconds, one line for each file."""
    lines = [f"{json.dumps(file)}: {json.dumps(tests)}" for file, tests in durations.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the part of a commit, or renew the measured seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("part", help="print K/N for a commit").add_argument("commit", help="hash of the commit")
    renew = commands.add_parser("renew", help="renew tests/durations.json")
    renew.add_argument("runs", nargs="+", type=Path, metavar="RUN.xml", help="what `pytest --junitxml` has written")
    options = parser.parse_args(arguments)
    durations = load()
    if options.command == "part":
        parts = num_parts(durations)
        print(f"{part_of(options.commit, parts)}/{parts}")
        return
    measured: dict[str, dict[str, float]] = defaultdict(dict)
    for run in options.runs:
        for file, seconds in read_run(run).items():
            measured[file] |= seconds
    write(renewed(durations, measured))


if __name__ == "__main__":
    sys.exit(main())
