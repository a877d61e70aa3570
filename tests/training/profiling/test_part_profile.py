"""Each part of each layer gets the time in which it runs, and the FLOPs that PyTorch counts in the same interval."""

import json
import math
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from crosscut.config import Layout, ModelConfig, RunConfig, TrainingConfig
from crosscut.logbook.schema import BY_NAME, PARTS_FILE
from crosscut.model import Batch
from crosscut.parallel import IGNORED, make_mesh
from crosscut.planner import flops_per_step, hardware_flops_per_rank, parameters_per_rank
from crosscut.planner.compute import flops_of_parts
from crosscut.training.precision import resolve_on
from crosscut.training.profiling.part_profile import PartRow, RankParts, slowest_ranks
from crosscut.training.profiling.part_times import FINAL_NORM, HEAD, PartTimer, Place, Seconds
from crosscut.training.step import Trainer
from tests.rehearsal.cases import (
    BERT,
    CHANNELS,
    DEEPSEEK,
    DELTA,
    HYBRID,
    LATENT,
    LLAMA,
    MASKED,
    NORMS_ON_OUTPUTS,
    SIZES,
)
from tests.training.jobs import loop

CPU = torch.device("cpu")
FAMILIES = {
    "gpt2": {"dropout": 0.0},
    "llama": LLAMA,
    "mamba2": HYBRID,
    "mamba": CHANNELS,
    "delta": DELTA,
    "latent": LATENT,
    "experts": DEEPSEEK,
    "norms on outputs": {**LLAMA, **NORMS_ON_OUTPUTS},
    "bert": {**BERT, **MASKED, "dropout": 0.0},
}


def added(_total: list[int], a: list[int], b: list[int], **_: object) -> int:
    return 2 * a[0] * a[1] * b[1]


def linear(x: list[int], weight: list[int], *_: object, **__: object) -> int:
    return 2 * math.prod(x) * weight[0]


def solved(system: list[int], wanted: list[int], **_: object) -> int:
    return 2 * math.prod(wanted) * system[-1]


UNCOUNTED = {
    torch.ops.aten.addmm_: added,
    torch.ops.mkldnn._linear_pointwise: linear,
    torch.ops.aten.linalg_solve_triangular: solved,
}
"""Operators of products that PyTorch's counter does not know, with their formulas."""


class Counting(PartTimer):
    """Timer that also counts FLOPs in its intervals."""

    def __init__(self, trainer: Trainer, counter: FlopCounterMode) -> None:
        super().__init__(trainer)
        self.counter, self.counted = counter, Counter[tuple[Place, str]]()
        self.last: tuple[tuple[Place, str], int] | None = None

    def _mark(self, place: Place, way: Any) -> None:
        super()._mark(place, way)
        total = self.counter.get_total_flops()
        if self.last is not None:
            self.counted[self.last[0]] += total - self.last[1]
        self.last = (place, way.name), total


def small_run(**model: Any) -> RunConfig:
    training = TrainingConfig(batch_size=4, micro_batch_size=2, sequence_length=96, device="cpu", precision="float32")
    return RunConfig(model=ModelConfig(**{**SIZES, **model}), training=training)


def counted_flops(model: dict[str, Any]) -> tuple[dict[tuple[Place, str], int], RunConfig]:
    run = small_run(**model)
    trainer = Trainer(resolve_on(run, CPU), make_mesh(run.layout, CPU))
    tokens = torch.randint(0, run.model.vocab_size, (2, 96))
    batch = Batch(tokens=tokens, targets=tokens)
    if run.model.predicts_masked:
        order = torch.zeros(2, dtype=torch.long)
        targets = tokens.masked_fill(torch.arange(96) > 4, IGNORED)
        batch = Batch(tokens=tokens, targets=targets, segments=torch.zeros_like(tokens), order=order)
        batch = batch.with_predicted(run.mask_fraction)
    with FlopCounterMode(display=False, custom_mapping=UNCOUNTED) as counter, sdpa_kernel(SDPBackend.MATH):
        timer = Counting(trainer, counter)
        with timer.step():
            trainer.step(0, [batch, batch])
    return {key: count for key, count in timer.counted.items() if count}, run


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_planned_flops_of_each_part_are_those_that_pytorch_counts_while_the_part_runs(ranks, family):
    (counted, run), *_ = ranks.run(1, counted_flops, FAMILIES[family])
    planned = Counter[tuple[Place, str]]()
    for place, flops in flops_of_parts(run).items():
        planned[Place(*place), "FORWARD"], planned[Place(*place), "BACKWARD"] = flops.forward, flops.backward
    if run.model.predicts_masked:  # the gradient of the logits' bias is a product with ones, and no matrix product
        planned[HEAD, "FORWARD"] += run.num_micro_batches * 2 * run.predicted_tokens * run.model.vocab_size
    assert counted == {key: count for key, count in planned.items() if count}


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2, data=2), Layout(context=2, data=2)])
def test_flops_of_all_parts_and_ranks_are_those_of_the_step(layout):
    for model in (LLAMA, HYBRID, DELTA, {**LATENT, "vocab_size": 2047}):
        run = replace(small_run(**model), layout=layout)
        parts = flops_of_parts(run).values()
        assert layout.world_size * sum(one.forward + one.backward for one in parts) == pytest.approx(
            hardware_flops_per_rank(run) * layout.world_size, rel=1e-3
        )


