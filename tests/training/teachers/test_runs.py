"""A whole run with a teacher, its resume on another layout, and the teachers that are refused."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from crosscut.config import ConfigError, LayoutError, RunConfig, load_run, write_toml
from crosscut.config.conventions import CONFIG_FILE
from crosscut.config.teachers import TeacherConfig, teacher_model
from crosscut.data import Tokenizer
from crosscut.training.in_memory import InMemory
from crosscut.training.job import _prepare
from crosscut.training.precision import resolve_on
from crosscut.training.teachers import requirements
from crosscut.training.teachers.requirements import find_teacher
from tests.ranks import RankPool
from tests.refusals import refusal
from tests.training.jobs import CPU, rows_of, whole_run


def learn(run: RunConfig) -> list[dict[str, Any]]:
    return [row for row in rows_of(run) if "loss" in row]


@pytest.mark.slow  # test_teacher has the quick tests of a step
def test_a_run_reports_both_parts_and_resumes_on_another_layout(
    ranks: RankPool, run_with: Any, teacher: Path, tmp_path: Path
) -> None:
    settings = (f"teacher.folder={teacher}", "teacher.alpha=0.25", "teacher.temperature=2", "teacher.tensor=1")
    settings += ("model.dropout=0", "checkpoint.keep=10", "training.precision=float64")
    whole = run_with(*settings)
    ranks.run(1, whole_run, whole, time_limit=120.0)
    rows = learn(whole)
    assert len(rows) == 6
    for row in rows:
        assert row["loss"] == pytest.approx(0.75 * row["data_loss"] + 0.25 * row["distillation_loss"], rel=1e-9)
    again = run_with(*settings, "layout.tensor=2")
    shutil.rmtree(Path(again.checkpoints_folder) / "step-00000006")
    (Path(again.output.folder) / "summary.json").unlink()
    ranks.run(2, whole_run, again, "auto", time_limit=120.0)
    for one, other in zip(rows, learn(again), strict=True):
        assert other["distillation_loss"] == pytest.approx(one["distillation_loss"], rel=1e-9)


def prepared(run: RunConfig, *, resume: bool = False) -> Any:
    return _prepare(resolve_on(run, CPU), False, resume, InMemory(run))[0]


def test_a_resumed_run_says_that_its_teacher_has_a_newer_checkpoint(
    ranks: RankPool, run_with: Any, teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The earlier checkpoint, also as a copy with another name, is the same teacher."""
    newer = shutil.copytree(teacher, tmp_path / "teacher")
    settings = (f"teacher.folder={newer}", "checkpoint.every=2")
    ranks.run(1, whole_run, run_with(*settings, "training.steps=2", "optimizer.warmup_steps=0"))
    shutil.copytree(newer / "checkpoints" / "step-00000003", pinned := tmp_path / "step-00000003")

    def told(*changed: str) -> str:
        capsys.readouterr()
        prepared(run_with(*settings, "optimizer.warmup_steps=0", *changed), resume=True)
        return capsys.readouterr().err

    assert "teacher" not in told()
    further = load_run(newer / "config.toml", (f"output.folder={newer}", "training.steps=4"))
    ranks.run(1, whole_run, further, "auto")
    message = re.escape(
        "The teacher or its share of the loss changes at step 3 (`teacher`). `teacher.folder` now holds "
    )
    sha = r"\(sha256 \w{16}\)"
    assert re.search(rf"{message}`teacher/step-0{{7}}4` {sha} instead of `teacher/step-0{{7}}3` {sha}\.\n", told())
    assert "teacher" not in told(f"teacher.folder={pinned}")
    assert "The teacher or its share" in told(f"teacher.folder={pinned}", "teacher.alpha=0.25")


