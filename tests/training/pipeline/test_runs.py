"""Whole runs with a pipeline: validation, checkpoints, the report, and what other commands read."""

import json
from pathlib import Path

import pytest
import torch

from crosscut.checkpoint import checkpoint_folder
from crosscut.config import Layout
from crosscut.data import TokenFolder
from crosscut.evaluation import evaluate_loss
from crosscut.parallel import make_mesh
from crosscut.pretrained import find_model
from crosscut.training.driving.preparation import describe_settings
from crosscut.training.evaluations import Evaluations
from tests.training.jobs import loop, parts, whole_run
from tests.training.pipeline.test_equality import FOUR, layout_of
from tests.training.test_resume import record, require_same_run

SETTINGS = (*FOUR, "model.dropout=0.0", "checkpoint.keep=100")
RESUMED = (*SETTINGS, "training.steps=3", "checkpoint.every=2", "training.validate_every=0")


def validation_loss(run) -> float:
    trainer, batches = parts(run)
    return evaluate_loss(trainer.model, batches.validation_batches()).loss


@pytest.mark.one_in(4)
@pytest.mark.parametrize("layout", ["pipeline=2 stages_per_rank=2", "pipeline=4", "pipeline=2 data=2", "pipeline=2"])
def test_validation_passes_forward_through_all_stages(ranks, run_with, once, layout):
    expected = once("loss", lambda: ranks.run(1, validation_loss, run_with(*SETTINGS))[0])
    run = run_with(*SETTINGS, *layout_of(layout))
    assert ranks.run(run.layout.world_size, validation_loss, run) == pytest.approx([expected] * run.layout.world_size)


def scores(run) -> dict[str, float]:
    trainer, _ = parts(run)
    return Evaluations(run, TokenFolder.open(Path(run.tokens_folder), verify=False)).figures(trainer.model)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "layout",
    [
        "pipeline=2 stages_per_rank=2",
        "pipeline=2 stages_per_rank=2 tensor=2 sequence_parallel=true",
        "pipeline=2 data=2 sharding=zero3",
        "pipeline=2 context=2",
    ],
)
def test_tasks_are_scored_through_all_stages(ranks, run_with, tmp_path, once, layout):
    (tmp_path / "own.txt").write_text("The Congress of the United States met, and the people were glad.\n" * 20)
    (tmp_path / "lambada.txt").write_text("the people of the United States\nI have the honor to report\n")
    tasks = (
        f"evaluation.text={tmp_path / 'own.txt'}",
        f"evaluation.lambada={tmp_path / 'lambada.txt'}",
        "evaluation.batch_size=3",
    )
    expected = once("scores", lambda: ranks.run(1, scores, run_with(*SETTINGS, *tasks))[0])
    run = run_with(*SETTINGS, *tasks, *layout_of(layout))
    for found in ranks.run(run.layout.world_size, scores, run):
        assert found == pytest.approx(expected, rel=1e-10)
    assert {"text_perplexity", "lambada_accuracy"} <= set(expected)


PAIRS = [
    ("pipeline=2", "data=2"),
    ("pipeline=2 tensor=2", "pipeline=2 stages_per_rank=2"),
    ("pipeline=2 tensor=2", "pipeline=2 data=2 sharding=zero3"),
    ("pipeline=2 tensor=2", "context=2 data=2"),
    ("tensor=1", "pipeline=4 schedule=zero_bubble"),
]


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("before", "layout"), PAIRS)
def test_a_run_resumes_on_any_layout(ranks, run_with, tmp_path, before, layout):
    whole = ranks.run(1, record, run_with(*RESUMED, f"output.folder={tmp_path / 'whole'}"))[0]
    first = run_with(*RESUMED, *layout_of(before), f"output.folder={tmp_path / 'first'}")
    ranks.run(first.layout.world_size, record, first)
    place = checkpoint_folder(first.checkpoints_folder, 2)
    second = run_with(*RESUMED, *layout_of(layout), f"output.folder={tmp_path / 'second'}")
    for of_rank in ranks.run(second.layout.world_size, record, second, place):
        assert sorted(of_rank["losses"]) == [2]
        for step, loss in of_rank["losses"].items():
            assert loss == pytest.approx(whole["losses"][step], rel=1e-10)
        for name, weight in of_rank["weights"].items():
            torch.testing.assert_close(weight, whole["weights"][name], rtol=1e-8, atol=1e-10)


@pytest.mark.slow  # test_resume.py resumes exactly without stages, and the test above with them
@pytest.mark.parametrize("more", ["stages_per_rank=2", "", "schedule=zero_bubble"])
def test_a_run_resumes_exactly_on_its_own_layout(ranks, run_with, tmp_path, more):
    settings = (*RESUMED, "model.dropout=0.1", *layout_of(f"pipeline=2 {more}"))
    run = run_with(*settings, f"output.folder={tmp_path / 'first'}")
    whole = ranks.run(2, record, run)
    again = run_with(*settings, f"output.folder={tmp_path / 'second'}")
    place = checkpoint_folder(run.checkpoints_folder, 2)
    require_same_run(whole, ranks.run(2, record, again, place), done=2)


def loss_of_source(folder: str, run) -> float:
    _, batches = parts(run)
    model = find_model(folder).load(make_mesh(Layout(), torch.device("cpu")))
    return evaluate_loss(model, batches.validation_batches()).loss


def test_other_commands_read_the_model_of_a_pipeline(ranks, run_with, tmp_path):
    settings = ("training.micro_batch_size=2", "training.steps=3", "training.validate_every=0", "layout.pipeline=2")
    settings = (*settings, f"output.folder={tmp_path / 'run'}")
    printed = ranks.run(2, whole_run, run_with(*settings))
    assert "pipeline 2" in printed[0]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    read = ranks.run(1, loss_of_source, str(tmp_path / "run"), run_with(f"output.folder={tmp_path / 'other'}"))[0]
    assert read == pytest.approx(summary["validation_loss_after"], rel=1e-5)
    assert not (tmp_path / "run" / "sample.txt").exists(), "no rank has the whole model"


def test_the_loop_validates_and_keeps_an_average(ranks, run_with, tmp_path):
    settings = (*SETTINGS, "optimizer.ema_decay=0.9", "training.steps=3", "checkpoint.every=0")
    alone = ranks.run(1, loop, run_with(*settings, f"output.folder={tmp_path / 'one'}"))[0]
    for found in ranks.run(2, loop, run_with(*settings, "layout.pipeline=2", f"output.folder={tmp_path / 'two'}")):
        assert found["before"] == pytest.approx(alone["before"], rel=1e-10)
        assert found["after"] == pytest.approx(alone["after"], rel=1e-10)


def test_few_micro_batches_are_a_warning(run_with):
    run = run_with("training.batch_size=4", "training.micro_batch_size=2", "layout.pipeline=2", "model.num_layers=4")
    assert list(describe_settings(run, "cpu", is_new=False)) == []
    run = run_with("training.batch_size=4", "training.micro_batch_size=2", "layout.pipeline=4", "model.num_layers=4")
    assert " ".join(describe_settings(run, "cpu", is_new=False)) == (
        "A step has 2 micro-batches and the pipeline has 4 ranks, so each rank waits 1.5 times as long as it "
        "computes. Lower `training.micro_batch_size` (2) or raise `training.batch_size`. With 16 micro-batches, a rank "
        "would wait 0.19 times as long as it computes."
    )
