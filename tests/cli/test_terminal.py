"""On a terminal, text of others cannot hide, rename or type anything; with `--json`, errors are JSON."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

import pytest

from crosscut.config import load_run
from tests.cli.conftest import TINY, handlers_restored, run_python

EVIL = "\x1b]0;owned\x07\x9b2J\u202e"
END = b"<end>"
SHOWN = "\\x1b]0;owned\\x07\\x9b2J\\u202e"


def read_all(leader: int, pieces: list[bytes]) -> None:
    while not (pieces and pieces[-1].endswith(END)):
        pieces.append(os.read(leader, 1 << 16))


@pytest.fixture
def on_terminal(monkeypatch, forked_ranks) -> Callable[..., str]:
    """Runs `crosscut` in this process with a pseudo-terminal as its output and error stream; gives what it shows."""
    from crosscut.cli import main

    def run(*arguments: str, terminal: str = "xterm") -> str:
        monkeypatch.setenv("TERM", terminal)
        monkeypatch.delenv("NO_COLOR", raising=False)
        leader, follower = os.openpty()
        monkeypatch.setattr(sys, "argv", ["crosscut", *arguments])
        monkeypatch.setenv("COLUMNS", "200")
        pieces: list[bytes] = []
        reader = threading.Thread(target=lambda: read_all(leader, pieces))
        reader.start()
        with os.fdopen(follower, "w") as stream:
            monkeypatch.setattr(sys, "stdout", stream)
            monkeypatch.setattr(sys, "stderr", stream)
            with handlers_restored(), suppress(SystemExit):
                main()
            stream.flush()
            os.write(follower, END)
            reader.join()
        os.close(leader)
        return b"".join(pieces).decode()

    return run


@pytest.mark.parametrize(
    "command", ["plan --list", "plan --list --json", "--help", "plan --help", "--version", "plan --model no --json"]
)
def test_a_command_ends_quietly_if_nobody_reads_its_output(monkeypatch, capfd, command):
    """As another program that SIGPIPE ends: with status 141 in a shell, and without a word."""
    from crosscut.cli import main

    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, "argv", ["crosscut", *command.split()])
    with os.fdopen(writer, "w") as stream, handlers_restored(), pytest.raises(SystemExit) as stopped:
        monkeypatch.setattr(sys, "stdout", stream)
        main()
    assert (stopped.value.code, *capfd.readouterr()) == (141, "", "")


@pytest.mark.slow  # a process of its own and two ranks; the quick test above has the same rule in one process
def test_a_training_ends_quietly_if_nobody_reads_its_output(book, tmp_path):
    settings = (*TINY, f"data.text={book}", f"output.folder={tmp_path / 'run'}", "layout.tensor=2")
    with subprocess.Popen(
        [sys.executable, "-m", "crosscut", "train", *settings], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        told = process.stderr.read().decode()
    assert process.returncode == 141
    assert "exited with code" not in told
    assert "Traceback" not in told


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, book):
    from crosscut.training import run_training

    folder = tmp_path_factory.mktemp("terminal")
    settings = [*TINY, f"data.text={book}", f"data.tokens={folder}/tokens", f"output.folder={folder}/run"]
    run_training(
        load_run({"output": {"sample_prompt": EVIL}}, [*settings, "training.steps=2", "output.sample_tokens=0"])
    )
    return folder / "run"


def test_argument_in_an_error_is_made_visible(on_terminal, tmp_path):
    for arguments in (("train", f"{tmp_path}/{EVIL}"), ("plan", f"--{EVIL}"), ("generate", f"{tmp_path}/{EVIL}")):
        shown = on_terminal(*arguments)
        assert SHOWN in shown
        assert EVIL not in shown


def test_prompt_of_generate_is_made_visible(on_terminal, run_folder):
    shown = on_terminal("generate", str(run_folder), "--prompt", EVIL, "--tokens", "3")
    assert SHOWN in shown
    assert "\x1b]" not in shown


def test_names_in_a_checkpoint_are_made_visible(on_terminal, run_folder, tmp_path):
    shutil.copytree(run_folder, tmp_path / EVIL)
    shown = on_terminal("checkpoint", "inspect", str(tmp_path / EVIL))
    assert "\\x1b]0;owned" in shown  # rich itself removes the bell
    assert "\\x9b2J\\u202e" in shown
    assert "\x1b]" not in shown
    assert "\x9b" not in shown


def test_figures_of_a_run_have_six_digits_on_a_terminal(on_terminal, crosscut_here, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1234567, "loss": 0.12345678}\n')
    assert crosscut_here("metrics", str(tmp_path), status=0).stdout.split() == ["step,loss", "1234567,0.12345678"]
    assert on_terminal("metrics", str(tmp_path)).split()[:2] == ["step,loss", "1234567,0.123457"]


def test_names_of_files_of_prepare_are_made_visible(on_terminal, tmp_path, book):
    text = tmp_path / f"[bold]{EVIL}.txt"
    text.write_bytes(book.read_bytes())
    shown = on_terminal("prepare", *TINY, f"data.text={text}", f"data.tokens={tmp_path}/{EVIL}")
    assert SHOWN in shown
    assert "\x1b]" not in shown


def test_generated_text_in_a_pipe_is_exact(crosscut_here, run_folder):
    assert crosscut_here("generate", str(run_folder), "--prompt", EVIL, "--tokens", "3").stdout.startswith(EVIL)


JSON_ERRORS = {
    "place": (("checkpoint", "inspect", "nowhere", "--json"), "CheckpointError"),
    "model": (("generate", "nowhere", "--json"), "ConfigError"),
    "usage": (("evaluate", "--json"), "MissingParameter"),
    "unknown option": (("plan", "--json", "--nothing"), "NoSuchOption"),
    "value": (("plan", "--model", "8.3B", "--gpus", "x", "--json"), "BadParameter"),
    "path": (("checkpoint", "verify", "--json", "x" * 5000), "OSError"),
    "bytes": (("verify", "--json", "run-\udcff.toml"), "ConfigError"),
}


@pytest.mark.parametrize(("arguments", "kind"), JSON_ERRORS.values(), ids=JSON_ERRORS)
def test_error_of_a_command_with_json_is_json(crosscut_here, tmp_path, monkeypatch, arguments, kind):
    monkeypatch.chdir(tmp_path)
    result = crosscut_here(*arguments, status=2)
    assert set(error := json.loads(result.stdout)["error"]) == {"kind", "message"}
    assert error["kind"] == kind
    assert result.stderr == ""


@pytest.mark.parametrize(
    "arguments",
    [("train", "a\udcff.toml"), ("train", "output.folder=\udcff"), ("evaluate", ".", "--text", "\udcc3(")],
    ids=["file", "override", "text"],
)  # fmt: skip
def test_argument_that_is_not_utf8_is_told(crosscut_here, arguments):
    result = crosscut_here(*arguments, status=2)
    assert result.stderr.startswith("crosscut: Every argument must be UTF-8 text, but `")
    assert "is not. Type it in UTF-8, or rename the file." in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [("train", "output.folder=\0"), ("generate", ".", "--prompt-file", "a\0b"), ("checkpoint", "verify", "\0")],
    ids=" ".join,
)
def test_argument_with_nul_is_told(crosscut_here, arguments):
    result = crosscut_here(*arguments, status=2)
    assert result.stderr.startswith("crosscut: An argument must not contain a NUL character, but is ")


@pytest.mark.parametrize("command", [("train",), ("prepare",), ("study", "measure")], ids=" ".join)
def test_config_with_nul_is_told(crosscut_here, command, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('model.preset = "gpt2-small"\noutput.folder = "a\\u0000b"\n')
    result = crosscut_here(*command, str(file), status=2)
    assert "`output.folder` must not contain a NUL character, but is 'a\\x00b'. Remove the character." in result.stderr


def test_bytes_that_are_not_utf8_are_told_by_the_real_command():
    result = run_python("-m", "crosscut", "generate", ".", "--prompt", os.fsdecode(b"a\xffb"))
    assert result.returncode == 2
    assert result.stderr == (
        "crosscut: Every argument must be UTF-8 text, but `a\\xffb` is not. Type it in UTF-8, or rename the file.\n"
    )


def test_text_in_an_unexpected_error_moves_no_cursor(crosscut_here, monkeypatch):
    from crosscut.cli.main import commands

    def fail(*_arguments: object, **_options: object) -> NoReturn:
        raise RuntimeError(EVIL)

    monkeypatch.setattr(commands, "main", fail)
    result = crosscut_here("plan", status=1)
    assert f"RuntimeError: {SHOWN}" in result.stderr
    assert result.stderr.startswith("Traceback")
    assert "\x1b" not in result.stderr
