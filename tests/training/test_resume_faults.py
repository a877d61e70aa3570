"""Faults of a resumed run, planted one at a time: the comparison with the run that never stopped has to find each."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from crosscut.config import RunConfig
from crosscut.training import step as training_step
from crosscut.training.batches import Batches
from crosscut.training.optimization import averaging
from crosscut.training.optimization.optimizer import MOMENTUM, LocalAdamW
from crosscut.training.saving import RunCheckpoints
from tests.training.test_resume import HERE, checkpoint_of, record, train

PAGE = Path(__file__).parents[2] / "docs" / "tables" / "resume-faults.md"
DONE = 3
"""Steps before the resume."""

ALL = (
    "model.positions=rotary", "model.norm=rms", "model.layers=attention relu2", "model.biases=none", "model.tied=false",
    "model.qk_norm=true", "model.embedding_norm=true", "model.logit_softcap=5.0",
    "training.z_loss=1e-3", "training.initial_spread=fan_in", "training.zero_initial_outputs=true",
    "training.batch_size=8", "training.initial_batch_size=4", "training.ramp_steps=4",
    "optimizer.schedule=wsd", "optimizer.decay_steps=2", "optimizer.min_learning_rate=0.0",
    "optimizer.embedding_learning_rate=0.02", "optimizer.head_learning_rate=0.004",
    "optimizer.matrices=muon", "optimizer.matrix_learning_rate=0.02", "optimizer.scalar_learning_rate=0.01",
    "optimizer.ema_decay=0.5",
)  # fmt: skip
"""All options of docs/recipe.md at once. The norms keep their weights, so that there are scalars. The run is on a
mixture of token folders, and documents do not see each other (`mixed_run`)."""

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Fault:
    """A fault, and the first thing that must differ for it."""

    plant: Callable[[Patch], None]
    differs: str


def _schedule_restarts(patch: Patch) -> None:
    rate = training_step.learning_rate
    patch.setattr(training_step, "learning_rate", lambda step, **run: rate(step - DONE, **run))


def _batch_restarts(patch: Patch) -> None:
    take = Batches.micro_batches
    patch.setattr(Batches, "micro_batches", lambda self, step: take(self, step - DONE))


def _forget(patch: Patch, name: str) -> None:
    load = RunCheckpoints.load

    def without(self: RunCheckpoints, folder: Any) -> Any:
        progress = load(self, folder)
        moments = [state[name] for state in self.trainer.optimizer.state.values() if name in state]
        assert moments
        for moment in moments:
            moment.zero_()
        return progress

    patch.setattr(RunCheckpoints, "load", without)


def _decay_restarts(patch: Patch) -> None:
    decay = averaging.decay_after
    patch.setattr(averaging, "decay_after", lambda step, highest: decay(step - DONE, highest))


def _average_forgotten(patch: Patch) -> None:
    load = RunCheckpoints.load

    def without_average(self: RunCheckpoints, folder: Any) -> Any:
        progress = load(self, folder)
        assert self.trainer.average is not None
        self.trainer.average.has_begun = False
        return progress

    patch.setattr(RunCheckpoints, "load", without_average)


def _roles_forgotten(patch: Patch) -> None:
    load = RunCheckpoints.load

    def without_roles(self: RunCheckpoints, folder: Any) -> Any:
        optimizer = self.trainer.optimizer
        assert isinstance(optimizer, LocalAdamW)
        optimizer.factors.clear()
        return load(self, folder)

    patch.setattr(RunCheckpoints, "load", without_roles)


FAULTS = {
    "a schedule that restarts after a resume": Fault(_schedule_restarts, "loss of step 5"),
    "a growing batch that restarts after a resume": Fault(_batch_restarts, "samples of step 4"),
    "first moments that a resume forgets": Fault(partial(_forget, name="exp_avg"), "loss of step 5"),
    "Muon's momentum that a resume forgets": Fault(partial(_forget, name=MOMENTUM), "loss of step 5"),
    "learning rates by role that a resume forgets": Fault(_roles_forgotten, "loss of step 5"),
    "a decay of the average that is counted from the resume": Fault(_decay_restarts, "average of the weights"),
    "an average of the weights that begins anew after a resume": Fault(_average_forgotten, "average of the weights"),
}


def record_with(fault: str, run: RunConfig, resume_from: Path) -> dict[str, Any]:
    """On a rank: train with a fault planted."""
    with pytest.MonkeyPatch.context() as patch:
        FAULTS[fault].plant(patch)
        return record(run, resume_from)


def first_difference(whole: dict[str, Any], resumed: dict[str, Any]) -> str:
    """Name of the first thing in which a resumed run differs from the run that never stopped; empty if nothing does."""
    for step in sorted(resumed["losses"]):
        if resumed["seen"][step] != whole["seen"][step]:
            return f"samples of step {step + 1}"
        if resumed["losses"][step] != whole["losses"][step]:
            return f"loss of step {step + 1}"
    for kind, told in (("weights", ""), ("averages", "average of the weights")):
        for name, tensor in whole[kind].items():
            if not torch.equal(tensor, resumed[kind][name]):
                return told or name
    return ""


LAYOUTS = {
    "tensor 2, split": ("layout.tensor=2", "layout.sequence_parallel=true"),
    "zero3": ("layout.data=2", "layout.sharding=zero3"),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_with_all_options_of_the_recipe_goes_on_to_the_last_bit(ranks, mixed_run, layout):
    run = mixed_run(*HERE, *ALL, *LAYOUTS[layout])
    whole, resumed = train(ranks, run), train(ranks, run, checkpoint_of(run, DONE))
    assert [first_difference(ours, theirs) for ours, theirs in zip(whole, resumed, strict=True)] == ["", ""]
    assert sorted(resumed[0]["losses"]) == [3, 4, 5]


@pytest.mark.one_in(len(FAULTS))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_resume_is_found(ranks, mixed_run, tmp_path_factory, once, fault):
    never_stopped = once("run", lambda: mixed_run(*HERE, *ALL, f"output.folder={tmp_path_factory.mktemp('whole')}/run"))
    (whole,) = once("results", lambda: train(ranks, never_stopped))
    run = mixed_run(*HERE, *ALL)
    (resumed,) = ranks.run(1, record_with, fault, run, checkpoint_of(never_stopped, DONE), time_limit=240)
    assert first_difference(whole, resumed) == FAULTS[fault].differs
    assert f"| {fault} | {FAULTS[fault].differs} |" in PAGE.read_text(encoding="utf-8")
