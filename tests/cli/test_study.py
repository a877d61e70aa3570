"""`crosscut study measure`, `rate` and `quality`: what they say of mistakes, and real studies of tiny models."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

import crosscut.scaling.study
from crosscut.cli.main import commands
from crosscut.config import ConfigError, DataError, load_run
from crosscut.config.system.records import from_json
from crosscut.logbook.contents import read_metrics
from crosscut.scaling.quality.results import QualityResults
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


def fails(*arguments: str, study: str = "measure") -> str:
    """The message of a study that must fail before a process starts."""
    return refusal(ConfigError, CliRunner().invoke, commands, ("study", study, *arguments), catch_exceptions=False)


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


@pytest.mark.parametrize("study", ["measure", "rate", "quality"])
@pytest.mark.usefixtures("no_launch")
def test_a_study_under_torchrun_is_refused(study: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert fails(*TINY, study=study) == (
        f"`crosscut study {study}` must start its ranks itself, but torchrun has started several. Run the command "
        "without torchrun."
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    {
        "quality --seeds 0": "`--seeds` must be at least 1, but is 0.",
        "quality --at-once 0": "`--at-once` must be at least 1, but is 0.",
        "quality --task squad=dev.json": "`--task` must be `wikitext103=FILE` or `lambada=FILE`, but is "
        "`squad=dev.json`. To score another text, use `--text`.",
        "quality training.steps=0": "`training.steps` must be at least 1, but is 0.",
        "rate --rates 1e-3": "`--rates` must be at least two positive numbers with commas between them, but is "
        "`1e-3`. Try 1e-3,2e-3.",
        "rate --rates 1e-3,fast": "`--rates` must be at least two positive numbers with commas between them, but is "
        "`1e-3,fast`. Try 1e-3,2e-3.",
        "rate --share 1.5": "`--share` must be above 0 and at most 1, but is 1.5. Try 0.2.",
    }.items(),
)
def test_a_mistake_in_a_study_of_sizes_is_told_before_anything_is_made(
    arguments: str, message: str, tmp_path: Path
) -> None:
    study, *rest = arguments.split()
    assert fails(*rest, "--output", str(tmp_path / "out"), study=study) == message
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


SIZES = (
    "model.num_layers=1", "model.max_sequence_length=32", "data.vocab_size=300", "training.steps=24",
    "training.batch_size=4", "training.sequence_length=32", "training.validation_sequences=8",
    "training.validate_every=8", "training.device=cpu", "checkpoint.every=6",
)  # fmt: skip


def sizes_in(folder: Path) -> list[str]:
    """Run files of two sizes."""
    head = "[output]\nsample_tokens = 0\ntrackers = []\n[model]\nnum_layers = 1\n"
    for name, width in {"narrow": 16, "wide": 32}.items():
        (folder / f"{name}.toml").write_text(f"{head}hidden_size = {width}\nnum_heads = {width // 16}\n")
    return [str(folder / "narrow.toml"), str(folder / "wide.toml")]


def test_a_task_that_does_not_fit_is_told_before_a_run_starts(tmp_path: Path) -> None:
    (text := tmp_path / "plain.txt").write_text("This is no WikiText.")
    output = tmp_path / "out"
    arguments = (*sizes_in(tmp_path), *SIZES, "data.text=builtin:tales", "--output", str(output))
    with pytest.raises(DataError, match=r"`evaluation.wikitext103` must be a file of WikiText-103, but"):
        CliRunner().invoke(
            commands, ("study", "quality", *arguments, "--task", f"wikitext103={text}"), catch_exceptions=False
        )
    assert not (output / "runs").exists()


def scored(crosscut_here, run: Path, *tasks: str) -> dict[str, float]:
    """Scores of a run by `crosscut evaluate`, with the names of `metrics.jsonl`."""
    options = [word for task in tasks for word in ("--task", task)]
    printed = crosscut_here("evaluate", str(run), *options, "--device", "cpu", "--window", "32", "--json", status=0)
    found = json.loads(printed.stdout)["tasks"]
    return {f"{task}_{name}": value for task in found for name, value in found[task]["figures"].items()}


@pytest.mark.slow  # trains ten runs
def test_the_best_rates_of_short_runs_are_those_of_the_study_of_quality(crosscut_here, tmp_path: Path) -> None:
    (wiki := tmp_path / "wiki.tokens").write_text(" A well @-@ known tale , once told . \n" * 20)
    (lambada := tmp_path / "lambada.jsonl").write_text('{"text": "Once upon a time there was a king"}\n' * 3)
    shared = (*sizes_in(tmp_path), *SIZES, f"data.tokens={tmp_path / 'tokens'}", "data.text=builtin:tales")
    rates, output = tmp_path / "rate" / "rates.json", tmp_path / "quality"
    options = ("--rates", "1e-4,1e-2", "--share", "0.5", "--at-once", "2", "--output", str(rates.parent))
    told = crosscut_here("study", "rate", *shared, *options, status=0).stdout
    assert "The best learning rate of `wide` is 0.01, the largest that was tried." in told
    tasks = (f"wikitext103={wiki}", f"lambada={lambada}")
    options = ("--rates", str(rates), "--task", tasks[0], "--task", tasks[1], "--seeds", "2", "--output", str(output))
    crosscut_here("study", "quality", *shared, *options, status=0)

    results = from_json(QualityResults, json.loads((output / "quality.json").read_text()))
    assert [(size.name, size.learning_rate) for size in results.sizes] == [("narrow", 0.01), ("wide", 0.01)]
    for size in results.sizes:
        assert [run.seed for run in size.runs] == [1234, 1235]
        assert [step for step, _ in size.runs[0].validation] == [0, 8, 16, 24]
        run = output / "runs" / f"{size.name}-seed-1235"
        assert load_run(run / "config.toml").optimizer.learning_rate == 0.01
        summary = json.loads((run / "summary.json").read_text())
        assert size.runs[1].perplexity == pytest.approx(summary["validation_perplexity_after"])
        assert size.runs[1].scores == pytest.approx(scored(crosscut_here, run, *tasks), rel=1e-6)
    ended = [(output / "runs" / f"{name}" / "summary.json").stat().st_mtime for name in (
        "narrow-seed-1234", "wide-seed-1234", "narrow-seed-1235", "wide-seed-1235")]  # fmt: skip
    assert ended == sorted(ended)  # all sizes have the first seed before any has the second
    assert "WikiText-103" in (output / "quality.md").read_text()
    assert (output / "quality.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow  # trains two runs, and starts the study three times
def test_a_stopped_or_killed_study_keeps_finished_runs_and_continues_the_others(fork, tmp_path: Path) -> None:
    arguments = (
        *("study", "quality", *sizes_in(tmp_path), *SIZES, "training.steps=200", "training.validate_every=0"),
        *("data.text=builtin:tales", "--seeds", "1", "--output", str(tmp_path / "out")),
    )
    narrow, wide = (tmp_path / "out" / "runs" / f"{name}-seed-1234" for name in ("narrow", "wide"))

    def checkpoint(run: Path) -> int:
        """Number of steps of a run's newest checkpoint."""
        return max((int(one.name.removeprefix("step-")) for one in run.glob("checkpoints/step-*")), default=0)

    study = fork(*arguments)
    while not checkpoint(narrow) and study.process.is_alive():
        time.sleep(0.1)
    os.kill(study.pid, signal.SIGTERM)
    status, _, errors = study.ended()
    assert status == 75 and "Start the same command again to continue" in errors, errors
    assert 0 < checkpoint(narrow) < 200 and not wide.exists()

    study = fork(*arguments)
    while not checkpoint(wide) and study.process.is_alive():
        time.sleep(0.1)
    os.killpg(study.pid, signal.SIGKILL)
    study.ended()
    kept = (narrow / "summary.json").read_bytes()
    assert json.loads(kept)["first_step"] > 0 and 0 < checkpoint(wide) < 200

    study = fork(*arguments)
    status, _, errors = study.ended(200)
    assert status == 0, errors
    assert "Kept from an earlier start: 1 of 2 runs." in errors
    assert (narrow / "summary.json").read_bytes() == kept
    assert json.loads((wide / "summary.json").read_text())["first_step"] > 0
    assert read_metrics(wide)[-1]["step"] == 200


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
