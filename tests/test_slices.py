"""Every slow test is in exactly one part, parts take equally long, and tests that run alone run alone."""

import argparse
import json
import random
import subprocess
import threading
from pathlib import Path

import pytest

from tests import slices
from tests.alone import turn
from tests.slices import Case, divide

ROOT = Path(__file__).parents[1]


def planted(num_files: int = 40) -> tuple[list[Case], dict[str, dict[str, tuple[int, float]]]]:
    """Cases of short and long files, and measured seconds of most of them."""
    draw = random.Random(7)
    cases, durations = [], {}
    for file in range(num_files):
        path = f"tests/room{file % 5}/test_{file}.py"
        durations[path] = {}
        for test in range(draw.randint(1, 6)):
            count = draw.choice([1, 3, 30])
            shared = draw.choice(["", "", "trained"])
            cases += [
                Case(path, f"test_{test}[{case}]" if count > 1 else f"test_{test}", shared) for case in range(count)
            ]
            if draw.random() < 0.9:
                durations[path][f"test_{test}"] = (count, round(draw.uniform(0.1, 12), 2))
    return cases, durations


@pytest.mark.parametrize("parts", [1, 2, 7, 18])
def test_every_test_is_in_one_part_and_the_parts_take_equally_long(parts):
    cases, durations = planted()
    divided = divide(cases, parts, durations)
    assert sorted(place for part in divided for place in part) == list(range(len(cases)))
    seconds = [sum(slices.seconds_of(cases[place], durations) for place in part) for part in divided]
    assert max(seconds) <= 1.15 * sum(seconds) / parts


def test_the_parts_do_not_depend_on_the_run():
    cases, durations = planted()
    again = {file: dict(reversed(tests.items())) for file, tests in reversed(durations.items())}
    assert divide(cases, 7, durations) == divide(cases, 7, again)


def test_tests_with_one_fixture_stay_together_and_short_files_whole():
    trained = [Case("tests/a.py", f"test_{number}", "trained") for number in range(20)]
    short = [Case("tests/b.py", f"test_{number}") for number in range(3)]
    single = [Case("tests/c.py", f"test_{number}") for number in range(80)]
    durations = {"tests/a.py": {f"test_{number}": (1, 1.0) for number in range(20)}}
    durations["tests/b.py"] = {f"test_{number}": (1, 0.1) for number in range(3)}
    durations["tests/c.py"] = {f"test_{number}": (1, 1.0) for number in range(80)}
    cases = trained + single + short
    divided = divide(cases, 2, durations)
    files = [[cases[place].path for place in part] for part in divided]
    assert sorted(part.count("tests/a.py") for part in files) == [0, 20]
    assert sorted(part.count("tests/b.py") for part in files) == [0, 3]
    assert sorted(len(part) for part in divide(trained, 4, durations)) == [5, 5, 5, 5]


def test_a_commit_always_chooses_the_same_part_and_every_part_is_chosen(monkeypatch, capsys):
    draw = random.Random(1)
    hashes = [f"{draw.getrandbits(160):040x}" for _ in range(400)]
    chosen = [slices.part_of(commit, 18) for commit in hashes]
    assert set(chosen) == set(range(1, 19))
    assert chosen == [slices.part_of(commit, 18) for commit in hashes]
    monkeypatch.setattr(slices, "SECONDS_OF_A_PART", 180.0)
    monkeypatch.setattr(slices, "load", lambda: {"tests/a.py": {"test_a": (100, 36.0)}})
    slices.main(["part", "00000a"])
    assert capsys.readouterr().out == "1/10\n"


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "a/b", "1/3/5", "-1/3", ""])
def test_a_part_that_does_not_exist_is_refused(text):
    with pytest.raises(
        argparse.ArgumentTypeError, match=r"`--part` must be K/N with K from 1 to N, or extras, but is "
    ):
        slices.parsed_part(text)


def test_parts_of_collected_tests(tmp_path):
    """The option leaves the parts of a real collection, and keeps tests that need extras for a part of their own."""
    (tmp_path / "test_a.py").write_text(
        "import pytest\n\npytestmark = pytest.mark.slow\n\n\n"
        "@pytest.mark.parametrize('case', range(5))\ndef test_a(case):\n    pass\n\n\n"
        "@pytest.mark.extras\ndef test_b():\n    pass\n"
    )

    class Names:
        def pytest_collection_finish(self, session):
            found.append([item.name for item in session.items])

    found: list[list[str]] = []
    config = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-p", "no:cacheprovider", "--collect-only"]
    config += ["-p", "no:unraisableexception"]  # it would collect the garbage of all tests at the end of each call
    for part in ("1/2", "2/2", "extras"):
        pytest.main([*config, "-q", "-m", "slow", "--part", part, str(tmp_path)], plugins=[slices, Names()])
    assert sorted(found[0] + found[1]) == [f"test_a[{case}]" for case in range(5)]
    assert min(map(len, found)) >= 1
    assert found[2] == ["test_b"]


