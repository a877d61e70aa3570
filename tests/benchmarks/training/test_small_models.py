"""Studies of small models: equal budgets, and runs that are killed, finished or new."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.commands import environment_here, progress_bar
from benchmarks.training import small_models
from benchmarks.training.small_models import STUDIES, Run, Study, require_equal, run_of, train, train_study
from crosscut.cli.arguments import run_from
from crosscut.data import prepare
from crosscut.logbook.contents import read_metrics
from crosscut.planner.parameters import count_parameters

LENGTH = argparse.Namespace(tflop=3.0, tokens=4e6, points=8, seeds=2, at_once=2)
TINY = (
    "recipe=small", "model.num_layers=1", "model.hidden_size=16", "model.num_heads=2", "model.max_sequence_length=16",
    "model.mamba2.head_size=16", "model.mamba2.state_size=4", "training.sequence_length=16", "training.batch_size=8",
)  # fmt: skip
CONTENDERS = {name: (*TINY, f"model.layers={name}") for name in ("attention", "mamba2")}


@pytest.mark.parametrize(("name", "millions"), [("hybrid", [2.9, 3.0]), ("mixture", [2.9, 7.1, 7.1])])
def test_contenders_have_as_many_tokens_and_flops(name, millions):
    study = STUDIES[name]
    require_equal(study)
    runs = [run_of(study, name, 1e-3, 1, LENGTH, 1.0) for name in study.contenders]
    assert {run.steps for run in runs} == {1953}
    models = [run_from((*run.settings, "data.tokens=tokens", "model.vocab_size=4096")).model for run in runs]
    assert [round(count_parameters(model) / 1e6, 1) for model in models] == millions


def test_contenders_of_other_flops_are_refused():
    hybrid = STUDIES["hybrid"]
    wider = (*hybrid.contenders["hybrid"], "model.mlp_size=576")
    other = replace(hybrid, contenders={**hybrid.contenders, "hybrid": wider})
    with pytest.raises(
        SystemExit, match=r"equal within 2%, but are: transformer 20\.39 million, hybrid 20\.96 million"
    ):
        require_equal(other)
    require_equal(replace(other, equal_tokens=False))


def test_recipes_have_the_same_flops():
    study = STUDIES["recipes"]
    for name in study.contenders:
        run = run_of(study, name, None, 1, LENGTH, 1.0)
        step = small_models.flops(run_from((*run.settings, "data.tokens=tokens", "model.vocab_size=4096")))
        assert 3e12 - step < run.steps * step <= 3e12


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    demo = run_from(())
    prepare(demo.data, tmp_path / "tokens", seed=demo.training.seed, progress=False)
    return tmp_path


@pytest.mark.slow
def test_a_killed_run_continues_and_a_finished_one_is_kept(folder):
    run = Run("one", 1, 400, (*CONTENDERS["mamba2"], "training.steps=400", "checkpoint.every=20", "layout.tensor=1"))
    program = f"from benchmarks.training.small_models import *; train({run!r}, Path({str(folder)!r}))"
    killed = subprocess.Popen([sys.executable, "-c", program], env=environment_here(), start_new_session=True)
    while not [*folder.glob("one-1/checkpoints/step-*")] and killed.poll() is None:
        time.sleep(0.1)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert read_metrics(folder / "one-1")[-1]["step"] < 400

    figures = train(run, folder)
    assert json.loads((folder / "one-1" / "summary.json").read_text())["first_step"] > 0
    assert figures["steps"] == figures["validations"][-1][0] == 400
    begin = time.monotonic()
    assert train(run, folder) == figures
    assert time.monotonic() - begin < 1.0

    shorter = run._replace(settings=tuple(each.replace("400", "30") for each in run.settings))
    assert train(shorter, folder)["steps"] == 30  # of the new settings, from the start


@pytest.mark.slow
def test_every_contender_has_the_best_of_its_rates(folder, monkeypatch):
    monkeypatch.setattr(small_models, "RATES", (1e-4, 1e-2))
    study = Study(contenders=CONTENDERS, tuned=("mamba2",), tuning=0.5, equal_tokens=False)
    with progress_bar() as progress:
        length = argparse.Namespace(**{**vars(LENGTH), "tflop": 0.001, "points": 2})
        found = train_study(study, length, folder, progress)
    assert {name: len(runs) for name, runs in found.items()} == {"rates": 2, "attention": 2, "mamba2": 2}
    worse, better = found["rates"]
    assert worse["bits_per_byte"] > better["bits_per_byte"]
    assert [one["learning_rate"] for one in found["mamba2"]] == [1e-2, 1e-2]
    assert [one["learning_rate"] for one in found["attention"]] == [1e-3, 1e-3]
    for one in (*found["attention"], *found["mamba2"]):
        assert 0 <= 0.001e12 - one["steps"] * one["flops_per_step"] < one["flops_per_step"]
        assert [one["validations"][i][0] for i in (0, -1)] == [0, one["steps"]]
    assert [one["seed"] for one in found["mamba2"]] == [1, 2]
