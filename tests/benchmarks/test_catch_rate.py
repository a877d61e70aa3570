"""One-line faults: how they are drawn, planted and found."""

import ast
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import called
from benchmarks.called import CallMap, function_at
from benchmarks.catch_rate import Fault, draw, faults_of, files_of_tests, judge
from tests.benchmarks.conftest import write_files

SOURCE = '''
def price(count: int, *, is_member: bool = True) -> int:
    """Price of `count` tickets, 1 each."""
    if count > 10 and is_member:
        return count * 2  # a group
    total = [0]
    total.append(count)
    return sum(total, start=-1)
'''


def test_every_fault_is_another_program_on_one_line() -> None:
    faults = list(faults_of("crosscut/prices.py", SOURCE))
    programs = [fault.planted(SOURCE) for fault in faults]
    assert SOURCE not in programs
    assert len(set(programs)) == len(programs)
    for program in programs:
        ast.parse(program)
        assert sum(old != new for old, new in zip(SOURCE.split("\n"), program.split("\n"), strict=True)) == 1


@pytest.mark.parametrize(
    "line",
    [
        "    if count >= 10 and is_member:",
        "    if count > 10 or is_member:",
        "    if not (count > 10 and is_member):",
        "    if count > 11 and is_member:",
        "        return count + 2  # a group",
        "    pass",
        "def price(count: int, *, is_member: bool = False) -> int:",
    ],
)
def test_kinds_of_faults(line: str) -> None:
    assert line in [fault.after for fault in faults_of("crosscut/prices.py", SOURCE)]


def test_a_fault_follows_its_line_when_the_file_changes() -> None:
    fault = next(fault for fault in faults_of("crosscut/prices.py", SOURCE) if "append" in fault.before)
    assert fault.planted("# new\n# lines\n" + SOURCE).split("\n")[8] == "    pass"
    with pytest.raises(ValueError, match=r"must still have the line `total\.append"):
        fault.planted(SOURCE.replace("append", "extend"))


def test_a_draw_is_repeatable_and_visits_every_room(tmp_path: Path) -> None:
    rooms = ["shop"] * 6 + ["till"] * 2 + ["hall"]
    write_files(tmp_path, {f"crosscut/{room}/file_{number}.py": SOURCE for number, room in enumerate(rooms)})
    drawn = draw(tmp_path, seed=3, count=12)
    assert drawn == draw(tmp_path, seed=3, count=12) != draw(tmp_path, seed=4, count=12)
    assert len(set(drawn)) == 12
    assert Counter(fault.room for fault in drawn) == {"shop": 7, "till": 3, "hall": 2}
    with pytest.raises(SystemExit, match="must be at least 3, one for each room, but is 2"):
        draw(tmp_path, seed=3, count=2)


@pytest.mark.slow  # starts pytest seven times, and repeats no other test
def test_tests_find_a_fault_and_a_flaky_test_does_not_count(tmp_path: Path) -> None:
    files = {
        "crosscut/shop/__init__.py": "",
        "crosscut/shop/prices.py": SOURCE,
        "tests/shop/test_prices.py": "from crosscut.shop.prices import price\n\ndef test_group():\n"
        "    assert price(12) == 24\n",
        "tests/test_flaky.py": "def test_flaky():\n    assert False\n",
    }
    write_files(tmp_path, files)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    faults = {fault.after: fault for fault in faults_of("crosscut/shop/prices.py", SOURCE)}
    found = judge(faults["        return count + 2  # a group"], tmp_path)
    assert (found.test, found.own_room) == ("tests/shop/test_prices.py::test_group", True)
    assert judge(faults["    pass"], tmp_path).test == ""
    assert (tmp_path / "crosscut/shop/prices.py").read_text() == SOURCE


def test_a_line_belongs_to_the_innermost_function_around_it() -> None:
    text = "x = 1\n\n\ndef outer(a=2):\n    def inner():\n        return a\n\n    return inner\n"
    assert [function_at(text, line) for line in (1, 4, 6, 8)] == [0, 4, 5, 4]


@pytest.mark.slow  # starts pytest, and repeats no other test
def test_map_has_the_calls_of_all_processes_of_a_test(tmp_path: Path) -> None:
    """A function is called in the tests' process, a thread, a fork, a new process, at the import, or nowhere."""
    names = ("here", "thread", "fork", "process", "at_import", "nowhere")
    package = "".join(f"def {name}():\n    return 1\n" for name in names)
    start = "import subprocess, sys, threading, os\nfrom crosscut.shop.prices import fork, here, thread\n"
    files = {
        "crosscut/__init__.py": "",
        "crosscut/cli/main.py": "import crosscut.shop.prices",
        "crosscut/shop/prices.py": f"{package}at_import()\n",
        "benchmarks/called.py": Path(called.__file__).read_text(),
        "tests/nursery.py": "_IMPORTED = ()\n",
        "tests/shop/test_one.py": f"{start}def test_one():\n    assert here() == 1\n"
        "    threading.Thread(target=thread).start()\n    os.fork() or (fork(), os._exit(0))\n    os.wait()\n",
        "tests/shop/test_two.py": f"{start}def test_two():\n"
        "    program = 'from crosscut.shop.prices import process; process()'\n"
        "    subprocess.run([sys.executable, '-c', program], check=True)\n",
        "tests/test_failing.py": "def test_failing():\n    assert False\n",
        "tests/docs/test_page.py": "def test_page():\n    pass\n",
    }
    write_files(tmp_path, files)
    everything = files_of_tests(tmp_path)
    found = CallMap.of(tmp_path, everything, 2)
    assert found.always == ["tests/docs/test_page.py", "tests/test_failing.py"]
    of_function = {
        name: found.files_for("crosscut/shop/prices.py", package, 2 * number + 2, everything)
        for number, name in enumerate(names)
    }
    one, two = ([*found.always, f"tests/shop/test_{name}.py"] for name in ("one", "two"))
    expected = [one, one, one, two, everything, found.always]
    assert {name: sorted(paths) for name, paths in of_function.items()} == {
        name: sorted(paths) for name, paths in zip(names, expected, strict=True)
    }


def test_a_file_of_the_package_itself_is_a_room() -> None:
    assert Fault("crosscut/__main__.py", 1, "a", "b").room == "crosscut"
