"""Studies of small models: equal budgets, and the best rate of each contender."""

import argparse
from dataclasses import replace

import pytest

from benchmarks.training import small_models
from benchmarks.training.small_models import STUDIES, Study, require_equal, run_of, train_study
from crosscut.cli.arguments import run_from
from crosscut.data import prepare
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
        step = small_models.step_flops(run_from((*run.settings, "data.tokens=tokens", "model.vocab_size=4096")))
        assert 3e12 - step < run.steps * step <= 3e12


@pytest.mark.slow
def test_every_contender_has_the_best_of_its_rates(tmp_path, monkeypatch):
    demo = run_from(())
    tokens = prepare(demo.data, tmp_path / "tokens", seed=demo.training.seed, progress=False)
    monkeypatch.setattr(small_models, "RATES", (1e-4, 1e-2))
    study = Study(contenders=CONTENDERS, tuned=("mamba2",), tuning=0.5, equal_tokens=False)
    length = argparse.Namespace(**{**vars(LENGTH), "tflop": 0.001, "points": 2})
    found = train_study(study, length, tmp_path, tokens)
    assert {name: len(runs) for name, runs in found.items()} == {"rates": 2, "attention": 2, "mamba2": 2}
    worse, better = found["rates"]
    assert worse["bits_per_byte"] > better["bits_per_byte"]
    assert [one["learning_rate"] for one in found["mamba2"]] == [1e-2, 1e-2]
    assert [one["learning_rate"] for one in found["attention"]] == [1e-3, 1e-3]
    for one in (*found["attention"], *found["mamba2"]):
        assert 0 <= 0.001e12 - one["steps"] * one["flops_per_step"] < one["flops_per_step"]
        assert [one["validations"][i][0] for i in (0, -1)] == [0, one["steps"]]
    assert [one["seed"] for one in found["mamba2"]] == [1, 2]