class Sleep(torch.autograd.Function):
    """Identity that takes 40 ms in the forward pass and 80 ms in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.04)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(0.08)
        return grad


def sleepy_parts(name: str, recompute: str) -> dict[Place, Seconds]:
    """Times of a step in which a module of the model sleeps."""
    run = small_run(dropout=0.0)
    run = replace(run, training=replace(run.training, recompute=recompute))
    trainer = Trainer(resolve_on(run, CPU), make_mesh(run.layout, CPU))
    module = trainer.model.get_submodule(name)
    forward = module.forward
    module.forward = lambda x, *more: forward(Sleep.apply(x), *more)
    tokens = torch.randint(0, run.model.vocab_size, (2, 96))
    trainer.step(0, [Batch(tokens=tokens, targets=tokens)])
    timer = PartTimer(trainer)
    with timer.step():
        trainer.step(1, [Batch(tokens=tokens, targets=tokens)])
    seconds, parts = timer.usual()
    assert sum(part.total for part in parts.values()) == pytest.approx(seconds)
    return parts


@pytest.mark.parametrize(
    ("name", "place", "recompute"),
    [
        ("blocks.1.attention", Place(1, "attention"), "none"),
        ("blocks.2.mlp_norm", Place(2, "mlp_norm"), "none"),
        ("blocks.0.mlp", Place(0, "mlp"), "full"),
        ("blocks.1.attention", Place(1, "attention"), "operators"),
        ("final_norm", FINAL_NORM, "none"),
    ],
)
def test_time_of_a_part_is_found_in_its_own_row(ranks, name, place, recompute):
    parts = ranks.run(1, sleepy_parts, name, recompute)[0]
    again = 0.04 if recompute == "full" else 0.0
    assert parts[place].forward > 0.04
    assert parts[place].backward > 0.08 + again
    assert (parts[place].again > 0.03) == bool(again)
    assert parts[place].total > max(part.total for other, part in parts.items() if other != place)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "more"),
    [
        ("tensor=2", ()),
        ("tensor=2 data=2 sequence_parallel=true", ("training.recompute=full",)),
        ("data=4 sharding=zero3", ()),
        ("pipeline=2 schedule=zero_bubble data=2", ("training.micro_batch_size=1",)),
    ],
)
def test_profile_of_a_run_has_the_parts_of_the_slowest_ranks(ranks, run_with, layout, more):
    settings = ("training.steps=10", "training.validate_every=0", "checkpoint.every=0", "model.num_layers=2", *more)
    run = run_with(*settings, "training.batch_size=8", *(f"layout.{setting}" for setting in layout.split()))
    ranks.run(run.layout.world_size, loop, run, None, None, True, time_limit=300.0)
    told = json.loads((Path(run.output.folder) / PARTS_FILE).read_text())
    assert BY_NAME[PARTS_FILE].require_known(told) == "profile"
    assert [one["pipeline"] for one in told["ranks"]] == list(range(run.layout.pipeline))
    rows = [row for one in told["ranks"] for row in one["parts"]]
    for one in told["ranks"]:
        assert sum(row["forward_seconds"] + row["backward_seconds"] for row in one["parts"]) == pytest.approx(
            one["seconds"]
        )
        assert all(row["repeated_seconds"] <= row["backward_seconds"] for row in one["parts"])
    repeats = run.training.recompute == "full"
    assert any(row["repeated_seconds"] for row in rows) == repeats
    flops = sum(row["forward_flops"] + row["backward_flops"] for row in rows)
    assert flops * run.layout.tensor * run.layout.data == flops_per_step(run)
    shares = run.layout.data if run.layout.sharding != "none" else 1
    held = parameters_per_rank(run.model, run.layout) / shares
    copies = 512 * 64 if run.layout.pipeline > 1 else 0  # the last stage's copy of the tied embedding
    assert sum(row["parameters"] for row in rows) == held + copies
    deferred = [row for row in rows if row["part"] == "weight gradients"]
    assert len(deferred) == (run.layout.pipeline if run.layout.pipeline > 1 else 0)
    assert all(row["backward_flops"] and row["backward_seconds"] for row in deferred)


def test_rank_that_waits_least_is_the_slowest_at_its_place_of_the_pipeline():
    def rank(pipeline: int, waited: float) -> RankParts:
        row = PartRow(
            layer=None, part="optimizer", kind="optimizer", forward_seconds=1.0, backward_seconds=0.0,
            repeated_seconds=0.0, message_seconds=waited, forward_flops=0, backward_flops=0, parameters=0,
            utilisation=None,
        )  # fmt: skip
        return RankParts(pipeline=pipeline, seconds=1.0, parts=[row])

    found = slowest_ranks([rank(0, 0.5), rank(1, 0.1), rank(0, 0.2), rank(1, 0.3)])
    assert [(one.pipeline, one.rank) for one in found] == [(0, 2), (1, 1)]
