"""Stored logits of a teacher: a run learns from them as from the teacher itself, on every layout."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crosscut.config import ConfigError, DamagedDataError, RunConfig, TrainingError
from crosscut.config.system.folder_lock import FolderLock
from crosscut.data import logits as stored
from crosscut.data.logits import LogitStore
from crosscut.logbook.skips import SampleSkip, SkipRecord
from crosscut.pretrained import find_model
from crosscut.training.in_memory import InMemory
from crosscut.training.job import _prepare
from crosscut.training.precision import resolve_on
from crosscut.training.teachers import preparation
from crosscut.training.teachers.preparation import prepare_teacher
from crosscut.training.teachers.teacher import ComputedTeacher
from tests.ranks import RankPool
from tests.refusals import refusal
from tests.training.conftest import tiny_run
from tests.training.jobs import CPU, parts, started_ranks, whole_run

SETTINGS = ("training.precision=float64", "model.dropout=0", "training.document_mask=true", "training.steps=4")
JSD = ("teacher.loss=jsd", "teacher.beta=0.3", "teacher.temperature=2")


def store(run: RunConfig) -> None:
    """On a rank: store the logits of the run's teacher, 8 sequences in a part."""
    with started_ranks(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored, "_MOST_TOKENS", 256)
        prepare_teacher(run)


def learn(run: RunConfig) -> list[float]:
    """On a rank: figures of all steps of a run."""
    trainer, batches = parts(run)
    if run.teacher.is_computed:
        trainer.teacher.load(find_model(run.teacher.folder))
    told = []
    for step in range(run.training.steps):
        values = trainer.step(step, batches.micro_batches(step)).values()
        told += [values[name] for name in ("loss", "gradient_norm", "data_loss", "distillation_loss")]
    return told


