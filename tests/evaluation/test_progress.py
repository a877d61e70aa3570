"""Size, forecast and progress of a task."""

import io
import sys

import pytest

from crosscut.evaluation import progress as module
from crosscut.evaluation.progress import Bar, progress
from tests.terminal import Terminal


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def told(clock: Clock, capsys: pytest.CaptureFixture[str], *batches: tuple[float, int], total: int) -> list[str]:
    """Lines about a task of `total` tokens, whose batches take so many seconds for so many tokens."""
    with progress(Bar("text", True, "7 windows"), total) as advance:
        assert capsys.readouterr().err == "text  7 windows\n", "the size comes first"
        for seconds, num_tokens in batches:
            clock.now += seconds
            advance(num_tokens)
    return capsys.readouterr().err.splitlines()


def test_the_forecast_leaves_out_the_start_of_the_device(clock, capsys):
    """100 tokens in the first 5 seconds, then 1,000 tokens/s: 8,900 tokens are left after 6 seconds."""
    assert told(clock, capsys, (5.0, 100), (0.5, 500), (0.5, 500), (1.0, 1000), total=10_000) == [
        "text  expected time 0:00:15"
    ]


def test_a_long_first_batch_is_measured_at_once(clock, capsys):
    assert told(clock, capsys, (20.0, 1000), total=10_000)[0] == "text  expected time 0:03:20"


def test_a_task_that_is_done_at_once_has_no_forecast(clock, capsys):
    assert told(clock, capsys, (0.1, 100), (0.1, 100), total=200) == []
    assert told(clock, capsys, (0.1, 100), (3.0, 100), total=200) == []


def test_the_bar_comes_after_the_forecast(clock, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    for name, value in {"TERM": "xterm", "COLUMNS": "120"}.items():
        monkeypatch.setenv(name, value)
    with progress(Bar("text", True, "7 windows"), 10_000) as advance:
        for seconds in (0.5, 0.5):
            clock.now += seconds
            advance(1000)
        assert terminal.lines() == ["text  7 windows"]
        clock.now += 0.5
        advance(1000)
        size, forecast, bar = terminal.lines()
        assert (size, forecast) == ("text  7 windows", "text  expected time 0:00:05")
        assert "30%" in bar
    assert terminal.lines() == ["text  7 windows", "text  expected time 0:00:05"]


def test_nothing_is_printed_where_nothing_is_shown(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress(Bar("text", False, "7 windows"), 10) as advance:
        advance(10)
    assert stream.getvalue() == ""
