"""The planner's account of what a step sends is the account of what it sends."""

from collections import Counter

import pytest

from crosscut.parallel import CollectiveRecorder
from crosscut.parallel.state.agreement import find_drift
from crosscut.planner import Candidate, comparison_traffic, parameters_per_rank
from tests.rehearsal.cases import planned_messages
from tests.training.jobs import parts, record_step
from tests.training.pipeline.jobs import EXACT

LAYOUTS = [
    ("layout.tensor=2", "layout.data=2", "layout.sequence_parallel=true"),
    ("layout.tensor=2", 'training.recompute="full"'),
    ("layout.tensor=4",),
    ("layout.data=2",),
    ("layout.tensor=2", "layout.data=2", "training.micro_batch_size=1"),
    ("layout.tensor=2", "layout.data=2", "layout.sequence_parallel=true", "training.precision=bfloat16"),
    ("layout.tensor=2", "layout.sequence_parallel=true", 'training.recompute="full"', "training.recompute_every=2"),
    ("layout.tensor=2", "layout.sequence_parallel=true", 'training.recompute="selective"'),
    ("layout.tensor=2", "layout.sequence_parallel=true", 'training.recompute="operators"'),
]
SHARDED = [
    ("layout.data=2", "layout.sharding=zero2", "training.micro_batch_size=1"),
    ("layout.data=2", "layout.sharding=zero3", 'training.recompute="full"'),
    ("layout.tensor=2", "layout.data=2", "layout.sharding=zero2"),
    ("layout.data=2", "layout.sharding=zero3", "training.micro_batch_size=1"),
    ("layout.tensor=2", "layout.data=2", "layout.sharding=zero3", "training.precision=bfloat16"),
    ("layout.tensor=2", "layout.data=2", "layout.sharding=zero3", "layout.sequence_parallel=true"),
    ("layout.data=4", "layout.sharding=zero2", "layout.shard_group=2"),
]
MUON = ("optimizer.matrices=muon", "optimizer.matrix_learning_rate=0.02")
SHARDED = [*SHARDED[:3], ("optimizer.ema_decay=0.9", *MUON, *SHARDED[4]), *SHARDED[3:], (*MUON, *SHARDED[6])]

STAGED = [
    (
        "layout.pipeline=2",
        "layout.tensor=2",
        "layout.sequence_parallel=true",
        "layout.schedule=zero_bubble",
        "training.recompute=selective",
        "training.precision=bfloat16",
    ),
    ("layout.pipeline=2", "layout.data=2", "layout.sharding=zero2"),
    ("layout.pipeline=2", "layout.tensor=2"),
    ("layout.pipeline=4", "layout.schedule=zero_bubble", "model.tied=false"),
    ("layout.pipeline=2", "layout.stages=[3,1]", "model.lora_rank=4"),
    ("layout.pipeline=2", "layout.tensor=2", "training.recompute=full", "training.recompute_every=2"),
    ("layout.pipeline=2", "layout.tensor=2", "layout.sequence_parallel=true", "layout.stages_per_rank=2"),
    ("layout.pipeline=2", "layout.data=2", "model.num_kv_heads=2", "model.positions=rotary"),
    ("layout.pipeline=2", "layout.data=2", "layout.sharding=zero3", "layout.stages_per_rank=2", "model.tied=false"),
    ("layout.pipeline=2", "layout.data=2", "layout.sharding=zero3", *MUON),
    ("layout.pipeline=4", *MUON, 'model.layers=["attention gelu", "attention swiglu"]'),
    ("layout.pipeline=2",),
]
"""Eight micro-batches of a model of four layers."""

COMPARED = [SHARDED[6], SHARDED[0], *LAYOUTS[:4]]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("options", LAYOUTS + SHARDED, ids=" ".join)
def test_recorded_collectives_are_the_planned_ones(ranks, run_with, options):
    run = run_with("model.dropout=0.0", *options)
    assert Counter(ranks.run(run.layout.world_size, record_step, run)[0]) == planned_messages(run, compiled=None)


@pytest.mark.one_in(11)
@pytest.mark.parametrize("options", STAGED, ids=" ".join)
def test_each_stage_sends_the_planned_messages(ranks, run_with, options):
    run = run_with(*EXACT[1:], "model.dropout=0.0", *options)
    for rank, recorded in enumerate(ranks.run(run.layout.world_size, record_step, run)):
        place = run.layout.place_of(rank)["pipeline"]
        assert Counter(recorded) == planned_messages(Candidate.at(run, place), compiled=None), (rank, place)


def record_comparison(run) -> list[tuple[str, str, int]]:
    trainer, _ = parts(run)
    with CollectiveRecorder(trainer.mesh) as recorder:
        assert find_drift(dict(trainer.model.named_parameters()), trainer.mesh) is None
    return [tuple(sent) for sent in recorder.sent]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("options", COMPARED, ids=" ".join)
def test_recorded_comparison_of_replicas_is_the_planned_one(ranks, run_with, options):
    run = run_with(*options)
    recorded = ranks.run(run.layout.world_size, record_comparison, run)[0]
    assert recorded == [(c.operation, c.axis, c.elements) for c in comparison_traffic(run)]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("options", [*STAGED[1:4], STAGED[-1]], ids=" ".join)
def test_recorded_comparison_of_stages_is_the_planned_one(ranks, run_with, options):
    run = run_with(*EXACT[1:], *options)
    for rank, recorded in enumerate(ranks.run(run.layout.world_size, record_comparison, run)):
        of_rank = comparison_traffic(Candidate.at(run, run.layout.place_of(rank)["pipeline"]))
        assert recorded == [(c.operation, c.axis, c.elements) for c in of_rank]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("options", LAYOUTS[:3], ids=" ".join)
def test_planned_parameters_are_held(ranks, run_with, options):
    run = run_with(*options)
    assert set(ranks.run(run.layout.world_size, held, run)) == {parameters_per_rank(run.model, run.layout)}


def held(run) -> int:
    trainer, _ = parts(run)
    return sum(p.to_local().numel() for p in trainer.parameters)


def test_per_layer_two_all_reduces_forward_and_two_backward(ranks, run_with):
    run = run_with("layout.tensor=2", "model.dropout=0.0", "model.num_layers=5")
    recorded = ranks.run(2, record_step, run)[0]
    size = run.training.batch_size * run.training.sequence_length * run.model.hidden_size
    of_layers = [sent for sent in recorded if sent == ("all_reduce", "tensor", size, 4)]
    assert len(of_layers) == 4 * 5 + 2  # the embedding's g forward and the loss's f backward
    others = [elements for _, _, elements, _ in recorded if elements != size]
    tokens = run.training.batch_size * run.training.sequence_length
    assert sum(others) <= 3 * tokens + 100  # the loss's scalars and the gradient norm