def test_teachers_that_cannot_teach_are_refused(
    run_with: Any, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = tmp_path / "missing"
    message = refusal(ConfigError, prepared, run_with(f"teacher.folder={missing}"))
    assert message.startswith(
        f"`teacher.folder` must name the folder of a run, a checkpoint or a Hugging Face folder, but `{missing}`"
    )
    message = refusal(ConfigError, prepared, run_with(f"teacher.folder={teacher}", "model.vocab_size=512"))
    assert "whose `model.vocab_size` is that of the run (512), but" in message
    assert "has 500" in message
    long = run_with(f"teacher.folder={teacher}", "training.sequence_length=2048", "model.max_sequence_length=2048")
    assert "must be at most 128, the `model.max_sequence_length` of the teacher" in refusal(ConfigError, prepared, long)
    cut = run_with(f"teacher.folder={teacher}", "layout.data=3", "training.batch_size=6", "teacher.tensor=3")
    assert "`teacher.tensor` must divide `model.num_heads` (4)" in refusal(LayoutError, prepared, cut)
    monkeypatch.setattr(requirements, "available_memory", lambda: 100_000)
    large = refusal(ConfigError, prepared, run_with(f"teacher.folder={teacher}"))
    assert "must hold a model that fits into the memory of a rank (0.0 GB)" in large


def test_a_checkpoint_says_its_own_model_whatever_lies_beside_it(
    run_with: Any, teacher: Path, tmp_path: Path, tokens_folder: Path
) -> None:
    """Beside it, the run that learns has written its own config."""
    own = tmp_path / "run"
    shutil.copytree(teacher / "checkpoints", own / "teachers")
    write_toml(run := run_with("model.num_heads=2"), own / CONFIG_FILE)
    for place in (own / "teachers" / "step-00000003", own / "teachers"):
        model = teacher_model(str(place))
        assert (model.num_heads, model.hidden_size, model.dropout) == (4, 96, 0.0)
    found = replace(run, teacher=TeacherConfig(folder=str(own / "teachers" / "step-00000003")))
    source = find_teacher(resolve_on(found, CPU), Tokenizer.load(tokens_folder / "tokenizer.json"))
    assert source is not None
    assert source.model.hidden_size == 96
    manifest = own / "teachers" / "step-00000003" / "manifest.json"
    manifest.write_text(json.dumps({"progress": {"config": {}}}))
    teacher_model.cache_clear()
    message = refusal(ConfigError, teacher_model, str(manifest.parent))
    assert message == f"`{manifest}` must hold the config of a run, but does not. Choose another checkpoint."


def test_a_teacher_with_another_tokenizer_is_refused(run_with: Any, teacher: Path) -> None:
    other = Tokenizer.train(["another text with other pairs of letters, and no speech. " * 200], vocab_size=400)
    message = refusal(ConfigError, find_teacher, resolve_on(run_with(f"teacher.folder={teacher}"), CPU), other)
    assert "must hold a model with the tokenizer of the run, but the tokenizer" in message


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["teacher.alpha=0.3"], "`teacher.folder` must name the teacher if `teacher.alpha` is 0.3, but is empty"),
        (["teacher.folder=x", "teacher.alpha=0"], "`teacher.alpha` must be above 0, but is 0"),
        (["teacher.folder=x", "teacher.alpha=2"], "`teacher.alpha` must be at most 1, but is 2"),
        (["teacher.folder=x", "teacher.temperature=0"], "`teacher.temperature` must be at least 0.01"),
        (
            ["teacher.folder=x", "teacher.temperature=1e-40"],
            "`teacher.temperature` must be at least 0.01, but is 1e-40",
        ),
        (["teacher.folder=x", "teacher.temperature=1e20"], "`teacher.temperature` must be at most 100, but is 1e+20"),
        (
            ["teacher.folder=x", "teacher.loss=jsd", "teacher.beta=1e-8"],
            "`teacher.beta` must be 0, 1 or from 1e-06 to 0.999999, but is 1e-08. Set teacher.beta=0.",
        ),
        (
            ["teacher.folder=x", "teacher.beta=0.3"],
            '`teacher.beta` must be left out with `teacher.loss` = "forward_kl"',
        ),
        (["teacher.folder=x", "teacher.precision=float8"], "`teacher.precision` must be 'auto'"),
        (["teacher.folder=x", "model.head=number"], "`teacher.folder` must be '' for a model with `model.head`"),
        (
            ["teacher.folder=x", "teacher.tensor=3", "layout.data=2"],
            "`teacher.tensor` must divide the number of ranks (2), but is 3",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(run_with: Any, overrides: list[str], told: str) -> None:
    assert told in refusal(ConfigError, run_with, *overrides)
