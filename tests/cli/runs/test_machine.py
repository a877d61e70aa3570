"""`crosscut doctor` without a run: what this machine has, what a run would use, and what is missing."""

import platform

import pytest
import torch
from click.testing import CliRunner

from crosscut.cli.runs.doctor import doctor
from crosscut.config.system import extras
from crosscut.config.system.machine import available_cores


def asked() -> dict[str, str]:
    """The rows that the command prints, by name, with the lines of a row joined."""
    ended = CliRunner().invoke(doctor, [], catch_exceptions=False)
    assert ended.exit_code == 0
    rows: dict[str, str] = {}
    for line in ended.output.splitlines():
        name, _, text = line.strip("│")[2:].partition("   ")
        if line.startswith("│") and name:
            rows[name] = text.strip()
        elif rows and line.startswith("│"):
            rows[list(rows)[-1]] += " " + text.strip()
    return {name: text.strip() for name, text in rows.items()}


def test_the_machine_and_what_a_run_would_use_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    rows = asked()
    assert rows["python"] == platform.python_version()
    assert rows["processor"].endswith(f", {available_cores()} cores")
    assert rows["torch"].startswith(torch.__version__)
    assert (
        rows["a run uses"] == ("cuda, with nccl" if torch.cuda.is_available() else "cpu, with gloo") + " between ranks"
    )
    assert rows["training.compile"].startswith("off, because TORCH_COMPILE_DISABLE or")
    if not torch.cuda.is_available():
        assert rows["GPU"].startswith("none is found")


def test_what_an_extra_lacks_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "_is_installed", lambda package: package != "s3fs")
    rows = asked()
    assert rows["serve"] == "`serve`: installed"
    assert "s3fs missing" in rows["s3"]
    assert rows["s3"].endswith("-m pip install -e '.[s3]'")
    assert all(text.endswith(": installed") for name, text in rows.items() if name in extras.EXTRAS and name != "s3")
