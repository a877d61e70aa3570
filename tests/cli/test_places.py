"""A path that cannot be used is told in one message, whichever command gets it."""

import sys
from pathlib import Path

import pytest

from tests.cli.conftest import TINY

LONG = "x" * 100_000

COMMANDS = {
    "new": ("new", "{}", "--gpus", "none", "--size", "3M", "--tokens", "1M", "--data", "demo"),
    "train": ("train", "{}"),
    "train text": ("train", *TINY, "data.text={}", "output.folder=run"),
    "train tokens": ("train", *TINY, "data.tokens={}", "output.folder=run"),
    "train output": ("train", *TINY, "output.folder={}"),
    "train checkpoints": ("train", *TINY, "checkpoint.folder={}", "output.folder=run"),
    "train initial": ("train", "training.initialize_from={}", "output.folder=run"),
    "prepare": ("prepare", "{}"),
    "prepare output": ("prepare", *TINY, "output.folder={}"),
    "verify": ("verify", "{}"),
    "evaluate": ("evaluate", "{}", "--text", "a"),
    "evaluate text": ("evaluate", ".", "--text", "{}"),
    "evaluate output": ("evaluate", ".", "--text", "a", "--output", "{}"),
    "evaluate tasks": ("evaluate", ".", "--harness", "a", "--harness-folder", "{}"),
    "generate": ("generate", "{}"),
    "generate prompts": ("generate", ".", "--prompts", "{}"),
    "serve": ("serve", "{}"),
    "inspect": ("checkpoint", "inspect", "{}"),
    "check": ("checkpoint", "verify", "{}"),
    "diff": ("checkpoint", "diff", "{}", "."),
    "export": ("checkpoint", "export", "{}", "out"),
    "repair": ("checkpoint", "repair", "{}"),
    "plan": ("plan", "{}"),
    "plan file": ("plan", "--write", "{}"),
    "plan gpu": ("plan", "--gpu", "{}"),
    "calibrate": ("plan", "--calibrate", "{}"),
    "study": ("study", "scaling", "--output", "{}"),
}


@pytest.fixture
def fail(crosscut_here, tmp_path, monkeypatch):
    """Runs a command that must fail at once; gives its message."""
    monkeypatch.chdir(tmp_path)

    def run(command: str, place: str) -> str:
        result = crosscut_here(*(word.replace("{}", place) for word in COMMANDS[command]), status=2)
        (message,) = result.stderr.strip().splitlines()[-1:]
        assert len(message) < 1500
        return str(message)

    return run


@pytest.mark.parametrize("command", COMMANDS)
def test_place_of_100_000_characters_is_told(fail, command):
    message = fail(command, LONG)
    known = (
        "crosscut: `",
        "crosscut: The run's folder must be ",
        "crosscut: Exactly one model must be given",
        "Error: ",
    )
    assert message.startswith(known), message


@pytest.mark.parametrize("place", [f"a/{'y' * 300}/b", "z/" * 3000, "loop/a"], ids=["long name", "deep", "loop"])
@pytest.mark.parametrize("command", ["inspect", "repair", "generate", "train", "train output"])
def test_place_that_the_system_refuses_is_told(fail, tmp_path, place, command):
    (tmp_path / "loop").symlink_to("loop")
    assert fail(command, place).startswith(("crosscut: `", "crosscut: The run's folder must be "))


def read_only(tmp_path: Path) -> Path:
    """A folder in which nothing can be created, not even by root: there is a file in its place."""
    (tmp_path / "read-only").touch()
    return tmp_path / "read-only"


@pytest.mark.parametrize(
    ("settings", "told"),
    {
        "output.folder={}/run": "The run's folder must be a folder, but `{}/run` is a file, or a path inside a file.",
        "output.folder=run checkpoint.folder={}/checkpoints": "The run's folder must be a folder, but `{}/checkpoints` "
        "is a file, or a path inside a file.",
        "output.folder=/proc/run": "The run's folder must be writable, but `/proc/run` is not: ",
        "output.folder=run checkpoint.folder=/proc": "The run's folder must be writable, but `/proc` is not: ",
        "output.folder=run data.tokens={}/tokens": "`{}/tokens` must be a path where a folder can be created",
    }.items(),
)
@pytest.mark.usefixtures("no_launch")
def test_training_into_a_read_only_folder_is_told_before_it_starts(
    crosscut_here, book, tmp_path, monkeypatch, settings, told
):
    if "/proc" in settings and sys.platform != "linux":
        pytest.skip("only Linux has /proc, where nothing can be created")
    monkeypatch.chdir(tmp_path)
    place = str(read_only(tmp_path))
    result = crosscut_here("train", *TINY, f"data.text={book}", *settings.replace("{}", place).split(), status=2)
    assert result.stderr.strip().splitlines()[-1].startswith(f"crosscut: {told.replace('{}', place)}")
    assert not (tmp_path / "run" / "tokens").exists(), "nothing was prepared"
