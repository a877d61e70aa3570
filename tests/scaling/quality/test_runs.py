"""Runs of a study: which of them are kept, continued or refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from crosscut.config import ConfigError, DataConfig, RunConfig, TrainingError, load_run, write_json
from crosscut.data import Tokens, prepare
from crosscut.logbook.contents import read_metrics, read_summary
from crosscut.scaling.quality.rates import trial
from crosscut.scaling.quality.results import size_figures, trial_of
from crosscut.scaling.quality.runs import record_runs, run_in, train_all
from tests.refusals import refusal

TINY = (
    "model.num_layers=1", "model.hidden_size=16", "model.num_heads=1", "model.max_sequence_length=16",
    "training.steps=40", "training.batch_size=4", "training.sequence_length=16", "training.validation_sequences=8",
    "checkpoint.every=5", "output.sample_tokens=0", "output.trackers=[]", "data.vocab_size=300",
)  # fmt: skip


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    data = DataConfig(text=("builtin:tales",), vocab_size=300)
    return prepare(data, tmp_path_factory.mktemp("data") / "tokens", seed=1, progress=False)


def run_of(tokens: Tokens, output: Path, *settings: str) -> RunConfig:
    return run_in(output, "one", load_run({}, [*TINY, *settings]), tokens)


def test_a_run_has_the_tokens_and_the_vocabulary_of_the_study(tokens: Tokens, tmp_path: Path) -> None:
    run = run_of(tokens, tmp_path)
    assert (run.data.text, run.data.tokens) == ((), str(tokens.path))
    assert run.model.vocab_size == tokens.vocab_size
    record_runs([run])
    assert load_run(tmp_path / "runs" / "one.toml") == run
    record_runs([run])  # of a second start


def test_a_moved_output_has_the_same_runs(tokens: Tokens, tmp_path: Path) -> None:
    record_runs([run_of(tokens, tmp_path / "old")])
    (tmp_path / "old").rename(tmp_path / "new")
    record_runs([run_of(tokens, tmp_path / "new")])


def test_another_run_is_not_mistaken_for_a_kept_one(tokens: Tokens, tmp_path: Path) -> None:
    record_runs([run_of(tokens, tmp_path)])
    before = (tmp_path / "runs" / "one.toml").read_bytes()
    other = run_of(tokens, tmp_path, "optimizer.learning_rate=0.5")
    assert refusal(ConfigError, train_all, [other], at_once=1) == (
        f"`optimizer.learning_rate` must be 0.001, as in the run in `{tmp_path}/runs/one` of an earlier start, but is "
        "0.5. Choose another `--output` for other settings."
    )
    assert (tmp_path / "runs" / "one.toml").read_bytes() == before


@pytest.mark.parametrize("foreign", ["thesis.txt", ""])
def test_a_foreign_folder_stays_and_no_run_is_recorded(tokens: Tokens, tmp_path: Path, foreign: str) -> None:
    place = tmp_path / "runs" / "one"
    if foreign:
        place.mkdir(parents=True)
        (place / foreign).write_text("mine")
    else:
        place.parent.mkdir()
        place.symlink_to(tmp_path / "elsewhere")
    first = replace(run := run_of(tokens, tmp_path), output=replace(run.output, folder=str(tmp_path / "runs" / "two")))
    assert refusal(ConfigError, train_all, [first, run], at_once=1) == (
        f"`--output` must be a new folder or that of an earlier start, but `{place}` exists without the file "
        "`one.toml` of a run. Choose another `--output`."
    )
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["one"]
    assert not foreign or (place / foreign).read_text() == "mine"


def test_a_run_that_continued_has_the_validations_of_every_other_run(tokens: Tokens, tmp_path: Path) -> None:
    run = run_of(tokens, tmp_path, "training.validate_every=20", "training.seed=7")
    folder = Path(run.output.folder)
    folder.mkdir(parents=True)
    losses = {0: 5.5, 20: 5.0, 33: 4.75, 40: 4.5}  # stopped after step 33
    rows = [{"step": step, "validation_loss": loss, "validation_perplexity": 1.0} for step, loss in losses.items()]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    write_json(folder / "summary.json", {"steps": 40, "training_seconds": 60.0})
    (figures,) = size_figures("one", [run]).runs
    assert (figures.seed, figures.validation) == (7, ((0, 5.5), (20, 5.0), (40, 4.5)))
    assert figures.perplexity == pytest.approx(90.0171)


def test_runs_that_name_one_folder_of_checkpoints_have_their_own(tokens: Tokens, tmp_path: Path) -> None:
    assert run_of(tokens, tmp_path, "checkpoint.folder=shared").checkpoints_folder == f"{tmp_path}/runs/one/checkpoints"


@pytest.mark.slow  # starts a process for each run
def test_a_run_whose_loss_is_not_finite_ends_a_study_of_quality_but_not_one_of_rates(
    tokens: Tokens, tmp_path: Path
) -> None:
    high = trial(load_run({}, TINY), 2e9, 1.0)
    runs = [run_in(tmp_path, "high", high, tokens), run_of(tokens, tmp_path)]
    message = refusal(TrainingError, train_all, runs[:1], at_once=1)
    assert "runs/high` ended with status 2" in message and "must be finite" in message
    train_all(runs, at_once=2, may_diverge=True)
    train_all(runs, at_once=2, may_diverge=True)
    diverged, ended = map(trial_of, runs)
    assert diverged.loss is None and ended.loss is not None
    summary = read_summary(tmp_path / "runs" / "one")
    assert summary is not None and ended.loss == summary["validation_loss_after"]
    assert read_metrics(tmp_path / "runs" / "one")[-1]["step"] == 40