@pytest.fixture(scope="module")
def make(teacher: Path, tokens_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Function that makes a run with stored logits."""
    place = tmp_path_factory.mktemp("stored")

    def made(*overrides: str, k: int = 500) -> RunConfig:
        cache = (f"teacher.folder={teacher}", f"teacher.cache={place / f'k{k}'}", f"teacher.k={k}")
        return tiny_run(tokens_folder, place / "run", *SETTINGS, *JSD, *cache, *overrides)

    return made


@pytest.fixture(scope="module")
def whole(ranks: RankPool, make: Any) -> list[float]:
    """Figures of a run on one rank with the logits of the whole vocabulary, which two groups of ranks have stored."""
    ranks.run(2, store, make("layout.data=2", "teacher.tensor=1"), time_limit=120.0)
    found: list[float] = ranks.run(1, learn, make())[0]
    return found


def test_logits_of_the_whole_vocabulary_teach_like_the_teacher(ranks: RankPool, make: Any, whole: list[float]) -> None:
    assert ranks.run(1, learn, make("teacher.cache=", "teacher.k=64"))[0] == pytest.approx(whole, rel=1e-12)


_SLOW = pytest.mark.slow  # other ranks have the same rows
LAYOUTS = [
    ("layout.tensor=2", "layout.context=2"),
    *(
        pytest.param(layout, marks=_SLOW)
        for layout in (
            ("layout.tensor=2", "layout.sequence_parallel=true", "layout.data=2", "layout.sharding=zero3"),
            ("layout.data=4",),
            ("layout.pipeline=2", "layout.tensor=2"),
            ("layout.tensor=4", "teacher.folder="),
        )
    ),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_stored_logits_are_valid_on_every_layout(
    ranks: RankPool, make: Any, whole: list[float], layout: tuple[str, ...]
) -> None:
    run = make(*layout)
    for found in ranks.run(run.layout.world_size, learn, run, time_limit=120.0):
        assert found == pytest.approx(whole, rel=1e-10)


def test_a_killed_command_continues_and_other_ranks_store_the_same_logits(ranks: RankPool, make: Any) -> None:
    ranks.run(2, store, make("layout.tensor=2", k=20), time_limit=120.0)
    folder = Path(make(k=20).teacher.cache)
    rows, before = sorted(folder.glob("*.rows")), LogitStore.open(folder).read(0, 16)
    assert [path.stat().st_size for path in rows] == [8 * 32 * (20 * 10 + 8)] * 2
    whole = rows[0].stat().st_mtime_ns
    rows[1].with_suffix(".json").unlink()  # as if killed before a part was described
    (folder / ".logits-00001.rows.0123abcd").write_bytes(b"unfinished")
    ranks.run(1, store, make(k=20), time_limit=120.0)
    for one, other in zip(LogitStore.open(folder).read(0, 16), before, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)
    assert rows[0].stat().st_mtime_ns == whole
    assert not list(folder.glob(".logits-*"))
    ranks.run(1, store, make("training.steps=5", k=20), time_limit=120.0)
    assert len(list(folder.glob("*.rows"))) == 3


def prepared(run: RunConfig, *, resume: bool = False) -> Any:
    return _prepare(resolve_on(run, CPU), False, resume, InMemory(run))[0]


def test_logits_that_are_not_those_of_the_run_are_refused(make: Any, whole: list[float], tmp_path: Path) -> None:
    good = make()
    assert prepared(good).teacher is None
    for override, told in {
        "teacher.k=20": "`teacher.k` 500 instead of 20",
        "training.seed=2": "`training.seed` 1 instead of 2",
        "training.sequence_length=16": "`training.sequence_length` 32 instead of 16",
        "training.document_mask=false": "`training.document_mask` true instead of false",
        "teacher.temperature=1": "`teacher.temperature` 2.0 instead of 1.0",
        "teacher.precision=float32": '`teacher.precision` "float64" instead of "float32"',
    }.items():
        message = refusal(ConfigError, prepared, make(override))
        assert message.startswith("`teacher.cache` must hold the logits of this run's data and teacher, but")
        assert f"was made with {told}" in message
    copy = tmp_path / "copy"
    shutil.copytree(good.teacher.cache, copy)
    run = make(f"teacher.cache={copy}")
    manifest = json.loads((copy / "cache.json").read_text())
    manifest["depends_on"] |= {"data.tokens": '"0"', "teacher.folder": '"1"'}
    (copy / "cache.json").write_text(json.dumps(manifest))
    message = refusal(ConfigError, prepared, run)
    assert '`data.tokens` "0" instead of' in message
    assert '`teacher.folder` "1" instead of' in message
    (copy / "cache.json").write_text("{}")
    assert "must describe stored logits, but does not: `k` is missing" in refusal(DamagedDataError, prepared, run)
    missing = make(f"teacher.cache={tmp_path / 'missing'}")
    assert "must name a folder with stored logits, but" in refusal(ConfigError, prepared, missing)
    assert "`teacher.k` must be at most the size of the vocabulary (500)" in refusal(
        ConfigError, prepared, make("teacher.k=501")
    )


def test_damaged_and_missing_parts_are_refused(make: Any, whole: list[float], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(make().teacher.cache, copy)
    run, part = make(f"teacher.cache={copy}"), copy / "logits-00001.rows"
    more = make(f"teacher.cache={copy}", "training.steps=5")
    assert "must hold the logits of 20 sequences, which the run reads or" in refusal(ConfigError, prepared, more)
    content = part.read_bytes()
    part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "must have the SHA-256" in refusal(DamagedDataError, prepared, run)
    part.write_bytes(content[:-1])
    assert "bytes long, but is" in refusal(DamagedDataError, prepared, run)
    part.unlink()
    assert "but is missing" in refusal(DamagedDataError, prepared, run)
    part.with_suffix(".json").unlink()
    assert "holds those of 8" in refusal(ConfigError, prepared, run)


def store_nothing(run: RunConfig) -> None:
    """On a rank: store the logits of a teacher whose weights are not numbers."""

    def load(teacher: ComputedTeacher, _source: object) -> None:
        for parameter in (each for model in teacher.each for each in model.parameters()):
            parameter.data.fill_(float("nan"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ComputedTeacher, "load", load)
        store(run)


def test_predictions_that_are_not_finite_are_not_stored(ranks: RankPool, make: Any, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="predictions must be finite, but those of `teacher"):
        ranks.run(1, store_nothing, make(f"teacher.cache={tmp_path / 'cache'}"))
    assert not list((tmp_path / "cache").glob("*.rows"))


def test_sequences_that_the_run_leaves_out_are_counted_and_another_teacher_is_told(
    ranks: RankPool, make: Any, whole: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = SkipRecord(skips=(SampleSkip(2, 8),))
    record.write(tmp_path)
    cache = shutil.copytree(make().teacher.cache, tmp_path / "copy")
    folders = (f"teacher.cache={cache}", f"output.folder={tmp_path / 'run'}")
    told = f"hold the logits of 24 sequences, which the run reads or leaves out, but `{cache}` holds those of 16: 8 are"
    given = make(*folders, f"training.skips={tmp_path}/spikes/skips.json")
    assert told in refusal(ConfigError, prepared, given)
    assert not (tmp_path / "run").exists()
    ranks.run(1, whole_run, run := make(*folders, "checkpoint.every=1", "checkpoint.keep=9"))
    shutil.rmtree(Path(run.checkpoints_folder) / "step-00000004")
    again = make(*folders, "teacher.folder=", "checkpoint.every=1", "checkpoint.keep=9")
    manifest = cache / "cache.json"
    text = manifest.read_text()
    table = json.loads(text)
    manifest.write_text(json.dumps(table | {"depends_on": table["depends_on"] | {"teacher.folder": '"0123"'}}))
    prepared(again, resume=True)
    assert "`teacher.cache` now holds `stored logits` (sha256 0123) instead of" in capsys.readouterr().err
    manifest.write_text(text)
    prepared(run, resume=True)
    assert "teacher" not in capsys.readouterr().err
    record.write(tmp_path / "run")
    assert told in refusal(ConfigError, prepared, run, resume=True)
    for each in (given, run):
        shutil.rmtree(cache)
        shutil.copytree(make().teacher.cache, cache)
        ranks.run(1, store, each)
        assert prepared(run, resume=True).skips == record.skips


def test_a_store_that_cannot_be_made_is_refused(
    run_with: Any, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, place in (("folder", "cache"), ("cache", "folder")):
        message = refusal(ConfigError, prepare_teacher, run_with(f"teacher.{place}=x"))
        assert f"`teacher.{name}` must be given to store the logits of a teacher" in message
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    taken = make(f"teacher.cache={tmp_path / 'taken'}")
    assert "must be an empty folder or one with stored logits" in refusal(ConfigError, prepare_teacher, taken)
    monkeypatch.setattr(preparation.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))  # type: ignore[attr-defined]
    full = make(f"teacher.cache={tmp_path / 'full'}")
    assert "of free space, but" in refusal(ConfigError, prepare_teacher, full)
    assert not (tmp_path / "full").exists()
    with FolderLock(tmp_path / "full").held(print):
        assert "is in use by process" in refusal(ConfigError, prepare_teacher, full)
    assert "`teacher.k` must be 64 without `teacher.cache`" in refusal(ConfigError, run_with, "teacher.k=3")
