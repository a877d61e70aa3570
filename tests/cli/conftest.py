"""A small text file and a way to run the real command."""

import multiprocessing.process
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from crosscut.data import read_documents
from crosscut.launch.server import PassedStream
from tests.nursery import forked

TINY = (
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_heads=4",
    "model.max_sequence_length=64",
    "data.vocab_size=300",
    "training.steps=4",
    "training.batch_size=4",
    "training.sequence_length=32",
    "training.validation_sequences=8",
    "training.validate_every=2",
    "checkpoint.every=2",
    "optimizer.warmup_steps=1",
    "output.sample_tokens=5",
)

# The loopback device has this name on Linux only; elsewhere gloo finds an interface by itself.
ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}


@pytest.fixture(scope="session")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain text file of 150 KB."""
    path = tmp_path_factory.mktemp("book") / "book.txt"
    text = next(iter(read_documents(["builtin:state-of-the-union"], text_key="text"))).text
    paragraphs = [text[i : i + 500] for i in range(0, len(text), 500)]
    path.write_text("\n\n".join(paragraphs * (150_000 // len(text) + 1)), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, book: Path) -> Path:
    """The folder of a run of four steps on one rank of this process, to be read only."""
    from crosscut.config import load_run
    from crosscut.training import run_training

    folder = tmp_path_factory.mktemp("trained") / "run"
    faster = "optimizer.learning_rate=0.05"  # so that the checkpoints differ
    run_training(load_run({}, [*TINY, f"data.text={book}", f"output.folder={folder}", faster]))
    return folder


@pytest.fixture
def crosscut() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Function that runs `crosscut` with arguments, in a process of its own. It must end with `status`, if given."""

    def run(*arguments: str, status: int | None = None, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        done = run_python("-m", "crosscut", *arguments, timeout=timeout)
        assert status in (None, done.returncode), done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def crosscut_here(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], forked_ranks: None
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Function that runs `crosscut` with arguments in this process, which has imported torch. The ranks are forks. The
    command must end with `status`, if given.
    """
    from crosscut.cli import main

    def run(*arguments: str, status: int | None = None) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["crosscut", *arguments])
        ended: object = 0
        capfd.readouterr()
        try:
            with handlers_restored():
                main()
        except SystemExit as stopped:
            ended = stopped.code
        assert isinstance(ended, int)
        done = subprocess.CompletedProcess(arguments, ended, *capfd.readouterr())
        assert status in (None, ended), done.stdout + done.stderr
        return done

    return run


class Forked:
    """`crosscut` with arguments in a process of its own: a fork that need not import torch and leads its own group."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._files = (folder / "stdout", folder / "stderr")
        with ExitStack() as opened:
            files = [opened.enter_context(file.open("wb")) for file in self._files]
            streams = [opened.enter_context(PassedStream(file.fileno())) for file in files]
            self.process: BaseProcess = forked().Process(target=_run_in_fork, args=(arguments, streams))
            self.process.start()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def ended(self, timeout: float = 60) -> tuple[int | None, str, str]:
        """Wait for the end; the exit status, and what went to both streams."""
        self.process.join(timeout)
        output, errors = (file.read_text() for file in self._files)
        return self.process.exitcode, output, errors


def _run_in_fork(arguments: tuple[str, ...], streams: list[int]) -> None:
    from crosscut.cli import main

    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a new program
    os.setsid()
    os.dup2(streams[0], 1)
    os.dup2(streams[1], 2)
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]  # no rank of a launching process
    sys.argv = ["crosscut", *arguments]
    main()


@pytest.fixture
def fork(tmp_path: Path) -> Iterator[Callable[..., Forked]]:
    """Function that starts `crosscut` with arguments in a fork. What still runs at the end of the test is killed."""
    started: list[Forked] = []

    def start(*arguments: str) -> Forked:
        started.append(Forked(tmp_path, *arguments))
        return started[-1]

    yield start
    for command in started:
        if command.process.is_alive():
            os.killpg(command.pid, signal.SIGKILL)
        command.process.join()


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process of a rank may start."""

    def refuse(*_arguments: object, **_options: object) -> None:
        raise AssertionError("a process was about to start")

    monkeypatch.setattr("crosscut.launch.door.launch", refuse)


@contextmanager
def handlers_restored() -> Iterator[None]:
    """Context for `crosscut` in this process that restores the handlers of the signals that the command handles."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def run_python(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=timeout, env=environment, check=False
    )


def ranks_of(pid: int) -> list[int]:
    """Process numbers of the ranks of a running `crosscut`: the forks of the server that `crosscut` has started. Needs
    /proc.
    """
    servers = [child for child in _children(pid) if b"forkserver" in Path(f"/proc/{child}/cmdline").read_bytes()]
    return [rank for server in servers for rank in _children(server)]


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
