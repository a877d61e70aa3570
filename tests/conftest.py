"""What all tests share: the kept ranks, and a browser."""

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import hypothesis
import pytest

from tests.nursery import start_forked
from tests.ranks import RankPool

# A shell has its background jobs ignore SIGINT, and so would what the tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says nothing of the code: the machine may be busy, and the first one fills caches.
hypothesis.settings.register_profile("project", deadline=None)
hypothesis.settings.load_profile("project")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Four processes for tests on several ranks; they start with the first job (see `tests/ranks.py`)."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that `crosscut.launch` starts are forks of a server that has imported torch (see `tests/nursery.py`)."""
    from crosscut.launch import processes

    monkeypatch.setattr(processes, "start_processes", partial(start_forked, processes.start_processes))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test draws the same numbers, whichever run before it; where PyTorch is not imported, nothing draws."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A real browser, or a skip where there is none."""
    program = os.environ.get("CROSSCUT_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"no browser is found: none of {', '.join(BROWSERS)} is installed, nor is CROSSCUT_BROWSER set")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()
