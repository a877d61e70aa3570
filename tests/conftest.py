"""Settings and fixtures of all tests: the pool of ranks, the seeds, and a browser."""

import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.ranks import RankPool

pytest_plugins = ["tests.alone", "tests.slices"]

# A shell starts background jobs with SIGINT ignored, and programs that the tests start would inherit this.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Several processes run the tests, each with as many threads as there are cores. By default, an idle thread spins on a
# core that another process needs. OpenMP reads this variable when PyTorch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# The time of an example says nothing about the code: the machine may be busy, and the first example fills caches.
hypothesis.settings.register_profile("project", deadline=None)
hypothesis.settings.load_profile("project")


def pytest_configure(config: pytest.Config) -> None:
    """Choose what the tests see of the machine, before any test is collected."""
    _hide_gpus(config)
    _put_files_into_memory(config)


def _hide_gpus(config: pytest.Config) -> None:
    """Hide the machine's GPUs from all tests but those of `make test-gpu`. The device of a run is `auto` by default,
    and most tests expect the figures of a CPU.
    """
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


PROGRAMS = frozenset({"benchmarks", "cli", "docs", "installation", "launch", "serving"})
"""Folders of tests that start programs. Their files have few tests, and each test takes many seconds."""


MEMORY = Path("/dev/shm")
ROOM = 8 << 30
"""Bytes that must be free in `MEMORY`. All tests together write about 1 GB."""


def _put_files_into_memory(config: pytest.Config) -> None:
    """Put the files of the tests into memory if there is room. Crosscut flushes what it writes to the disk, so the
    tests of corpora and checkpoints would wait for a slow disk thousands of times.
    """
    if config.option.basetemp or not MEMORY.is_dir():
        return
    disk = os.statvfs(MEMORY)
    if disk.f_bavail * disk.f_frsize >= ROOM and not disk.f_flag & os.ST_NOEXEC:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every case of `one_in(n)` as slow, except one in n. If several processes run the tests, one file at a time
    each, put the long files first, so that all processes end at about the same time.
    """
    num_cases = Counter[tuple[Path, str]]()
    for item in items:
        chosen = item.get_closest_marker("one_in")
        if chosen and isinstance(item, pytest.Function) and not item.get_closest_marker("slow"):
            of_test = (item.path, item.originalname)
            if num_cases[of_test] % chosen.args[0]:
                item.add_marker("slow")
            num_cases[of_test] += 1
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a GPU (make test-gpu)"))
    if not hasattr(config, "workerinput"):
        return
    root = Path(__file__).parent
    num_tests = Counter(item.path for item in items)
    items.sort(
        key=lambda item: (item.path.relative_to(root).parts[0] not in PROGRAMS, -num_tests[item.path], item.path)
    )


def _has_gpu() -> bool:
    """Whether PyTorch finds a GPU that is not hidden from the tests."""
    import torch

    return torch.cuda.is_available()


def pytest_collection_finish() -> None:
    """Exclude the thousands of tests and imported modules from Python's garbage collection. Otherwise, every full
    collection would go through them.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)  # after the processes that run the tests have ended
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Remove the files of the tests from memory if no test failed. Pytest could remove the folder of each test after
    the test, but a server that forks ranks may still have to start in that folder.
    """
    if hasattr(session.config, "workerinput") or exitstatus not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        return
    folder = session.config._tmp_path_factory._basetemp  # type: ignore[attr-defined]
    if folder is not None and folder.is_relative_to(MEMORY):
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Pool of four ranks for tests on several ranks. The ranks start with the first job (see `tests/ranks.py`)."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Seed PyTorch before every test, so that a test draws the same numbers whichever tests ran before it. Does nothing
    if PyTorch is not imported.

    If several processes run the tests, each process computes with one thread. With more threads than cores, every
    operator would wait for a thread that has no core.
    """
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        torch.manual_seed(0)
        if "PYTEST_XDIST_WORKER" in os.environ and torch.get_num_threads() > 1:
            torch.set_num_threads(1)
    if "crosscut.training.watching.throughput" in sys.modules:
        import tests.brief  # noqa: F401


@pytest.fixture
def forked_ranks() -> None:
    """Start the server that forks the ranks of `crosscut.launch`, with the modules that most tests need imported."""
    from tests.nursery import forked

    forked()


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder with published files that the project may not ship. The environment variable `CROSSCUT_SHARED` names the
    folder. Without it, the test is skipped.
    """
    if "CROSSCUT_SHARED" not in os.environ:
        pytest.skip("CROSSCUT_SHARED names no folder with published files")
    return Path(os.environ["CROSSCUT_SHARED"])


@pytest.fixture(scope="session")
def smollm2(shared: Path) -> Path:
    """The folder of SmolLM2-135M-Instruct, kept between sessions: making it takes minutes."""
    folder = Path(tempfile.gettempdir()) / "smollm2"
    subprocess.run(["bash", str(shared / "tools" / "make_smollm2.sh"), str(folder)], check=True, timeout=1200)
    return folder


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A real browser. The test is skipped if no browser is installed."""
    program = os.environ.get("CROSSCUT_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"no browser is found: none of {', '.join(BROWSERS)} is installed, nor is CROSSCUT_BROWSER set")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()
