"""What all tests share: the kept ranks, and a browser."""

import gc
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.ranks import RankPool

# A shell has its background jobs ignore SIGINT, and so would what the tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Several processes run the tests, each with as many threads as there are cores. A thread that has nothing to do would
# spin, on a core that another process needs. OpenMP reads this when PyTorch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# How long an example takes says nothing of the code: the machine may be busy, and the first one fills caches.
hypothesis.settings.register_profile("project", deadline=None)
hypothesis.settings.load_profile("project")


PROGRAMS = frozenset({"benchmarks", "cli", "docs", "launch", "serving"})
"""Folders of tests that start programs: few tests in a file, of many seconds each."""


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark cases of `one_in(n)` as slow. Where several processes run the tests, a file each, begin with the long files,
    so that all end together.
    """
    num_cases = Counter[tuple[Path, str]]()
    for item in items:
        chosen = item.get_closest_marker("one_in")
        if chosen and isinstance(item, pytest.Function) and not item.get_closest_marker("slow"):
            of_test = (item.path, item.originalname)
            if num_cases[of_test] % chosen.args[0]:
                item.add_marker("slow")
            num_cases[of_test] += 1
    if not hasattr(config, "workerinput"):
        return
    root = Path(__file__).parent
    num_tests = Counter(item.path for item in items)
    items.sort(
        key=lambda item: (item.path.relative_to(root).parts[0] not in PROGRAMS, -num_tests[item.path], item.path)
    )


def pytest_collection_finish() -> None:
    """Keep Python's garbage collector away from the thousands of collected tests and imported modules. Otherwise each
    full collection would go through all of them again.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Four processes for tests on several ranks; they start with the first job (see `tests/ranks.py`)."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test draws the same numbers, whichever run before it; where PyTorch is not imported, nothing draws.

    Where several processes run the tests, each computes with one thread. With more threads than cores, every operator
    would wait for a thread that has no core.
    """
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        torch.manual_seed(0)
        if "PYTEST_XDIST_WORKER" in os.environ and torch.get_num_threads() > 1:
            torch.set_num_threads(1)


@pytest.fixture
def forked_ranks() -> None:
    """The server that forks the ranks of `crosscut.launch` has imported what most tests need."""
    from tests.nursery import forked

    forked()


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
