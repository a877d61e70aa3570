"""A limit below a second holds for the quickest of several tries: a busy machine stops any one of them for as long."""

import re
from pathlib import Path

import pytest

from tests.timing import in_a_quiet_moment

TESTS = Path(__file__).parent
SINGLE = re.compile(r"assert .*\b(process_time|perf_counter|thread_time|monotonic)\(\) - \w+ < 0?\.\d")


def single_tries(code: str) -> list[str]:
    return [line.strip() for line in code.splitlines() if SINGLE.search(line)]


def test_no_short_limit_is_for_a_single_try() -> None:
    found = {str(path.relative_to(TESTS)): single_tries(path.read_text()) for path in TESTS.rglob("*.py")}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_a_single_try_is_seen() -> None:
    line = "assert time.process_time() - began < " + "0.2, name"
    assert single_tries(f"    {line}\n") == [line]
    assert single_tries("    assert time.process_time() - began < 2\n") == []


def test_a_disturbed_comparison_is_repeated_and_a_wrong_one_fails() -> None:
    tries = []

    @in_a_quiet_moment
    def right_at(number: int) -> None:
        tries.append(number)
        assert len(tries) == number

    right_at(3)
    assert len(tries) == 3
    with pytest.raises(AssertionError):
        right_at(3)
    assert len(tries) == 3 + 10