RUN = """<testsuites><testsuite>
<testcase classname="tests.room.test_a" name="test_many[one]" time="1.0"/>
<testcase classname="tests.room.test_a" name="test_many[two]" time="3.0"/>
<testcase classname="tests.room.test_a" name="test_many[long]" time="40.0"/>
<testcase classname="tests.room.test_a" name="test_skipped" time="0.1"><skipped/></testcase>
<testcase classname="tests.test_slices" name="test_one" time="0.5"/>
</testsuite></testsuites>"""


def test_seconds_are_renewed_from_a_run(tmp_path, monkeypatch):
    run, record = tmp_path / "run.xml", tmp_path / "durations.json"
    run.write_text(RUN)
    kept = "test_seconds_are_renewed_from_a_run"
    record.write_text(
        json.dumps({"tests/test_slices.py": {kept: [1, 0.7], "test_gone": [2, 9.0]}, "tests/gone.py": {}})
    )
    monkeypatch.setattr(slices, "load", lambda load=slices.load: load(record))
    monkeypatch.setattr(slices, "write", lambda durations, write=slices.write: write(durations, record))
    slices.main(["renew", str(run)])
    assert slices.load() == {
        "tests/room/test_a.py": {"test_many": (2, 2.0), "test_many[long]": (1, 40.0)},
        "tests/test_slices.py": {"test_one": (1, 0.5), kept: (1, 0.7)},
    }
    assert slices.seconds_of(Case("tests/room/test_a.py", "test_many[long]"), slices.load()) == 40.0
    assert slices.seconds_of(Case("tests/room/test_a.py", "test_many[new]"), slices.load()) == 2.0


def test_no_committed_time_fills_a_part():
    durations = slices.load()
    seconds = [of_case for tests in durations.values() for _, of_case in tests.values()]
    assert max(seconds, default=0) < slices.SECONDS_OF_A_PART


def test_a_test_that_runs_alone_waits_for_others_and_they_wait_for_it(tmp_path):
    running, seen = set[int](), list[tuple[int, ...]]()

    def run(number: int, entered: threading.Event, leave: threading.Event, *, alone: bool) -> None:
        with turn(tmp_path, alone=alone):
            running.add(number)
            seen.append(tuple(sorted(running)))
            entered.set()
            leave.wait(20)
            running.remove(number)

    entered, leave = ([threading.Event() for _ in range(4)] for _ in range(2))
    threads = [
        threading.Thread(target=run, args=(number, entered[number], leave[number]), kwargs={"alone": number == 2})
        for number in range(4)
    ]
    for number in (0, 1):  # tests that do not care run beside each other
        threads[number].start()
        assert entered[number].wait(20)
    threads[2].start()
    assert not entered[2].wait(0.2)
    threads[3].start()  # comes later, so it does not overtake the test that waits
    assert not entered[3].wait(0.2)
    for event in leave[:2]:
        event.set()
    assert entered[2].wait(20)
    assert not entered[3].wait(0.2)
    for event in leave[2:]:
        event.set()
    for thread in threads:
        thread.join(20)
    assert seen == [(0,), (0, 1), (2,), (3,)]


PROGRAM = """#!/bin/sh
echo "$(basename "$0") $*" >&2
case "$*" in "rev-parse HEAD") echo 00000a ;; *" part "*) echo 7/18 ;; "") echo times.xml ;; esac
"""


def test_ci_runs_one_slice_and_names_it(tmp_path):
    """`.ci/run` with programs that print how they were called."""
    for name in (".ci/run", "bin/make", "bin/git", "bin/mktemp", ".venv/bin/python"):
        program = tmp_path / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text((ROOT / name).read_text() if name == ".ci/run" else PROGRAM)
        program.chmod(0o755)
    environment = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", ".ci/run"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "slow tests: slice 7 of 18\n" in done.stdout
    assert done.stderr.splitlines() == [
        "make check",
        "mktemp ",
        "make test ARGS=--junitxml=times.xml",
        "git rev-parse HEAD",
        "python tests/slices.py part 00000a",
        "make test-slow PART=7/18",
        "python benchmarks/size.py --change --durations times.xml",
    ]
