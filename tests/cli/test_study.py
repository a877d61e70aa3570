"""`crosscut study measure`: what it says of mistakes, and one real study of a tiny model."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import crosscut.scaling.study
from crosscut.cli.main import commands
from crosscut.config import ConfigError
from crosscut.scaling.results import Results
from tests.refusals import refusal

TINY = (
    "model.num_layers=2",
    "model.hidden_size=16",
    "model.num_heads=4",
    "model.vocab_size=300",
    "training.batch_size=2",
    "training.sequence_length=8",
    "training.device=cpu",
)


pytestmark = pytest.mark.usefixtures("two_cores")


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crosscut.scaling.study, "available_cores", lambda: 2)


def fails(*arguments: str) -> str:
    """The message of a study that must fail before a process starts."""
    return refusal(ConfigError, CliRunner().invoke, commands, ("study", "measure", *arguments), catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    {
        "--turns 0": "`--turns` must be at least 1, but is 0.",
        "--ranks 3": "`--ranks` must be a power of two above 1, but is 3. Try 2.",
        "--gpu h100-sxm": "`--gpu` must describe the measured device (cpu), but `h100-sxm` describes cuda. Write a "
        "file for this machine with `crosscut plan --calibrate FILE.toml`.",
        "training.compile=on model.dropout=0.1": '`training.compile` must be "auto" or "off" for this run, but is '
        '"on": dropout under tensor parallelism switches between two random streams, and a compiler cannot trace the '
        "switches (`model.dropout` is 0.1 and `layout.tensor` is 2). With layout.sequence_parallel=true, each rank has "
        'only one stream. Remove the cause, or set training.compile="auto".',
    }.items(),
)
@pytest.mark.usefixtures("no_launch")
def test_a_mistake_is_told_before_a_process_starts(arguments: str, message: str) -> None:
    assert fails(*TINY, *arguments.split()) == message


@pytest.mark.usefixtures("no_launch")
def test_a_study_under_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert fails(*TINY) == (
        "`crosscut study measure` must start its ranks itself, but torchrun has started several. Run the command "
        "without torchrun."
    )


@pytest.mark.slow
def test_a_study_is_trained_and_written(crosscut_here, tmp_path: Path) -> None:
    options = ("--ranks", "2", "--turns", "2", "--gpu", "laptop", "--output", str(tmp_path))
    assert "Strong scaling" in crosscut_here("study", "measure", *TINY, *options, status=0).stdout
    results = Results.from_json((tmp_path / "scaling-measured.json").read_text())
    assert [row.num_ranks for row in results.studies["tensor"]] == [1, 2]
    assert all(len(row.seconds) == 2 for rows in results.studies.values() for row in rows)
    assert len({row.seconds for rows in results.studies.values() for row in rows}) > 4
    assert json.loads((tmp_path / "scaling-measured.json").read_text())["machine"]["date"]
    for axis in ("tensor", "pipeline", "context"):
        assert f"| {axis} 2 | 1 |" in (tmp_path / "scaling-measured.md").read_text()
    assert "<svg" in (tmp_path / "scaling-measured.html").read_text()
